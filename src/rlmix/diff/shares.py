"""Stage 6: how much of a difference each operator carries, by swapping it.

For every operator that differs on the same inputs, the other side's operator is put into this side
and the text is run again: what the logprobs then move by is what that operator does alone. Moves of
nearly independent errors add up as squares, so an operator's share is its square over the sum.
Leave-one-out goes the other way: this side's operator put into the other side, and what is left.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rlmix.diff.program import Side, Text, run, swapped


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """One operator, over all layers."""

    operator: str
    alone: float
    """Mean |move| of this side's logprobs when only it comes from the other side, nats."""
    left: float
    """Mean |difference| left when the other side takes this side's, nats."""
    share: float
    """alone squared over the sum of all."""


def effects(a: Side, b: Side, text: Text, places: Tensor, operators: Sequence[str]) -> list[Effect]:
    """Effects of the named operators on the logprobs at some places.

    Args:
        places: int64, of logprobs that start with the text's second token.
    """
    base, other = run(a, text)[places], run(b, text)[places]
    alone, left = [], []
    for name in operators:
        alone.append(_mean(run(swapped(a, b, (name,)), text)[places] - base))
        left.append(_mean(run(swapped(b, a, (name,)), text)[places] - base))
    if not operators:
        return []
    total = sum(move**2 for move in alone)
    if total == 0:  # Differences that no operator makes alone, or none at all.
        total, alone_squares = 1.0, [0.0] * len(alone)
        if _mean(other - base) > 0:
            alone_squares = [1.0 / len(alone)] * len(alone)
    else:
        alone_squares = [move**2 for move in alone]
    return [
        Effect(operator=name, alone=one, left=rest, share=square / total)
        for name, one, rest, square in zip(operators, alone, left, alone_squares, strict=True)
    ]


def _mean(values: Tensor) -> float:
    return float(values.double().abs().mean())
