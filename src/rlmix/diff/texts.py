"""Frozen texts: token ids, which of them were sampled, and what the sampler recorded.

Every comparison replays frozen tokens: after the first difference two engines would sample other
ones, and nothing could be compared.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from rlmix.core.candidates import Candidates
from rlmix.numerics.consistent.head import kept_normaliser


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """One session of one sampler."""

    name: str
    pool: str
    ids: tuple[int, ...]
    sampled: tuple[int, ...]
    """Positions of the sampled tokens, ascending, from 1 on."""
    logprobs_P: np.ndarray
    """float32, what the sampler reported for each of them, after temperature."""
    prefilled: tuple[tuple[int, int], ...] | None = None
    """(first, last) of the runs of positions that the engine computed as prompts; it decoded the
    others one by one. None: not known."""
    kept: Candidates | None = None
    """The set that each sampled token was drawn from, where `logprobs_P` are renormalised on it;
    None: they are over the whole vocabulary."""
    version: int | None = None
    """Weight version that sampled all of them; None: not known."""

    def __post_init__(self) -> None:
        places = self.sampled
        if len(places) != len(self.logprobs_P):
            raise ValueError(
                f"diff: {self.name}: {len(places)} sampled tokens and {len(self.logprobs_P)} "
                "logprobs; each sampled token needs one"
            )
        if not places or places[0] < 1 or places[-1] >= len(self.ids):
            raise ValueError(f"diff: {self.name}: sampled positions outside 1..{len(self.ids) - 1}")
        if any(later <= earlier for earlier, later in pairwise(places)):
            raise ValueError(f"diff: {self.name}: sampled positions do not ascend")


def positions_of(text: Recorded) -> Tensor:
    """Indices of the sampled tokens in a list of logprobs that starts with the second token."""
    return torch.tensor(text.sampled) - 1


def on_kept_sets(logits_TV: Tensor, text: Recorded, *, temperature: float) -> Tensor:
    """float32 [P], log-probabilities of the sampled tokens within their kept sets, with the bits of
    exact mode's sampler and trainer.

    Args:
        logits_TV: float32, of every position of the text.
    """
    kept = text.kept
    assert kept is not None, "only asked where sets were recorded"
    scores_PV = logits_TV.float()[positions_of(text)] / temperature
    sizes = [int(size) for size in kept.sizes]
    ids_PK = torch.zeros(len(sizes), max(sizes), dtype=torch.int64)
    is_kept_PK = torch.zeros(ids_PK.shape, dtype=torch.bool)
    for row, size in enumerate(sizes):
        first = int(kept.offsets[row])
        ids_PK[row, :size] = torch.from_numpy(kept.ids[first : first + size].astype(np.int64))
        is_kept_PK[row, :size] = True
    sampled_P = torch.tensor([text.ids[place] for place in text.sampled])
    own_P = scores_PV.gather(1, sampled_P[:, None])[:, 0]
    return own_P - kept_normaliser(scores_PV.gather(1, ids_PK), is_kept_PK)
