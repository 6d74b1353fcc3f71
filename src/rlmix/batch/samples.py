"""A finished session as one trainable token sequence.

Invariant: nothing is repaired here. A record whose parts disagree (lengths, version spans, kept
sets) raises `DataError` and names the session, because every later number rests on it.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rlmix.core.errors import DataError
from rlmix.core.sample import TrainSample
from rlmix.core.trajectory import Trajectory, Turn

KEPT_SUM_TOLERANCE = 1e-3
"""How far a kept set's probabilities may sum from 1: float32 logprobs over thousands of ids stay
within 1e-4; a set cut off by a cap, or logprobs from before renormalisation, do not."""

SAMPLED_TOLERANCE = 1e-3
"""Nats between a token's own logprob and the one its kept set gives it."""


def to_sample(trajectory: Trajectory, *, advantage: float) -> TrainSample:
    """Join prompt, outputs and observations, and mark what the policy sampled.

    Tokens after the last sampled one are left out: no loss reads them.

    Args:
        trajectory: a session with at least one sampled token.
        advantage: dimensionless, put on every sampled token.
    Raises:
        DataError: the record contradicts itself.
    """
    turns = trajectory.turns
    if not any(turn.output_ids for turn in turns):
        raise DataError(f"{_where(trajectory)}: no sampled token to train on; leave it out")
    if not trajectory.prompt_ids:
        raise DataError(f"{_where(trajectory)}: the prompt is empty, so token 0 has no context")
    while not turns[-1].output_ids:
        turns = turns[:-1]
    for index, turn in enumerate(turns):
        _check_turn(turn, where=f"{_where(trajectory)}: turn {index}")
    parts = [trajectory.prompt_ids]
    sampled_parts = [np.zeros(len(trajectory.prompt_ids), dtype=bool)]
    for turn in turns:
        parts += [turn.output_ids, turn.observation_ids]
        sampled_parts += [
            np.ones(len(turn.output_ids), bool),
            np.zeros(len(turn.observation_ids), bool),
        ]
    end = sum(map(len, parts)) - len(turns[-1].observation_ids)
    ids = _flat(parts, np.int32)[:end]
    mask = np.concatenate(sampled_parts)[:end]
    logprobs = np.zeros(end, dtype=np.float32)
    logprobs[mask] = _flat([turn.sampler_logprobs for turn in turns], np.float32)
    if not np.isfinite(logprobs).all():
        raise DataError(
            f"{_where(trajectory)}: a sampled token has a logprob that is not finite; the engine "
            "cannot have drawn it"
        )
    versions = np.full(end, -1, dtype=np.int32)
    versions[mask] = np.concatenate([_turn_versions(turn) for turn in turns])
    pool_names = tuple(sorted({turn.pool for turn in turns if turn.output_ids}))
    pools = np.full(end, -1, dtype=np.int16)
    pools[mask] = np.repeat(
        [pool_names.index(turn.pool) if turn.output_ids else -1 for turn in turns],
        [len(turn.output_ids) for turn in turns],
    )
    kept_offsets, kept_ids, kept_logprobs, kept_exact = _kept_sets(
        trajectory, turns, ids=ids, mask=mask, logprobs=logprobs
    )
    return TrainSample(
        session_id=trajectory.session_id,
        ids=ids,
        mask=mask,
        sampler_logprobs=logprobs,
        advantage=float(advantage),
        versions=versions,
        pools=pools,
        pool_names=pool_names,
        kept_offsets=kept_offsets,
        kept_ids=kept_ids,
        kept_logprobs=kept_logprobs,
        kept_exact=kept_exact,
        reward=trajectory.reward,
    )


def _where(trajectory: Trajectory) -> str:
    return f"batch: session {trajectory.session_id} of task {trajectory.task_id}"


def _flat(parts: Sequence[Sequence[float]], dtype: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(parts), dtype=dtype, count=sum(map(len, parts)))


def _check_turn(turn: Turn, *, where: str) -> None:
    num_sampled = len(turn.output_ids)
    if len(turn.sampler_logprobs) != num_sampled:
        raise DataError(
            f"{where}: {num_sampled} sampled tokens but {len(turn.sampler_logprobs)} logprobs"
        )
    position = 0
    for span in turn.version_spans:
        if span.start != position or span.end < span.start or span.version < 0:
            raise DataError(
                f"{where}: version span {span.start}:{span.end} of version {span.version} does "
                f"not continue at token {position}"
            )
        position = span.end
    if position != num_sampled:
        raise DataError(f"{where}: version spans cover {position} of {num_sampled} sampled tokens")
    if turn.kept_ids is None or turn.kept_logprobs is None:
        return
    if len(turn.kept_ids) != num_sampled or len(turn.kept_logprobs) != num_sampled:
        raise DataError(
            f"{where}: {num_sampled} sampled tokens but {len(turn.kept_ids)} kept sets with "
            f"{len(turn.kept_logprobs)} logprob lists"
        )


