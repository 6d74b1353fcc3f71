"""The sum of a step's gradients, with the same bits for any number of ranks and any sharing out.

The leaves are the micro-batches of the whole step, numbered before anybody gets one; a binary tree
over their numbers says what is added to what. Neighbours are added first, and a node without a
neighbour goes up as it is. Invariant: who computed a leaf, and when, changes nothing; so the
micro-batches must be packed before they are shared out, not by each rank for itself.

A trainer of several ranks, and of one, in exact mode:

    tree = GradientTree(owners, rank=rank, group=group)   # owners[leaf] = rank
    for leaf in tree.leaves:
        ...forward, backward...
        tree.add(leaf, flat_gradient)                      # None: the leaf has no signal
    total = tree.total()                                   # on every rank, None without any signal
    facts = gather_objects(my_facts, group)                # in the order of ranks
"""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Node = tuple[int, int]
"""(level, number): leaves are level 0; a node's children are 2 * number and 2 * number + 1 of the
level below."""


def share_out(costs: Sequence[float], *, num_ranks: int) -> list[int]:
    """Owner of each leaf, so that ranks get about the same cost: runs of neighbours, since those
    are added without sending.

    Args:
        costs: of each leaf, for example its tokens.
    """
    total, done = sum(costs), 0.0
    owners = []
    for cost in costs:
        middle = done + cost / 2
        owners.append(min(num_ranks - 1, int(middle * num_ranks / total)) if total else 0)
        done += cost
    return owners


def flat_of(gradients: Mapping[str, Tensor]) -> Tensor:
    """One float32 vector of all gradients, in the mapping's order; a copy."""
    return torch.cat([gradient.detach().reshape(-1).float() for gradient in gradients.values()])


def parts_of(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `flat_of`: views, shaped as the tensors of `like`."""
    parts = flat.split([tensor.numel() for tensor in like.values()])
    return {
        name: part.view(tensor.shape)
        for (name, tensor), part in zip(like.items(), parts, strict=True)
    }


class GradientTree:
    """Adds leaves as soon as their neighbours are there: a rank that computes a run of leaves in
    order holds as many sums as the tree is high."""

    def __init__(self, owners: Sequence[int], *, rank: int, group: Any | None) -> None:
        """
        Args:
            owners: rank of each leaf of the whole step, the same on every rank.
            group: a torch process group of all ranks; None: one process, which owns all.
        Raises:
            ValueError: no leaves, or an owner that does not exist.
        """
        world = 1 if group is None else group.size()
        if not owners or not all(0 <= owner < world for owner in owners):
            raise ValueError(f"gradient tree: owners {list(owners)} of {world} ranks")
        self._owners = {(0, leaf): owner for leaf, owner in enumerate(owners)}
        self._rank, self._group = rank, group
        self._nodes: dict[Node, Tensor | None] = {}
        self._missing = set(self.leaves)
        self._counts = [len(owners)]
        while self._counts[-1] > 1:
            self._counts.append((self._counts[-1] + 1) // 2)

    @property
    def leaves(self) -> list[int]:
        """This rank's, in order."""
        return [leaf for (_, leaf), owner in self._owners.items() if owner == self._rank]

    def add(self, leaf: int, gradient: Tensor | None) -> None:
        """Take a leaf's gradient, which may be changed afterwards; None counts as zeros.

        Raises:
            ValueError: the leaf is another rank's, or was added before.
        """
        if leaf not in self._missing:
            raise ValueError(f"gradient tree: leaf {leaf} is not missing on rank {self._rank}")
        self._missing.remove(leaf)
        self._rise((0, leaf), gradient)

    def _rise(self, node: Node, value: Tensor | None) -> None:
        """Put a sum in, and add it to its neighbour's as long as that is here too."""
        level, number = node
        self._nodes[node] = value
        neighbour = (level, number ^ 1)
        if level == len(self._counts) - 1:
            return
        if neighbour[1] >= self._counts[level]:
            self._rise((level + 1, number // 2), self._nodes.pop(node))
        elif neighbour in self._nodes:
            pair = min(node, neighbour), max(node, neighbour)
            left, right = (self._nodes.pop(one) for one in pair)
            self._rise((level + 1, number // 2), _sum(left, right))

    def total(self) -> Tensor | None:
        """The sum of all leaves, on every rank; every rank must call this.

        Raises:
            ValueError: a leaf of this rank was not added.
        """
        if self._missing:
            raise ValueError(f"gradient tree: leaves {sorted(self._missing)} were not added")
        owners = self._owners
        for level in range(len(self._counts) - 1):
            above: dict[Node, int] = {}
            for number in range(self._counts[level + 1]):
                left, right = (level, 2 * number), (level, 2 * number + 1)
                owner = above[level + 1, number] = owners[left]
                if right in owners and owners[right] != owner:
                    self._meet(left, right, owner, owners[right])
            owners = above
        root = (len(self._counts) - 1, 0)
        return self._to_all(root, owners[root])

    def _meet(self, left: Node, right: Node, owner: int, other: int) -> None:
        """Bring the right neighbour to the left one's owner, and add it there."""
        if self._rank == other:
            _send(self._nodes.pop(right), owner, self._group)
        elif self._rank == owner:
            self._rise(right, _receive(other, self._group))

    def _to_all(self, root: Node, owner: int) -> Tensor | None:
        if self._group is None:
            return self._nodes.pop(root)
        if self._rank != owner:
            return _receive(owner, self._group)
        total = self._nodes.pop(root)
        for rank in range(self._group.size()):
            if rank != owner:
                _send(total, rank, self._group)
        return total


def _sum(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    if left is None or right is None:
        return left if right is None else right
    return left.add_(right)


def _send(value: Tensor | None, rank: int, group: Any) -> None:
    size = torch.tensor([-1 if value is None else value.numel()])
    group.send([size], rank, 0).wait()
    if value is not None:
        group.send([value.contiguous()], rank, 0).wait()


def _receive(rank: int, group: Any) -> Tensor | None:
    size = torch.zeros(1, dtype=torch.int64)
    group.recv([size], rank, 0).wait()
    if size < 0:
        return None
    value = torch.empty(int(size), dtype=torch.float32)
    group.recv([value], rank, 0).wait()
    return value


def gather_objects(mine: object, group: Any | None) -> list[Any]:
    """Every rank's object on every rank, in the order of ranks; pickled on the way."""
    if group is None:
        return [mine]
    payload = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(payload)])]).wait()
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(payload)] = payload
    parts = [torch.empty_like(padded) for _ in sizes]
    group.allgather([parts], [padded]).wait()
    pairs = zip(parts, sizes, strict=True)
    return [pickle.loads(part[: int(size)].numpy().tobytes()) for part, size in pairs]
