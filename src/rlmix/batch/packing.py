"""Samples into micro-batches under a token budget: in rows of their own, or one behind another.

Invariants: every sample is in exactly one micro-batch, whole; rows times longest row, or the sum of
the documents in the single row, never exceeds the budget; samples that need different arithmetic
(kept sets, heads, neither; with or without gradient) never share one; the result depends on the
samples only, not on time or hashing.
"""

# B rows, T padded length, P policy tokens of the micro-batch, H those with a head, K slots

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlmix.batch.balance import split_documents, split_rows
from rlmix.core.errors import DataError
from rlmix.core.sample import TrainSample

LAYOUTS = {"rows": split_rows, "documents": split_documents}
"""`rows`: a sample has a row, padded to the longest of the micro-batch. `documents`: all samples
of a micro-batch lie one behind another in one row, and nothing is padded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward (and backward) pass reads."""

    session_ids: tuple[str, ...]
    ids_BT: np.ndarray
    """int64, right-padded with 0: a causal model never lets a real token see the padding."""
    num_tokens: int
    """Real tokens, padding not counted."""
    needs_gradient: bool
    """False when every advantage is 0: the logprobs are still measured."""
    rows_P: np.ndarray
    """int64: which of the micro-batch's samples each policy token belongs to."""
    cols_P: np.ndarray
    """int64, >= 1: its place in its sample; the logits that predict it sit one to the left."""
    sampled_P: np.ndarray
    """int64 token ids."""
    sampler_logprobs_P: np.ndarray
    """float32."""
    advantages_P: np.ndarray
    """float32."""
    versions_P: np.ndarray
    """int64."""
    pools_P: np.ndarray
    """int64, index into the step's pool names."""
    sequences_P: np.ndarray
    """int64, number of the sample in the step."""
    kept_ids_PK: np.ndarray | None
    """int64, 0 in padded slots."""
    kept_logprobs_PK: np.ndarray | None
    """float32, -inf in padded slots."""
    kept_exact: bool
    head_tokens_H: np.ndarray | None = None
    """int64, ascending: the policy tokens (index into P) with a head beside their exact kept set;
    None: none has one."""
    head_ids_HK: np.ndarray | None = None
    """int64, 0 in padded slots; K is the longest head, not that of the kept sets."""
    head_logprobs_HK: np.ndarray | None = None
    """float32, the sampler's over the whole vocabulary, -inf in padded slots."""
    experts_BTLK: np.ndarray | None = None
    """int16 [B, T, layers, experts per token], -1 where nothing was recorded and in the padding;
    None: nothing was recorded for any token."""
    starts: np.ndarray | None = None
    """int64 [samples + 1]: where in the single row each sample begins, and the row's end. None:
    every sample has a row."""

    @property
    def places_P(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of each policy token in `ids_BT`."""
        if self.starts is None:
            return self.rows_P, self.cols_P
        return np.zeros_like(self.rows_P), self.starts[self.rows_P] + self.cols_P

    def has_support(self, *, replay: bool) -> bool:
        """Whether candidates were recorded that sampler and trainer can both sum over.

        Exact kept sets are such a support only when `replay` puts the trainer on them, too.
        """
        return self.kept_logprobs_PK is not None and (replay or not self.kept_exact)


def pool_names_of(samples: Sequence[TrainSample]) -> tuple[str, ...]:
    """Names of all pools in the samples, sorted: the index space of `MicroBatch.pools_P`."""
    return tuple(sorted({name for sample in samples for name in sample.pool_names}))


def pack_samples(
    samples: Sequence[TrainSample], *, max_tokens: int, layout: str = "rows", num_ranks: int = 1
) -> list[MicroBatch]:
    """Length-sorted micro-batches of at most `max_tokens` tokens, padding included.

    Args:
        samples: any order; at least one policy token each, token 0 never one of them.
        max_tokens: budget of rows times padded length, or of all documents' tokens.
        layout: a key of `LAYOUTS`.
        num_ranks: among which the micro-batches will be shared out.
    Raises:
        DataError: a sample alone is longer than the budget, or its first token is a policy token.
    """
    pool_names = pool_names_of(samples)
    classes: dict[tuple[bool, bool, bool], list[int]] = {}
    for index, sample in enumerate(samples):
        if sample.mask[:1].any():
            raise DataError(
                f"batch: session {sample.session_id}: token 0 is a policy token, but nothing "
                "predicts it; a sample starts with its prompt"
            )
        kind = (sample.advantage != 0.0, sample.kept_ids is not None, sample.kept_exact)
        classes.setdefault(kind, []).append(index)
    micro_batches = []
    # Sorted, so that the order of accumulation does not depend on the order of arrival.
    for kind in sorted(classes, reverse=True):
        indices = classes[kind]
        lengths = [len(samples[index].ids) for index in indices]
        for chosen in LAYOUTS[layout](lengths, max_tokens=max_tokens, num_ranks=num_ranks):
            numbers = [indices[place] for place in chosen]
            micro_batches.append(
                _collate(
                    [samples[n] for n in numbers],
                    numbers=numbers,
                    pool_names=pool_names,
                    is_one_row=layout == "documents",
                )
            )
    return micro_batches


def _collate(
    samples: Sequence[TrainSample],
    *,
    numbers: Sequence[int],
    pool_names: tuple[str, ...],
    is_one_row: bool,
) -> MicroBatch:
    lengths = [len(sample.ids) for sample in samples]
    shape = (1, sum(lengths)) if is_one_row else (len(samples), max(lengths))
    starts = np.concatenate([[0], np.cumsum(lengths)]) if is_one_row else None
    ids_BT = np.zeros(shape, dtype=np.int64)
    for number, sample in enumerate(samples):
        ids_BT[_place(number, len(sample.ids), starts)] = sample.ids
    cols = [np.flatnonzero(sample.mask) for sample in samples]
    counts = [len(col) for col in cols]

    def joined(name: str, dtype: type) -> np.ndarray:
        parts = [getattr(sample, name)[col] for sample, col in zip(samples, cols, strict=True)]
        return np.concatenate(parts).astype(dtype)

    pool_maps = [np.array([pool_names.index(n) for n in s.pool_names]) for s in samples]
    kept_ids_PK, kept_logprobs_PK = _padded_kept(samples, cols)
    head_tokens_H, head_ids_HK, head_logprobs_HK = _padded_heads(samples, cols)
    return MicroBatch(
        session_ids=tuple(sample.session_id for sample in samples),
        ids_BT=ids_BT,
        num_tokens=sum(len(sample.ids) for sample in samples),
        needs_gradient=any(sample.advantage != 0.0 for sample in samples),
        rows_P=np.repeat(np.arange(len(samples)), counts),
        cols_P=np.concatenate(cols).astype(np.int64),
        sampled_P=joined("ids", np.int64),
        sampler_logprobs_P=joined("sampler_logprobs", np.float32),
        advantages_P=np.repeat(
            np.array([sample.advantage for sample in samples], dtype=np.float32), counts
        ),
        versions_P=joined("versions", np.int64),
        pools_P=np.concatenate(
            [pool_map[s.pools[c]] for pool_map, s, c in zip(pool_maps, samples, cols, strict=True)]
        ).astype(np.int64),
        sequences_P=np.repeat(np.array(numbers, dtype=np.int64), counts),
        kept_ids_PK=kept_ids_PK,
        kept_logprobs_PK=kept_logprobs_PK,
        kept_exact=samples[0].kept_exact,
        head_tokens_H=head_tokens_H,
        head_ids_HK=head_ids_HK,
        head_logprobs_HK=head_logprobs_HK,
        experts_BTLK=_padded_experts(samples, shape=shape, starts=starts),
        starts=starts,
    )


def _place(number: int, length: int, starts: np.ndarray | None) -> tuple[int, slice]:
    """Where a sample's tokens lie in [B, T]."""
    if starts is None:
        return number, slice(length)
    return 0, slice(int(starts[number]), int(starts[number]) + length)


def _padded_experts(
    samples: Sequence[TrainSample], *, shape: tuple[int, int], starts: np.ndarray | None
) -> np.ndarray | None:
    sizes = {sample.experts.shape[1:] for sample in samples if sample.experts is not None}
    if not sizes:
        return None
    if len(sizes) > 1:
        raise DataError(
            f"batch: sessions recorded experts of different sizes (layers, experts per token): "
            f"{sorted(sizes)}; all pools must serve the same model"
        )
    experts_BTLK = np.full((*shape, *sizes.pop()), -1, dtype=np.int16)
    for number, sample in enumerate(samples):
        if sample.experts is not None:
            experts_BTLK[_place(number, len(sample.ids), starts)] = sample.experts
    return experts_BTLK


def _padded_kept(
    samples: Sequence[TrainSample], cols: Sequence[np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    if samples[0].kept_offsets is None:
        return None, None
    offsets = [sample.kept_offsets for sample in samples if sample.kept_offsets is not None]
    sizes = np.concatenate(
        [np.diff(offset)[col] for offset, col in zip(offsets, cols, strict=True)]
    )
    return _padded(
        sizes,
        np.concatenate([s.kept_ids for s in samples if s.kept_ids is not None]),
        np.concatenate([s.kept_logprobs for s in samples if s.kept_logprobs is not None]),
    )


def _padded_heads(
    samples: Sequence[TrainSample], cols: Sequence[np.ndarray]
) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
    """(tokens, ids, logprobs) of the policy tokens that have a head; None when none has."""
    sizes_P = np.concatenate(
        [
            np.zeros(len(col), dtype=np.int64)
            if sample.head_offsets is None
            else np.diff(sample.head_offsets)[col]
            for sample, col in zip(samples, cols, strict=True)
        ]
    )
    tokens_H = np.flatnonzero(sizes_P)
    if not len(tokens_H):
        return None, None, None
    ids_HK, logprobs_HK = _padded(
        sizes_P[tokens_H],
        np.concatenate([s.head_ids for s in samples if s.head_ids is not None]),
        np.concatenate([s.head_logprobs for s in samples if s.head_logprobs is not None]),
    )
    return tokens_H, ids_HK, logprobs_HK


def _padded(
    sizes: np.ndarray, ids: np.ndarray, logprobs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of slots padded to the longest. Positions with mask 0 have no slots, so the flat slots
    of all samples are in the order of their tokens."""
    padded_ids = np.zeros((len(sizes), int(sizes.max())), dtype=np.int64)
    padded_logprobs = np.full(padded_ids.shape, -np.inf, dtype=np.float32)
    is_slot = np.arange(padded_ids.shape[1]) < sizes[:, None]
    padded_ids[is_slot] = ids
    padded_logprobs[is_slot] = logprobs
    return padded_ids, padded_logprobs
