"""The bug kinds and the places in a function where one can be put.

A `Site` is one fragment of one line with its right text, the wrong texts that may replace it as
a bug, and the plausible wrong fixes. `EVAL_ONLY_KINDS` never occur in train tasks.
"""

from dataclasses import dataclass

TRAIN_KINDS = (
    "operator",
    "comparison",
    "off_by_one",
    "constant",
    "variable",
    "missing_return",
    "swapped_arguments",
    "default",
    "edge_case",
    "method",
    "boolean",
    "initial_value",
    "accumulation",
    "builtin",
    "module_constant",
)
EVAL_ONLY_KINDS = ("wrong_key", "wrong_index", "swapped_operands")


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A fragment that can be broken. Line numbers count from 0 at the `def` line."""

    kind: str
    line: int
    start: int
    """Column of the fragment in the right line."""
    right: str
    bugs: tuple[str, ...]
    """Texts that make the line wrong."""
    sentences: tuple[str, ...]
    """Paraphrases of what the issue says about it."""
    alternatives: tuple[str, ...] = ()
    """Further plausible but wrong fixes; the other bugs always count as such."""
    constant: str = ""
    """Name of the module constant that holds the value; empty when it is in the function."""

    def wrong_fixes(self, bug: str) -> tuple[str, ...]:
        """Replacements that somebody could try in place of `bug` and that do not mend it."""
        pool = (*self.bugs, *self.alternatives)
        return tuple(dict.fromkeys(text for text in pool if text not in (bug, self.right)))
