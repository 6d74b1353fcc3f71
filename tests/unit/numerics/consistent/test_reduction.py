"""One, two or three trainer ranks: the same bits of the gradient and of the new parameters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.head import vocab_scores
from rlmix.numerics.consistent.model import tensors_of, train_hidden
from rlmix.numerics.consistent.pointwise import rope_table
from rlmix.numerics.consistent.reduction import (
    GradientTree,
    flat_of,
    gather_objects,
    parts_of,
    share_out,
)
from rlmix.numerics.consistent.shard import gloo_group
from tests.unit.numerics.consistent.processes import run_on_ranks
from tests.unit.numerics.consistent.shapes import VOCAB, new_spec, new_state

SHAPES = ((3, 20), (1, 33), (2, 9), (4, 12), (1, 5))
"""(rows, length) of five micro-batches."""
OWNERS = {
    1: ([0] * 5,),
    2: ([0, 1, 1, 0, 1], [0, 0, 0, 1, 1], [1, 0, 1, 0, 1]),
    3: ([2, 0, 1, 1, 0],),
}
STEPS = 2


def gradient_of(state: dict[str, Tensor], leaf: int, *, is_moe: bool) -> Tensor:
    """Of the mean logprob of a micro-batch of random ids."""
    spec = new_spec(is_moe=is_moe, round_to=torch.bfloat16)
    table = rope_table(64, head_dim=spec.head_dim, theta=10000.0)
    ids = torch.randint(0, VOCAB, SHAPES[leaf], generator=torch.Generator().manual_seed(leaf))
    tensors = tensors_of(state, spec)
    hidden = train_hidden(tensors, spec, ids, table, tiling=CPU_TILING)
    found = vocab_scores(
        hidden[:, :-1].flatten(0, 1), tensors.head, ids[:, 1:].reshape(-1, 1), temperature=0.7
    )
    (found.scores_PK[:, 0] - found.normaliser_P).sum().backward()
    gradients = {name: value.grad for name, value in state.items()}
    for value in state.values():
        value.grad = None
    return flat_of(gradients)


def trained(owners: Sequence[int], rank: int, group: Any | None, *, is_moe: bool) -> np.ndarray:
    """Gradients of two steps, then the parameters after them, as one vector."""
    start = new_state(new_spec(is_moe=is_moe, round_to=torch.bfloat16), seed=2)
    masters = {name: value.float() for name, value in start.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-2)
    found = []
    for _ in range(STEPS):
        state = {n: m.detach().bfloat16().requires_grad_() for n, m in masters.items()}
        tree = GradientTree(owners, rank=rank, group=group)
        for leaf in reversed(tree.leaves):
            tree.add(leaf, gradient_of(state, leaf, is_moe=is_moe))
        total = tree.total()
        assert total is not None
        for name, part in parts_of(total, masters).items():
            masters[name].grad = part
        optimizer.step()
        found.append(total)
    return torch.cat([*found, flat_of(masters)]).numpy()


def group_of(store: Any, name: str, rank: int, world: int) -> Any:
    named = dist.PrefixStore(name, store)
    return gloo_group(named, "data", list(range(world)), rank, timeout_s=60)


def trained_on_a_rank(rank: int, store: Any) -> dict[str, np.ndarray]:
    found = {}
    for world in (2, 3):
        for number, owners in enumerate(OWNERS[world]):
            if rank < world:
                name = f"{world} {number}"
                group = group_of(store, name, rank, world)
                found[name] = trained(owners, rank, group, is_moe=number % 2 == 0)
                assert gather_objects({"rank": rank, "x": "y" * rank}, group) == [
                    {"rank": r, "x": "y" * r} for r in range(world)
                ]
    return found


def test_ranks_that_share_micro_batches_anyhow_give_the_gradient_and_parameters_of_one() -> None:
    answers = run_on_ranks(trained_on_a_rank, world=3)
    one = {moe: trained(OWNERS[1][0], 0, None, is_moe=moe) for moe in (False, True)}
    assert np.isfinite(one[True]).all()
    num_compared = 0
    for world in (2, 3):
        for number in range(len(OWNERS[world])):
            for rank in range(world):
                found = answers[rank][f"{world} {number}"]
                assert int((found != one[number % 2 == 0]).sum()) == 0, (world, number, rank)
                num_compared += 1
    assert num_compared == 3 * 2 + 3


def test_the_tree_is_one_of_leaves_not_of_ranks() -> None:
    # ((a + b) + (c + d)) + e, in float32, where 2^24 + 1 = 2^24.
    values = [2.0**24, 1.0, 1.0, -(2.0**24), 1.0]
    tree = GradientTree([0] * 5, rank=0, group=None)
    for leaf in (4, 1, 3, 0, 2):
        tree.add(leaf, torch.tensor([values[leaf]]))
    total = tree.total()
    # a + b = 2^24, c + d = 1 - 2^24 (exact), together 1, with e 2. From left to right it is 1.
    assert total is not None
    assert total.item() == 2.0


def test_leaves_without_signal_count_as_nothing() -> None:
    tree = GradientTree([0, 0, 0], rank=0, group=None)
    for leaf, gradient in enumerate([None, torch.tensor([3.0]), None]):
        tree.add(leaf, gradient)
    assert tree.total() == torch.tensor([3.0])
    tree = GradientTree([0], rank=0, group=None)
    tree.add(0, None)
    assert tree.total() is None


def test_a_leaf_that_is_missing_or_comes_twice_is_named() -> None:
    tree = GradientTree([0, 0], rank=0, group=None)
    tree.add(0, torch.tensor([1.0]))
    with pytest.raises(ValueError, match="leaf 0 is not missing"):
        tree.add(0, torch.tensor([1.0]))
    with pytest.raises(ValueError, match=r"leaves \[1\] were not added"):
        tree.total()
    with pytest.raises(ValueError, match="of 1 ranks"):
        GradientTree([0, 1], rank=0, group=None)


def test_a_rank_that_works_in_order_holds_as_many_sums_as_the_tree_is_high() -> None:
    tree = GradientTree([0] * 64, rank=0, group=None)
    most = 0
    for leaf in range(64):
        tree.add(leaf, torch.tensor([1.0]))
        most = max(most, len(tree._nodes))
    assert most == 6
    assert tree.total() == torch.tensor([64.0])


def test_micro_batches_are_shared_out_in_runs_of_equal_cost() -> None:
    # Halves of 10: 4 + 2 ends beyond 5, but the middle of 2 (at 5) is in the second half.
    assert share_out([4, 2, 1, 3], num_ranks=2) == [0, 1, 1, 1]
    assert share_out([1, 1, 1, 1], num_ranks=2) == [0, 0, 1, 1]
    assert share_out([5, 5, 5], num_ranks=1) == [0, 0, 0]
