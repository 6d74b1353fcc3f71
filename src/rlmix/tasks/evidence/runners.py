"""Which runner a test command uses, and who reads its report."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from rlmix.core.errors import DataError
from rlmix.tasks.evidence.compiled import parse_cargo, parse_go
from rlmix.tasks.evidence.javascript import parse_javascript
from rlmix.tasks.evidence.python import parse_pytest, parse_unittest
from rlmix.tasks.evidence.report import TestReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """One family of test runners."""

    parse: Callable[[str], TestReport]
    """Output of the command -> outcomes."""
    command: re.Pattern[str]
    """Finds the runner in a test command."""


_START = r"(?:^|[\s;&|(/])"
RUNNERS: dict[str, Runner] = {
    "pytest": Runner(parse=parse_pytest, command=re.compile(rf"{_START}(?:pytest|py\.test)\b")),
    "unittest": Runner(
        parse=parse_unittest,
        command=re.compile(rf"-m\s+unittest\b|{_START}(?:\./)?(?:manage\.py test|runtests\.py)\b"),
    ),
    "go": Runner(parse=parse_go, command=re.compile(rf"{_START}go\s+test\b|\bgotestsum\b")),
    "cargo": Runner(parse=parse_cargo, command=re.compile(rf"{_START}cargo\s+(?:\+\S+\s+)?test\b")),
    "jest": Runner(parse=parse_javascript, command=re.compile(rf"{_START}jest\b")),
    "vitest": Runner(parse=parse_javascript, command=re.compile(rf"{_START}vitest\b")),
    "mocha": Runner(parse=parse_javascript, command=re.compile(rf"{_START}_?mocha\b")),
}
"""By name, in the order in which a command is looked through."""


def runner_of(command: str, hint: str = "") -> Runner | None:
    """The runner that `hint` names, else the one that `command` shows; None when unknown.

    Raises:
        DataError: the hint names no runner.
    """
    if hint:
        if hint not in RUNNERS:
            raise DataError(f"task: runner {hint!r}; allowed: {', '.join(RUNNERS)}, or empty")
        return RUNNERS[hint]
    found = [runner for runner in RUNNERS.values() if runner.command.search(command)]
    return found[0] if len(found) == 1 else None
