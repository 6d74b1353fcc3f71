"""What two sides must share to get the same bits: tiles, trees, casts.

Invariant: everything here changes bits, except `query_tile`, which only changes speed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SMALL_ROWS = 4
"""MKL multiplies fewer rows than this by another kernel, with another order of additions."""

ROWS_PER_THREAD = 8
"""Threads take runs of 8 rows, and a run that is left over may be one of the small ones; from this
many rows a thread on, none is (measured for 1 and 2 threads)."""

TREE_LEAVES = 4
"""Equal runs of K that a row-parallel product is cut into; the largest tensor parallel size whose
bits equal those of one process."""

MASKED = -1e30
"""Score of a key that a query may not see. Finite, so that a tile without any visible key gives a
finite result of weight 0; far below any score, so that its exponential is 0 exactly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """How attention walks over keys."""

    kv_tile: int
    """Keys of one softmax tile; tiles start at multiples of it, counted from position 0."""
    trims: tuple[int, ...]
    """Shorter widths that may replace a tile whose other keys are all masked, ascending. Empty
    where the BLAS gives other bits for them (`selfcheck` finds out)."""
    query_tile: int
    """Query positions computed together."""
    probs: torch.dtype
    """Probabilities are rounded to this before they meet the values."""

    def __post_init__(self) -> None:
        if sorted(self.trims) != list(self.trims) or any(t >= self.kv_tile for t in self.trims):
            raise ValueError(
                f"consistent attention: trims={self.trims} must ascend and stay below "
                f"kv_tile={self.kv_tile}"
            )

    def width(self, num_keys: int) -> int:
        """Keys computed in a tile of which the first `num_keys` are needed."""
        return next((trim for trim in self.trims if trim >= num_keys), self.kv_tile)

    def padded(self, num_keys: int) -> int:
        """Keys that must exist, whatever they hold, to attend to the first `num_keys`."""
        whole = num_keys // self.kv_tile * self.kv_tile
        return whole if whole == num_keys else whole + self.width(num_keys - whole)


CPU_TILING = Tiling(kv_tile=256, trims=(64, 128), query_tile=128, probs=torch.float32)
"""Fastest of the tilings measured. Widths of 144 to 240 are no trims: MKL cuts those sums
elsewhere. Float32 probabilities spare two passes over the scores."""


def min_rows() -> int:
    """Rows below which a product must be padded."""
    threads = torch.get_num_threads()
    return SMALL_ROWS if threads == 1 else ROWS_PER_THREAD * threads


class _Round(torch.autograd.Function):
    """Rounds the value and lets the gradient pass as it is."""

    @staticmethod
    def forward(ctx: object, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).to(values.dtype)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def held_in(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`values.to(dtype)`, without the call that would do nothing."""
    return values if values.dtype == dtype else values.to(dtype)


def rounded(values: Tensor, round_to: torch.dtype | None) -> Tensor:
    """`values` rounded to `round_to` and held in their own dtype; None keeps them.

    The gradient is not rounded: a BF16 value held in float32 has a float32 gradient.
    """
    if round_to is None or round_to == values.dtype:
        return values
    if values.requires_grad and torch.is_grad_enabled():
        return _Round.apply(values, round_to)
    if round_to == torch.bfloat16 and values.dtype == torch.float32:
        return values.bfloat16().float()  # In half the time of `to`.
    return values.to(round_to).to(values.dtype)
