"""Two ways to be sure, both slow.

Float64: sums of float32 or BF16 products in float64, where their order hardly ever shows after
rounding; if two sides that differ agree under it, the difference was the order of additions.
Tree: only elementwise products and sums of neighbours, which no library may reorder; its bits are
the same for any number of rows, threads and processes by construction.
"""

# M rows, K inputs, N outputs; attention letters as in attention.py

import torch
import torch.nn.functional as F
from torch import Tensor

TREE_BYTES = 1 << 28
"""Products that `tree_linear` holds at once."""


def linear_f64(x: Tensor, weight_NK: Tensor) -> Tensor:
    """x W^T summed in float64, rounded to x's dtype."""
    return (x.double() @ weight_NK.double().t()).to(x.dtype)


def attend_f64(q_BTND: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, positions_BT: Tensor) -> Tensor:
    """`attend` in float64 without tiles, float64 [B, T, N, D]; differentiable."""
    groups = q_BTND.shape[2] // k_BHLD.shape[1]
    keys = k_BHLD.double().repeat_interleave(groups, dim=1)
    values = v_BHLD.double().repeat_interleave(groups, dim=1)
    scores = q_BTND.double().transpose(1, 2) @ keys.transpose(2, 3) * q_BTND.shape[-1] ** -0.5
    is_ahead = torch.arange(keys.shape[2]) > positions_BT[:, None, :, None]
    probs = scores.masked_fill(is_ahead, float("-inf")).softmax(-1)
    return (probs @ values).transpose(1, 2)


def tree_linear(x: Tensor, weight_NK: Tensor) -> Tensor:
    """x W^T by products and a binary tree of float32 sums of neighbours, rounded to x's dtype.

    Args:
        x: [M, K]; weight_NK: [N, K]. K is filled with zeros to a power of two.
    """
    num_inputs = x.shape[1]
    missing = (1 << (num_inputs - 1).bit_length()) - num_inputs
    rows, weight = F.pad(x.float(), (0, missing)), F.pad(weight_NK.float(), (0, missing))
    step = max(1, TREE_BYTES // (4 * weight.numel()))
    out = torch.empty(len(rows), len(weight))
    for first in range(0, len(rows), step):
        level = rows[first : first + step, None] * weight
        while level.shape[-1] > 1:
            level = level[..., ::2] + level[..., 1::2]
        out[first : first + step] = level[..., 0]
    return out.to(x.dtype)
