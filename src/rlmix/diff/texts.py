"""Frozen texts: token ids, which of them were sampled, and what the sampler recorded.

Every comparison replays frozen tokens: after the first difference two engines would sample other
ones, and nothing could be compared.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


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
