"""The outcomes of one test run, by test name, whatever runner they came from.

Invariant: a name that was not reported is absent, and absent is never a pass. A name reported twice
keeps both outcomes, and is passed only when both are.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """What a runner says about one test."""

    PASS = "pass"
    FAIL = "fail"
    """A failure, an error in set-up or tear-down, or a success that the runner forbids."""
    SKIP = "skip"
    XFAIL = "xfail"
    """It failed, as its author said it would. Counts as passed."""
    XPASS = "xpass"
    """It passed although its author said it would fail, and the runner allows that."""


GOOD = frozenset({Status.PASS, Status.XFAIL, Status.XPASS})


@dataclass(frozen=True, kw_only=True, slots=True)
class TestReport:
    """Every outcome that a runner reported."""

    __test__ = False  # pytest, this is no test.

    outcomes: Mapping[str, frozenset[Status]]
    fault: str = ""
    """Why the report cannot be trusted: it contradicts itself, or has no end."""

    @property
    def num_executed(self) -> int:
        """Tests that ran; a skipped one did not."""
        return sum(bool(said - {Status.SKIP}) for said in self.outcomes.values())

    def has_passed(self, name: str) -> bool:
        said = self.outcomes.get(name)
        return bool(said) and said <= GOOD  # type: ignore[operator]

    def has_passed_or_skipped(self, name: str) -> bool:
        said = self.outcomes.get(name)
        return bool(said) and said <= GOOD | {Status.SKIP}  # type: ignore[operator]

    def said(self, name: str) -> str:
        """The outcomes of a test in words."""
        return "/".join(sorted(self.outcomes.get(name, ()))) or "did not run"

    def failing(self) -> tuple[str, ...]:
        """Names with at least one failure, sorted."""
        return tuple(sorted(n for n, said in self.outcomes.items() if Status.FAIL in said))


def collect(pairs: Iterable[tuple[str, Status]], fault: str = "") -> TestReport:
    """A report of (name, status) pairs; equal names are joined."""
    outcomes: dict[str, set[Status]] = {}
    for name, status in pairs:
        outcomes.setdefault(name, set()).add(status)
    return TestReport(outcomes={n: frozenset(said) for n, said in outcomes.items()}, fault=fault)


EMPTY = collect(())
