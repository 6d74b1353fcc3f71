"""Stage 6: how much of a difference each operator carries, by swapping it.

For every operator that differs on the same inputs, the other side's operator is put into this side
and the text is run again: what the logprobs then move by is what that operator does alone. Moves of
nearly independent errors add up as squares, so an operator's share is its square over the sum. For
shares alone, moves are capped at what nine in ten tokens differ by: a token on the verge of another
expert moves by nats whatever is swapped, and would give every operator the same share.
Leave-one-out goes the other way: this side's operator put into the other side, and what is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlmix.diff.program import Side, Text, run, swapped

CAPPED_AT = 0.9
"""Quantile of the whole difference that caps a token's move for shares."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """One operator, over all layers."""

    operator: str
    alone: float
    """Mean |move| of this side's logprobs when only it comes from the other side, nats."""
    left: float
    """Mean |difference| left when the other side takes this side's, nats."""
    share: float
    """Capped move squared over the sum of all."""


def effects(a: Side, b: Side, text: Text, places: Tensor, operators: Sequence[str]) -> list[Effect]:
    """Effects of the named operators on the logprobs at some places.

    Args:
        places: int64, of logprobs that start with the text's second token.
    """
    base, other = run(a, text)[places], run(b, text)[places]
    cap = float((other - base).double().abs().quantile(CAPPED_AT)) or float("inf")
    found, squares = [], []
    for name in operators:
        move = run(swapped(a, b, (name,)), text)[places] - base
        left = run(swapped(b, a, (name,)), text)[places] - base
        found.append((name, _mean(move), _mean(left)))
        squares.append(_mean(move.double().abs().clamp(max=cap)) ** 2)
    total = sum(squares)
    if total == 0:  # No operator moves anything alone: all of them together, or none.
        squares, total = [1.0] * len(squares), float(len(squares))
    return [
        Effect(operator=name, alone=alone, left=left, share=square / total)
        for (name, alone, left), square in zip(found, squares, strict=True)
    ]


def _mean(values: Tensor) -> float:
    return float(values.double().abs().mean())
