"""How an engine stores weights so that decoding reads them faster, bit for bit the same.

A product of few rows with weights stored output by output, as checkpoints have them, waits for
memory longer than with weights stored input by input. Whether the library still adds in the same
order is asked for each shape, since for narrow products it does not; where it says no, the weights
stay as they are, and `linear` refuses them the other way round.
"""

# M rows, K inputs, N outputs

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.numerics.consistent.contract import min_rows

PROBED_ROWS = (0, 1, 2, 3, 4, 5, 7, 9, 12, 13, 20, 28, 29, 60, 92, 124, 252)
"""Rows beyond `min_rows` that are compared; kernels change at multiples of 4, 8, 16 and 32."""


def is_by_inputs(weight_NK: Tensor) -> bool:
    """Whether a product with this weight, or with each of several, reads it input by input."""
    return weight_NK.stride(-1) != 1


def by_inputs(weight_NK: Tensor, *, leaves: int = 1) -> Tensor:
    """The same numbers stored input by input, where that changes no bit; else as they are.

    Args:
        weight_NK: or several, [E, N, K].
        leaves: runs of K that are multiplied by themselves.
    """
    outputs, inputs = weight_NK.shape[-2:]
    if not storage_is_free(inputs // leaves, outputs, threads=torch.get_num_threads()):
        return weight_NK
    return weight_NK.transpose(-1, -2).contiguous().transpose(-1, -2)


@functools.cache
def storage_is_free(inputs: int, outputs: int, *, threads: int) -> bool:
    """Whether products of this shape have the same bits however the weight is stored, batched or
    one by one, with this process's `threads`."""
    generator = torch.Generator().manual_seed(0)
    weight_2NK = torch.randn(2, outputs, inputs, generator=generator)
    stored = weight_2NK.transpose(1, 2).contiguous().transpose(1, 2)
    with torch.inference_mode():
        for extra in PROBED_ROWS:
            rows = torch.randn(2, min_rows() + extra, inputs, generator=generator)
            batched, expected = (
                torch.bmm(rows, weight.transpose(1, 2)) for weight in (stored, weight_2NK)
            )
            single = F.linear(rows[1], stored[1])
            if not torch.equal(batched, expected) or not torch.equal(single, expected[1]):
                return False
    return True
