"""A finished session as one trainable token sequence.

Invariant: nothing is repaired here. A record whose parts disagree (lengths, version spans, kept
sets) raises `DataError` and names the session, because every later number rests on it.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rlmix.core.candidates import Candidates
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
    kept, kept_exact = _kept_sets(trajectory, turns, ids=ids, mask=mask, logprobs=logprobs)
    head = _heads(trajectory, turns)
    return TrainSample(
        session_id=trajectory.session_id,
        ids=ids,
        mask=mask,
        sampler_logprobs=logprobs,
        advantage=float(advantage),
        versions=versions,
        pools=pools,
        pool_names=pool_names,
        kept_offsets=_offsets(kept, mask),
        kept_ids=None if kept is None else kept.ids,
        kept_logprobs=None if kept is None else kept.logprobs,
        kept_exact=kept_exact,
        head_offsets=_offsets(head, mask),
        head_ids=None if head is None else head.ids,
        head_logprobs=None if head is None else head.logprobs,
        experts=_experts(trajectory, turns, length=end),
        reward=trajectory.reward,
    )


def _experts(trajectory: Trajectory, turns: Sequence[Turn], *, length: int) -> np.ndarray | None:
    """int16 [length, layers, top_k], -1 where no turn recorded a route; None without any.

    A turn's record covers the tokens that were new to the engine in that turn, so a token keeps
    the experts it had when the token after it was sampled, whatever replica or version came later.
    """
    shapes = {turn.experts.shape[1:] for turn in turns if turn.experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise DataError(
            f"{_where(trajectory)}: turns recorded experts of different sizes {sorted(shapes)}; "
            "all pools must serve the same model"
        )
    experts = np.full((length, *shapes.pop()), -1, dtype=np.int16)
    start, end = 0, len(trajectory.prompt_ids)
    for index, turn in enumerate(turns):
        end += len(turn.output_ids)
        if turn.experts is not None:
            if len(turn.experts) != end - 1 - start:
                raise DataError(
                    f"{_where(trajectory)}: turn {index} has {end - 1 - start} new context tokens "
                    f"but experts of {len(turn.experts)}"
                )
            experts[start : end - 1] = turn.experts
        start = end - 1
        end += len(turn.observation_ids)
    return experts


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
    for name, sets in (("kept sets", turn.kept), ("heads", turn.head)):
        if sets is not None and len(sets) != num_sampled:
            raise DataError(f"{where}: {num_sampled} sampled tokens but {len(sets)} {name}")


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
) -> tuple[Candidates | None, bool]:
    """(one set per sampled token, is exact); None without kept sets."""
    sampling = [turn for turn in turns if turn.output_ids]
    kinds = {(turn.kept is not None, turn.kept_exact) for turn in sampling}
    if not any(has_kept for has_kept, _ in kinds):
        return None, True
    if len(kinds) > 1:
        raise DataError(
            f"{_where(trajectory)}: some turns recorded kept sets, others heads or nothing; "
            "a session must record one kind throughout"
        )
    kept = Candidates.joined(turn.kept for turn in sampling if turn.kept is not None)
    if (kept.sizes == 0).any():
        raise DataError(f"{_where(trajectory)}: a kept set is empty")
    kept_exact = sampling[0].kept_exact
    _check_mass(trajectory, kept, name="kept set", is_whole=kept_exact)
    _check_sampled(trajectory, kept, ids[mask], logprobs[mask], kept_exact=kept_exact)
    return kept, kept_exact


def _heads(trajectory: Trajectory, turns: Sequence[Turn]) -> Candidates | None:
    """One head per sampled token, empty for turns without; None when no turn has one."""
    sampling = [turn for turn in turns if turn.output_ids]
    if all(turn.head is None for turn in sampling):
        return None
    heads = Candidates.joined(
        Candidates.of([()] * len(turn.output_ids), [()] * len(turn.output_ids))
        if turn.head is None
        else turn.head
        for turn in sampling
    )
    _check_mass(trajectory, heads, name="head", is_whole=False)
    return heads


def _offsets(candidates: Candidates | None, mask: np.ndarray) -> np.ndarray | None:
    """int32 [T + 1]: the sets of the sampled tokens among all tokens of the sequence."""
    if candidates is None:
        return None
    sizes = np.zeros(len(mask), dtype=np.int32)
    sizes[mask] = candidates.sizes
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _check_mass(trajectory: Trajectory, sets: Candidates, *, name: str, is_whole: bool) -> None:
    mass = sets.mass()
    is_bad = ~(mass <= 1 + KEPT_SUM_TOLERANCE)
    if is_whole:
        is_bad |= ~(mass >= 1 - KEPT_SUM_TOLERANCE)
    if is_bad.any():
        token = int(np.argmax(is_bad))
        allowed = "1" if is_whole else "at most 1"
        raise DataError(
            f"{_where(trajectory)}: the {name} of sampled token {token} has probabilities that "
            f"sum to {mass[token]:.6f}, must be {allowed}"
        )


def _check_sampled(
    trajectory: Trajectory,
    kept: Candidates,
    sampled_ids: np.ndarray,
    sampled_logprobs: np.ndarray,
    *,
    kept_exact: bool,
) -> None:
    slots, hits = kept.find(sampled_ids)
    if (hits > 1).any() or (kept_exact and (hits == 0).any()):
        token = int(np.argmax((hits > 1) | (kept_exact & (hits == 0))))
        raise DataError(
            f"{_where(trajectory)}: sampled token {token} (id {sampled_ids[token]}) appears "
            f"{hits[token]} times in its own kept set, must be once"
        )
    found = slots >= 0
    gap = np.abs(kept.logprobs[slots[found]] - sampled_logprobs[found])
    if gap.size and not gap.max() <= SAMPLED_TOLERANCE:
        raise DataError(
            f"{_where(trajectory)}: a sampled token's logprob differs by {gap.max():.4f} from the "
            "one in its kept set; was it taken before renormalisation?"
        )
