"""Matrix products whose rows do not depend on how many rows there are.

Values are multiplied and added in float32 whatever they are stored in (a product of two BF16
numbers is exact there) and rounded once. Invariant: a product has at least `min_rows` rows; zeros
are added where the caller has fewer.
"""

# M rows, K inputs, N outputs, B products

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.numerics.consistent.contract import held_in, min_rows, rounded
from rlmix.numerics.consistent.storage import is_by_inputs, storage_is_free
from rlmix.numerics.consistent.tree import tree_all_reduce


def _float_rows(x: Tensor) -> Tensor:
    """[M, K] float32 with at least `min_rows` rows."""
    rows_MK = x.reshape(-1, x.shape[-1]).float()
    missing = min_rows() - rows_MK.shape[0]
    return F.pad(rows_MK, (0, 0, 0, missing)) if missing > 0 else rows_MK


def _float_weight(weight_NK: Tensor, *, leaves: int = 1) -> Tensor:
    if is_by_inputs(weight_NK) and not storage_is_free(
        weight_NK.shape[1] // leaves, weight_NK.shape[0], threads=torch.get_num_threads()
    ):
        # For narrow products MKL adds in another order when the weight is stored transposed.
        raise ValueError(
            f"consistent linear: a weight {tuple(weight_NK.shape)} with strides "
            f"{weight_NK.stride()}; the inputs of an output must lie side by side"
        )
    return weight_NK.float()


def _finish(
    y_MN: Tensor, x: Tensor, residual: Tensor | None, round_to: torch.dtype | None
) -> Tensor:
    if x.ndim != 2 or y_MN.shape[0] != x.shape[0]:
        y_MN = y_MN[: x.shape[:-1].numel()].reshape(*x.shape[:-1], -1)
    if residual is not None:
        y_MN = y_MN.add_(residual)
    return held_in(rounded(y_MN, round_to), x.dtype)


def linear(
    x: Tensor,
    weight_NK: Tensor,
    *,
    residual: Tensor | None = None,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """x W^T (+ residual), each row with the same bits whatever the other rows are.

    Args:
        x: float32 or bfloat16 [..., K].
        weight_NK: float32 or bfloat16; BF16 weights that are used often are best held in float32.
        residual: added in float32 before the rounding, [..., N].
        round_to: the result is a number of this dtype, held in x's; None: x's own.
    Raises:
        ValueError: the weight is stored with outputs side by side, and the library would add in
            another order.
    Returns:
        [..., N] of x's dtype. Gradients are float32 sums, rounded only to the dtype of what they
        belong to.
    """
    return _finish(F.linear(_float_rows(x), _float_weight(weight_NK)), x, residual, round_to)


def _leaves(x: Tensor, count: int) -> Tensor:
    """[count, rows, width] view of [rows, count * width]."""
    return x.view(x.shape[0], count, -1).transpose(0, 1)


def row_parallel_linear(
    x: Tensor,
    weight_NK: Tensor,
    *,
    leaves: int,
    group: Any | None = None,
    residual: Tensor | None = None,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """`linear` whose K is cut into `leaves` runs, added in a tree: the same bits for any number of
    processes that divides `leaves`.

    Args:
        x, weight_NK: this process's run of K; all of K when `group` is None.
        leaves: of the whole K, a power of two.
        group: the tensor parallel process group, ranks in the order of K.
        residual: added after the tree; the same on every rank.
    Raises:
        ValueError: as in `linear`; or the leaves are no power of two, the processes do not divide
            them, or a process's leaves not its K.
    """
    world = 1
    if group is not None:
        import torch.distributed as dist

        world = dist.get_world_size(group)
    local, rest = divmod(leaves, world)
    if rest or local == 0 or local & (local - 1) or x.shape[-1] % local:
        raise ValueError(
            f"row-parallel linear: {leaves} leaves over {world} processes and K={x.shape[-1]} a "
            "process; processes must divide the leaves, and a process's leaves its K"
        )
    weight = _float_weight(weight_NK, leaves=local)
    if is_by_inputs(weight):
        leaves_KN = weight.t().unflatten(0, (local, -1))
    else:
        leaves_KN = weight.unflatten(1, (local, -1)).permute(1, 2, 0)
    parts = torch.bmm(_leaves(_float_rows(x), local), leaves_KN)
    return _finish(tree_all_reduce(_tree_sum(parts), group), x, residual, round_to)


def _tree_sum(parts: Tensor) -> Tensor:
    """`tree_sum` over the first dimension of one tensor, which it may overwrite."""
    if not parts.requires_grad:
        level = list(parts.unbind())
        while len(level) > 1:
            level = [left.add_(right) for left, right in zip(level[::2], level[1::2], strict=True)]
        return level[0]
    while len(parts) > 1:
        parts = parts[::2] + parts[1::2]
    return parts[0]
