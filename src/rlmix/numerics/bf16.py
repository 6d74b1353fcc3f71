"""BF16: what a view keeps where it does not quantise."""

import torch
from torch import Tensor

from rlmix.numerics.checks import finite_amax, refuse_non_finite


def cast(values: Tensor, *, name: str = "weight") -> Tensor:
    """bfloat16, contiguous, nearest with ties to even.

    Raises:
        DataError: NaN or Inf, also one that only the cast would make (above 3.3961e38).
    """
    amax = finite_amax(values, name=name, convention="bf16")
    rounded = values.to(torch.bfloat16).contiguous()
    refuse_non_finite(amax.to(torch.bfloat16), rounded, name=name, convention="bf16")
    return rounded
