"""How a data set names tests, from how the runner names them.

Each style is a function from a runner's name to the set's; a report is renamed before the rule
looks for required names in it.
"""

import re
from collections.abc import Callable

from rlmix.tasks.evidence.report import TestReport, collect

_DJANGO = re.compile(r"^(?P<where>[\w.]+)\.(?P<method>\w+)$")
_TIMING = re.compile(r"(?<!\s)\s*[\[(]\s*\d+(?:\.\d+)?\s*m?s(?:ec)?\s*[\])]\s*$")


def same(name: str) -> str:
    return name


def django(name: str) -> str:
    """`pack.tests.Case.test_x` -> `test_x (pack.tests.Case)`, as SWE-bench lists Django's."""
    match = _DJANGO.match(name)
    return f"{match['method']} ({match['where']})" if match else name


def last_parts(name: str) -> str:
    """`tests/test_a.py::Case::test_x` -> `Case.test_x`, as R2E lists them."""
    return ".".join(name.split("::")[1:]) if "::" in name else name


def without_timing(name: str) -> str:
    """Without a duration at the end, as SWE-rebench compares them."""
    return _TIMING.sub("", name)


NAME_STYLES: dict[str, Callable[[str], str]] = {
    "same": same,
    "django": django,
    "last_parts": last_parts,
    "without_timing": without_timing,
}


def renamed(report: TestReport, style: str) -> TestReport:
    """The report in the names of a set; names that become equal join their outcomes."""
    change = NAME_STYLES[style]
    pairs = [(change(name), status) for name, said in report.outcomes.items() for status in said]
    return collect(pairs, report.fault)
