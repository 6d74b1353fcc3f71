"""Identifiers and file names, split so that eval names never occur in train.

A name is two sub-word pieces. Which split may use a pair is decided by the pieces' positions in
the tables below, so the two sets are disjoint by construction and every single piece occurs in
both: an eval name is a new combination of known pieces, never a new piece.
"""

from collections.abc import Sequence
from random import Random

NOUNS = tuple(
    word
    for line in (
        "item order price user line score fee tax rate stock unit page cost part team game",
        "seat room load size step rank mark note task area cash debt gain loss plan code",
        "list word name date hour week node path",
    )
    for word in line.split()
)
VERBS = (
    *("count", "sum", "get", "make", "join", "find", "take", "pick"),
    *("read", "trim", "scale", "check", "merge", "split", "build", "fix"),
)
FILE_ENDS = ("rules", "tools", "data", "core", "report", "store")
CONSTANT_HEADS = ("MAX", "MIN", "BASE", "EXTRA")

EVAL_SHARE = 5
"""One pair in this many belongs to eval."""


def pair_split(first: int, second: int) -> str:
    """Split that owns the name made of piece `first` of one table and `second` of the other."""
    return "eval" if (first * 2 + second * 3) % EVAL_SHARE == 0 else "train"


def draw_pair(
    rng: Random, heads: Sequence[str], tails: Sequence[str], split: str
) -> tuple[str, str]:
    """One (head, tail) pair that `split` owns."""
    while True:
        first, second = rng.randrange(len(heads)), rng.randrange(len(tails))
        if pair_split(first, second) == split:
            return heads[first], tails[second]


class NameSource:
    """Draws names for one task; no name is given out twice."""

    def __init__(self, rng: Random, split: str) -> None:
        self._rng = rng
        self._split = split
        self._used: set[str] = set()

    def _fresh(self, heads: Sequence[str], tails: Sequence[str], join: str) -> str:
        while True:
            name = join.join(draw_pair(self._rng, heads, tails, self._split))
            if name not in self._used:
                self._used.add(name)
                return name

    def function(self) -> str:
        return self._fresh(VERBS, NOUNS, "_")

    def file(self) -> str:
        return self._fresh(NOUNS, FILE_ENDS, "_") + ".py"

    def constant(self) -> str:
        return self._fresh(CONSTANT_HEADS, [noun.upper() for noun in NOUNS], "_")

    def words(self, count: int) -> list[str]:
        """`count` different plain nouns for parameters and local variables."""
        return self._rng.sample(NOUNS, count)
