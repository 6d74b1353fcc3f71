"""One step's micro-batches over the ranks of a trainer, and what all of them learn of it.

Natively the ranks share one sharded model and go through it in step (`batch.sharing`); gradients
are added by FSDP2. In exact mode every rank holds the whole model and goes through its own run of
micro-batches; gradients are added in the tree of `numerics.consistent.reduction`, so that any
number of ranks gives the same bits. Invariant: every rank returns the same `PassResult`.
"""

from collections.abc import Mapping, Sequence

import torch

from rlmix.batch.packing import MicroBatch
from rlmix.batch.sharing import share_batches
from rlmix.numerics.consistent.reduction import GradientTree, share_out
from rlmix.trainer.optimizer import MasterOptimizer
from rlmix.trainer.policy import Policy
from rlmix.trainer.sharded import ShardedOptimizer
from rlmix.trainer.spec import AlgoSpec
from rlmix.trainer.step import (
    BatchPass,
    PassResult,
    check_micro_batches,
    join_passes,
    run_micro_batch,
    run_micro_batches,
    step_denominator,
)
from rlmix.trainer.world import World, by_leaf

FILLER_TOKENS = 2
"""The least that has something to predict."""


def run_shared(
    policy: Policy,
    optimizer: MasterOptimizer | ShardedOptimizer,
    micro_batches: Sequence[MicroBatch],
    algo: AlgoSpec,
    *,
    world: World,
    is_exact: bool,
    trainer_version: int,
) -> PassResult:
    """Gradients of a whole step into `optimizer`, and its facts on every rank.

    Args:
        micro_batches: of the whole step, the same on every rank.
        is_exact: the order of additions must not depend on the number of ranks.
    Raises:
        DataError: on every rank alike, as of `check_micro_batches`.
    """
    denominator = step_denominator(micro_batches, algo)
    if isinstance(optimizer, MasterOptimizer) and not is_exact:
        with optimizer.accumulating():
            return run_micro_batches(
                policy,
                micro_batches,
                algo,
                denominator=denominator,
                trainer_version=trainer_version,
            )

    check_micro_batches(policy, micro_batches, algo, trainer_version=trainer_version)

    def one(leaf: int, *, is_in_step: bool) -> BatchPass:
        return run_micro_batch(
            policy,
            micro_batches[leaf],
            algo,
            denominator=denominator,
            trainer_version=trainer_version,
            is_in_step=is_in_step,
        )

    mine: dict[int, BatchPass] = {}
    with optimizer.accumulating():
        if isinstance(optimizer, MasterOptimizer):
            tree = GradientTree(
                share_out([batch.ids_BT.size for batch in micro_batches], num_ranks=world.size),
                rank=world.rank,
                group=world.group,
            )
            for leaf in tree.leaves:
                mine[leaf] = one(leaf, is_in_step=False)
                has_sum = micro_batches[leaf].needs_gradient and not mine[leaf].failure
                tree.add(leaf, optimizer.take_sum() if has_sum else None)
            optimizer.put_sum(tree.total())
        else:
            for turn in share_batches(micro_batches, num_ranks=world.size)[world.rank]:
                if turn.leaf is None:
                    _run_filler(policy, needs_gradient=turn.needs_gradient)
                else:
                    mine[turn.leaf] = one(turn.leaf, is_in_step=True)
    parts: list[Mapping[int, BatchPass]] = world.gather(mine)
    return join_passes(micro_batches, by_leaf(parts))


def _run_filler(policy: Policy, *, needs_gradient: bool) -> None:
    """Take part in the exchanges of the others' pass, and add zeros."""
    ids_BT = torch.zeros(1, FILLER_TOKENS, dtype=torch.int64)
    with torch.set_grad_enabled(needs_gradient):
        (logprobs_P,) = policy.next_logprobs(ids_BT, [FILLER_TOKENS], temperature=1.0)
        if needs_gradient:
            policy.backward(logprobs_P.sum() * 0.0)
