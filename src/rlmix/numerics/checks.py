"""What every quantiser refuses."""

import torch
from torch import Tensor

from rlmix.core.errors import DataError


def finite_amax(values: Tensor, *, name: str, convention: str) -> Tensor:
    """Largest magnitude of `values`, float32 [].

    Raises:
        DataError: `values` is empty, not floating point, or holds NaN or Inf. A NaN would
            become a scale and silently turn its whole block, or the whole tensor, into NaN.
    """
    if not values.is_floating_point():
        raise DataError(f"{convention}: {name} has dtype {values.dtype}; give bf16, fp16 or fp32")
    if values.numel() == 0:
        raise DataError(f"{convention}: {name} of shape {tuple(values.shape)} is empty")
    low, high = torch.aminmax(values)
    amax = torch.maximum(-low, high).float()
    if not torch.isfinite(amax):
        bad = int((~torch.isfinite(values)).sum())
        raise DataError(
            f"{convention}: {name} of shape {tuple(values.shape)} holds {bad} NaN or Inf values; "
            "only finite weights can be quantised"
        )
    return amax
