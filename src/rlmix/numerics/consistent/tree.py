"""Sums over partial results in the shape of one binary tree, in one process or over several.

Invariant: the tree is fixed by the number of leaves; who computed which leaf changes nothing.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """((p0 + p1) + (p2 + p3)) + ...: neighbours first. The parts stay as they are.

    Raises:
        ValueError: the number of parts is not a power of two.
    """
    count = len(parts)
    if count == 0 or count & (count - 1):
        raise ValueError(f"tree sum: {count} parts; a power of two is needed")
    level = list(parts)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        if len(level) == count:
            level = [left + right for left, right in pairs]
        else:
            level = [left.add_(right) for left, right in pairs]
    return level[0]


def tree_all_reduce(part: Tensor, group: Any | None) -> Tensor:
    """The tree sum of every rank's part, in rank order, on every rank.

    Gathers, then adds locally: a ring or a switch would add in an order of its own. No gradient.

    Args:
        part: float32, the same shape on every rank, the sum of the rank's own leaves.
        group: a torch process group (gloo or NCCL) whose size is a power of two; None: one process.
    """
    if group is None:
        return part
    import torch.distributed as dist

    part = part.contiguous()
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part, group=group)
    return tree_sum(parts)
