"""Candidate sets of sampled tokens: which ids each token could have been, and how likely.

One flat record instead of a list of lists, because a turn has thousands of slots and every room
between sampler and trainer handles them. Invariant: the arrays belong together (offsets ascend
from 0 to the number of slots) and cannot be written to.
"""

# N tokens, M slots of all their sets together

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Candidates:
    """One set of ids with logprobs for each of N sampled tokens."""

    offsets: np.ndarray
    """int32 [N + 1]: token n's set is slots offsets[n]:offsets[n + 1]."""
    ids: np.ndarray
    """int32 [M], token ids."""
    logprobs: np.ndarray
    """float32 [M], natural log, the sampler's."""

    def __post_init__(self) -> None:
        for name, dtype in (("offsets", np.int32), ("ids", np.int32), ("logprobs", np.float32)):
            values = np.ascontiguousarray(getattr(self, name), dtype=dtype).view()
            values.flags.writeable = False
            object.__setattr__(self, name, values)
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"{len(self.ids)} candidate ids, {len(self.logprobs)} logprobs")
        offsets = self.offsets
        is_ordered = len(offsets) > 0 and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
        if not is_ordered or offsets[-1] != len(self.ids):
            raise ValueError(f"candidate offsets do not ascend from 0 to {len(self.ids)} slots")

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> "Candidates":
        """From one list per token.

        Raises:
            ValueError: the lists differ in number or length.
        """
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} candidate sets, {len(logprobs)} sets of logprobs")
        sizes = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        differs = sizes != np.fromiter(map(len, logprobs), dtype=np.int64, count=len(ids))
        if differs.any():
            token = int(differs.argmax())
            raise ValueError(
                f"position {token}: {len(ids[token])} candidate ids, "
                f"{len(logprobs[token])} logprobs"
            )
        num_slots = int(sizes.sum())
        return cls(
            offsets=np.concatenate(([0], sizes.cumsum())),
            ids=np.fromiter(chain.from_iterable(ids), dtype=np.int32, count=num_slots),
            logprobs=np.fromiter(chain.from_iterable(logprobs), dtype=np.float32, count=num_slots),
        )

    @classmethod
    def joined(cls, parts: Iterable["Candidates"]) -> "Candidates":
        """The sets of several records, one after the other."""
        parts = list(parts)
        sizes = [np.diff(part.offsets) for part in parts]
        return cls(
            offsets=np.concatenate([[0], *sizes]).cumsum(),
            ids=np.concatenate([np.empty(0, np.int32), *(part.ids for part in parts)]),
            logprobs=np.concatenate([np.empty(0, np.float32), *(part.logprobs for part in parts)]),
        )

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        """Same sets, bit for bit (NaN equals the same NaN)."""
        if not isinstance(other, Candidates):
            return NotImplemented
        return (
            np.array_equal(self.offsets, other.offsets)
            and np.array_equal(self.ids, other.ids)
            and self.logprobs.tobytes() == other.logprobs.tobytes()
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, tuple[bytes, bytes, bytes]]:
        # Three byte strings: a third of the size and time of three arrays with their headers,
        # and read-only again on the other side.
        return _restored, (self.offsets.tobytes(), self.ids.tobytes(), self.logprobs.tobytes())

    @property
    def sizes(self) -> np.ndarray:
        """int32 [N], slots of each token."""
        return np.diff(self.offsets)

    @property
    def tokens(self) -> np.ndarray:
        """int64 [M], the token that each slot belongs to."""
        return np.repeat(np.arange(len(self)), self.sizes)

    @property
    def num_bytes(self) -> int:
        return self.offsets.nbytes + self.ids.nbytes + self.logprobs.nbytes

    def slice(self, start: int, end: int) -> "Candidates":
        """The sets of tokens start:end, without a copy of the slots."""
        first, last = self.offsets[start], self.offsets[end]
        return Candidates(
            offsets=self.offsets[start : end + 1] - first,
            ids=self.ids[first:last],
            logprobs=self.logprobs[first:last],
        )

    def lists(self) -> tuple[list[list[int]], list[list[float]]]:
        """Ids and logprobs as one list per token."""
        ids, logprobs, offsets = self.ids.tolist(), self.logprobs.tolist(), self.offsets.tolist()
        spans = list(pairwise(offsets))
        return [ids[a:b] for a, b in spans], [logprobs[a:b] for a, b in spans]

    def mass(self) -> np.ndarray:
        """float64 [N], probability of each set."""
        probs_M = np.exp(self.logprobs.astype(np.float64))
        return np.bincount(self.tokens, weights=probs_M, minlength=len(self))

    def find(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where one id per token sits in that token's set.

        Args:
            ids: integer [N].
        Returns:
            (int64 [N] slot, -1 where it is not there; int64 [N] how often it is there).
        """
        tokens_M = self.tokens
        hits = np.flatnonzero(self.ids == np.asarray(ids)[tokens_M])
        slots_N = np.full(len(self), -1, dtype=np.int64)
        slots_N[tokens_M[hits]] = hits
        return slots_N, np.bincount(tokens_M[hits], minlength=len(self))


def _restored(offsets: bytes, ids: bytes, logprobs: bytes) -> Candidates:
    return Candidates(
        offsets=np.frombuffer(offsets, dtype=np.int32),
        ids=np.frombuffer(ids, dtype=np.int32),
        logprobs=np.frombuffer(logprobs, dtype=np.float32),
    )
