"""Stage 6: how much of a difference each operator carries, by swapping it.

For every operator that differs on the same inputs, the other side's operator is put into this side
and the text is run again: what the logprobs then move by is what that operator does alone. Moves
of nearly independent errors add up as squares. That holds between classes of causes, not within
one: any rounding that differs tips others, so seven casts together move hardly more than one. So
all operators of a class are swapped together, a class has its square over the sum of the squares,
and its operators divide that by their own. For shares, moves are capped at what nine in ten tokens
differ by: a token on the verge of another expert moves by nats whatever is swapped. Leave-one-out
goes the other way: this side's operator put into the other side, and what is left.
"""

from collections.abc import Mapping
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
    """Of the whole difference, see above; all operators together have 1."""


def effects(
    a: Side, b: Side, text: Text, places: Tensor, operators: Mapping[str, str]
) -> list[Effect]:
    """Effects of operators on the logprobs at some places.

    Args:
        places: int64, of logprobs that start with the text's second token.
        operators: name -> class of its cause.
    """
    base, other = run(a, text)[places], run(b, text)[places]
    cap = float((other - base).double().abs().quantile(CAPPED_AT)) or float("inf")

    def square(names: tuple[str, ...]) -> float:
        move = run(swapped(a, b, names), text)[places] - base
        return _mean(move.double().abs().clamp(max=cap)) ** 2

    moves = {name: run(swapped(a, b, (name,)), text)[places] - base for name in operators}
    own = {name: _mean(move.double().abs().clamp(max=cap)) ** 2 for name, move in moves.items()}
    members: dict[str, tuple[str, ...]] = {}
    for name, cause in operators.items():
        members[cause] = (*members.get(cause, ()), name)
    together = {
        cause: own[names[0]] if len(names) == 1 else square(names)
        for cause, names in members.items()
    }
    total = sum(together.values())
    found = []
    for name, cause in operators.items():
        left = run(swapped(b, a, (name,)), text)[places] - base
        of_class = _frac(together[cause], total, len(members))
        in_class = _frac(own[name], sum(own[one] for one in members[cause]), len(members[cause]))
        found.append(
            Effect(
                operator=name,
                alone=_mean(moves[name]),
                left=_mean(left),
                share=of_class * in_class,
            )
        )
    return found


def _frac(part: float, whole: float, count: int) -> float:
    """part / whole; where nothing moves alone all `count` parts have the same."""
    return part / whole if whole > 0 else 1 / count


def _mean(values: Tensor) -> float:
    return float(values.double().abs().mean())
