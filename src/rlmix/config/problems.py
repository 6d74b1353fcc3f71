"""Everything that is wrong with a request, collected and told at once."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlmix.core.errors import ConfigError

CLOSE_ENOUGH = 0.6
"""difflib ratio from which a known name is offered for an unknown one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One fault: where, what we got, what is allowed, what to do."""

    where: str
    what: str
    allowed: str = ""
    hint: str = ""

    def __str__(self) -> str:
        parts = [part for part in (self.what, self.allowed, self.hint) if part]
        return f"{self.where}: {'; '.join(parts)}"


def as_error(problems: Sequence[Problem]) -> ConfigError:
    """One error for all of them, one a line, in the order they were met, without repeats."""
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n".join([f"{len(lines)} problems", *(f"  {line}" for line in lines)]))


def close_names(name: str, known: Iterable[str], *, most: int = 1) -> list[str]:
    """Known names that the writer of `name` may have meant, the likeliest first."""
    lowered = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(name.lower(), lowered, n=most, cutoff=CLOSE_ENOUGH)
    return [lowered[match] for match in matches]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean fp8?`, or nothing when no known name is close."""
    matches = close_names(name, known)
    return f"did you mean {matches[0]}?" if matches else ""


def shown(value: Any) -> str:
    """A value as a user would write it: text in quotes, null and booleans as in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, str) else str(value)
