"""Which rank computes which micro-batch of a step.

Ranks that share one model exchange weights and gradients layer by layer, so all of them must make
the same passes in the same order. Invariants: every micro-batch is computed once; in each round all
ranks have one of the same kind (with or without gradient), a rank without one takes a filler; the
result depends on the micro-batches only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlmix.batch.packing import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One pass of one rank."""

    leaf: int | None
    """Number of the micro-batch in the step; None: a filler, which adds nothing."""
    needs_gradient: bool


def share_turns(
    costs: Sequence[float], needs_gradient: Sequence[bool], *, num_ranks: int
) -> list[list[Turn]]:
    """Turns of each rank, all lists of one length.

    A round's micro-batches are neighbours in cost, since a round lasts as long as its longest; who
    goes first changes from round to round, so that the sums are alike too.

    Args:
        costs: of each micro-batch, for example its tokens.
        needs_gradient: of each micro-batch.
    """
    turns: list[list[Turn]] = [[] for _ in range(num_ranks)]
    for kind in (True, False):
        leaves = [leaf for leaf, needs in enumerate(needs_gradient) if needs == kind]
        leaves.sort(key=lambda leaf: (-costs[leaf], leaf))
        for number, first in enumerate(range(0, len(leaves), num_ranks)):
            found: list[int | None] = [*leaves[first : first + num_ranks]]
            found += [None] * (num_ranks - len(found))
            ranks = range(num_ranks) if number % 2 == 0 else reversed(range(num_ranks))
            for rank, leaf in zip(ranks, found, strict=True):
                turns[rank].append(Turn(leaf=leaf, needs_gradient=kind))
    return turns


def share_batches(micro_batches: Sequence[MicroBatch], *, num_ranks: int) -> list[list[Turn]]:
    """`share_turns` by padded tokens."""
    return share_turns(
        [batch.ids_BT.size for batch in micro_batches],
        [batch.needs_gradient for batch in micro_batches],
        num_ranks=num_ranks,
    )