def _turn_versions(turn: Turn) -> np.ndarray:
    return np.repeat(
        np.array([span.version for span in turn.version_spans], dtype=np.int32),
        [span.end - span.start for span in turn.version_spans],
    )


def _kept_sets(
    trajectory: Trajectory,
    turns: Sequence[Turn],
    *,
    ids: np.ndarray,
    mask: np.ndarray,
    logprobs: np.ndarray,
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None, bool]:
    """(offsets [T + 1], ids, logprobs, is exact); the first three None without kept sets."""
    sampling = [turn for turn in turns if turn.output_ids]
    kinds = {(turn.kept_ids is not None, turn.kept_exact) for turn in sampling}
    if not any(has_kept for has_kept, _ in kinds):
        return None, None, None, True
    if len(kinds) > 1:
        raise DataError(
            f"{_where(trajectory)}: some turns recorded kept sets, others heads or nothing; "
            "a session must record one kind throughout"
        )
    kept_lists = [kept for turn in sampling for kept in turn.kept_ids or ()]
    logprob_lists = [kept for turn in sampling for kept in turn.kept_logprobs or ()]
    sizes = np.fromiter(map(len, kept_lists), dtype=np.int64, count=len(kept_lists))
    logprob_sizes = np.fromiter(map(len, logprob_lists), dtype=np.int64, count=len(logprob_lists))
    if len(sizes) != len(logprob_sizes) or (sizes != logprob_sizes).any() or (sizes == 0).any():
        raise DataError(
            f"{_where(trajectory)}: kept ids and kept logprobs differ in length, or a kept set "
            "is empty"
        )
    kept_ids = _flat(kept_lists, np.int32)
    kept_logprobs = _flat(logprob_lists, np.float32)
    kept_exact = sampling[0].kept_exact
    _check_kept(
        trajectory,
        sizes=sizes,
        kept_ids=kept_ids,
        kept_logprobs=kept_logprobs,
        sampled_ids=ids[mask],
        sampled_logprobs=logprobs[mask],
        kept_exact=kept_exact,
    )
    all_sizes = np.zeros(len(ids), dtype=np.int64)
    all_sizes[mask] = sizes
    offsets = np.concatenate([[0], np.cumsum(all_sizes)]).astype(np.int32)
    return offsets, kept_ids, kept_logprobs, kept_exact


def _check_kept(
    trajectory: Trajectory,
    *,
    sizes: np.ndarray,
    kept_ids: np.ndarray,
    kept_logprobs: np.ndarray,
    sampled_ids: np.ndarray,
    sampled_logprobs: np.ndarray,
    kept_exact: bool,
) -> None:
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    token_of_slot = np.repeat(np.arange(len(sizes)), sizes)
    sums = np.add.reduceat(np.exp(kept_logprobs.astype(np.float64)), starts)
    is_bad_sum = ~(sums <= 1 + KEPT_SUM_TOLERANCE)
    if kept_exact:
        is_bad_sum |= ~(sums >= 1 - KEPT_SUM_TOLERANCE)
    if is_bad_sum.any():
        token = int(np.argmax(is_bad_sum))
        allowed = "1" if kept_exact else "at most 1"
        raise DataError(
            f"{_where(trajectory)}: the kept set of sampled token {token} has probabilities that "
            f"sum to {sums[token]:.6f}, must be {allowed}"
        )
    is_sampled = kept_ids == sampled_ids[token_of_slot]
    hits = np.add.reduceat(is_sampled.astype(np.int64), starts)
    if (hits > 1).any() or (kept_exact and (hits == 0).any()):
        token = int(np.argmax((hits > 1) | (kept_exact & (hits == 0))))
        raise DataError(
            f"{_where(trajectory)}: sampled token {token} (id {sampled_ids[token]}) appears "
            f"{hits[token]} times in its own kept set, must be once"
        )
    gap = np.abs(kept_logprobs[is_sampled] - sampled_logprobs[token_of_slot[is_sampled]])
    if gap.size and not gap.max() <= SAMPLED_TOLERANCE:
        raise DataError(
            f"{_where(trajectory)}: a sampled token's logprob differs by {gap.max():.4f} from the "
            "one in its kept set; was it taken before renormalisation?"
        )
