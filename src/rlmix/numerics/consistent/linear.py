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

from rlmix.numerics.consistent.contract import min_rows, rounded
from rlmix.numerics.consistent.tree import tree_all_reduce, tree_sum


def _float_rows(x: Tensor) -> Tensor:
    """[M, K] float32 with at least `min_rows` rows."""
    rows_MK = x.reshape(-1, x.shape[-1]).float()
    missing = min_rows() - len(rows_MK)
    return F.pad(rows_MK, (0, 0, 0, missing)) if missing > 0 else rows_MK


def _finish(
    y_MN: Tensor, x: Tensor, residual: Tensor | None, round_to: torch.dtype | None
) -> Tensor:
    num_rows = x.shape[:-1].numel()
    y = y_MN[:num_rows] if len(y_MN) > num_rows else y_MN
    y = y.reshape(*x.shape[:-1], -1)
    if residual is not None:
        y = y.add_(residual)
    return rounded(y, round_to).to(x.dtype)


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
    Returns:
        [..., N] of x's dtype. Gradients are float32 sums, rounded only to the dtype of what they
        belong to.
    """
    return _finish(F.linear(_float_rows(x), weight_NK.float()), x, residual, round_to)


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
        ValueError: the processes do not divide the leaves, or the leaves not this process's K.
    """
    world = 1
    if group is not None:
        import torch.distributed as dist

        world = dist.get_world_size(group)
    local, rest = divmod(leaves, world)
    if rest or local == 0 or x.shape[-1] % local:
        raise ValueError(
            f"row-parallel linear: {leaves} leaves over {world} processes and K={x.shape[-1]} a "
            "process; processes must divide the leaves, and a process's leaves its K"
        )
    rows_MK, width = _float_rows(x), x.shape[-1] // local
    leaves_of_rows = rows_MK.split(width, dim=1)
    leaves_of_weight = weight_NK.float().split(width, dim=1)
    parts = [F.linear(*leaf) for leaf in zip(leaves_of_rows, leaves_of_weight, strict=True)]
    return _finish(tree_all_reduce(tree_sum(parts), group), x, residual, round_to)
