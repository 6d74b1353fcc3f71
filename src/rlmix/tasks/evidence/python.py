"""Reports of pytest (summary and verbose lines) and unittest (verbose lines).

Invariant: output is hostile, so every pattern here takes time in proportion to the text, never to
its square: no two neighbouring parts can share out the same letters in several ways.

Sources: the "short test summary info" section that `pytest -rA` prints, the progress lines of
`pytest -v`, and the lines of `unittest.TextTestResult`, which Django's runner shares.
"""

import re
from collections.abc import Iterator

from rlmix.tasks.evidence.report import Status, TestReport, collect

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_SUMMARY = re.compile(r"^=+ short test summary info =+$", re.MULTILINE)
_END = re.compile(
    r"^=*\s?(?P<counts>(?:\d+ [a-z]+(?:, )?)+|no tests ran) in [\d.]+ ?s[^=\n]*=*$",
    re.MULTILINE,
)
_WORDS = {
    "PASSED": Status.PASS,
    "FAILED": Status.FAIL,
    "ERROR": Status.FAIL,
    "XFAIL": Status.XFAIL,
    "XPASS": Status.XPASS,
}
_SUMMARY_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (.+)$")
_WORKER_LINE = re.compile(r"^\[gw\d+\] \[ *\d+%\] (?P<word>[A-Z]+) (?P<name>\S.*)$")
_VERBOSE_WORD = re.compile(r" (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?= \(|$)")
_PERCENT = re.compile(r"\[ *\d+%\]")


def parse_pytest(text: str) -> TestReport:
    """Outcomes by node id, such as `tests/test_a.py::TestB::test_c[1]`.

    The summary section decides; verbose lines add what it leaves out (skips, which it counts by
    file). Printed text may imitate either, so a second summary or a count that does not fit the
    last line makes the report faulty.
    """
    text = ANSI.sub("", text).replace("\r\n", "\n")
    starts = [match.end() for match in _SUMMARY.finditer(text)]
    ends = list(_END.finditer(text))
    fault = ""
    if not ends:
        fault = "the run has no closing line"
    elif len(starts) > 1 or len(ends) > 1:
        fault = f"{len(starts)} summaries and {len(ends)} closing lines; one run writes one of each"
    pairs = list(_verbose(text))
    if starts:
        summary = list(_summary(text[starts[-1] :]))
        named = {name for name, _ in summary}
        pairs = [(name, status) for name, status in pairs if name not in named] + summary
    if not fault:
        fault = _count_fault(collect(pairs), ends[-1]["counts"])
    return collect(pairs, fault)


def _summary(text: str) -> Iterator[tuple[str, Status]]:
    for line in text.splitlines():
        if _END.match(line):
            return
        if match := _SUMMARY_LINE.match(line):
            word, rest = match.groups()
            yield _node_id(rest), _WORDS[word]


def _node_id(rest: str) -> str:
    """The id in front of ` - message`; brackets of a parameter may hold that too."""
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "[") - (letter == "]")
        if depth <= 0 and rest.startswith(" - ", place):
            return rest[:place]
    return rest.split(" - ")[0] if depth else rest


def _verbose(text: str) -> Iterator[tuple[str, Status]]:
    words = {**_WORDS, "SKIPPED": Status.SKIP}
    for line in text.splitlines():
        name, word = _verbose_line(line.rstrip())
        if word in words and "::" in name:
            yield name, words[word]


def _verbose_line(line: str) -> tuple[str, str]:
    """(name, word) of a progress line; both empty for any other."""
    if match := _WORKER_LINE.match(line):
        return match["name"], match["word"]
    rest, mark, percent = line.rpartition("[")
    if mark and _PERCENT.fullmatch(mark + percent):
        line = rest.rstrip()
    for match in _VERBOSE_WORD.finditer(line):
        # The first word with nothing but a reason in brackets behind it.
        if match.end() == len(line) or line.endswith(")"):
            name = line[: match.start()]
            return (name, match[1]) if "::" in name.partition(" ")[0][1:] else ("", "")
    return "", ""


def _count_fault(report: TestReport, counts: str) -> str:
    """A fault when more tests are claimed to have passed than the closing line counts."""
    said = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", counts)}
    passed = sum(status == frozenset({Status.PASS}) for status in report.outcomes.values())
    if passed > said.get("passed", 0):
        return f"{passed} tests are named as passed, the closing line counts {counts}"
    return ""


_UNIT_LINE = re.compile(r"^(?P<method>\w+) \((?P<where>[\w.<>]++)[^)]*+\)(?P<rest>.*)$")
_UNIT_WORD = re.compile(
    r"(?:^|\.\.\. ?)(?P<word>ok|FAIL|ERROR|skipped .*|expected failure|unexpected success)\s*$"
)
_RAN = re.compile(r"^Ran (\d+) tests? in ", re.MULTILINE)
_VERDICT = re.compile(r"^(OK|FAILED)\b(?: \((.*)\))?\s*$", re.MULTILINE)


def parse_unittest(text: str) -> TestReport:
    """Outcomes by id, such as `pack.test_a.TestB.test_c`, from `-v` output.

    A test with a docstring has its word on the next line, and logs of Django print in between.
    """
    text = ANSI.sub("", text).replace("\r\n", "\n")
    pairs, waiting = [], ""
    for line in text.splitlines():
        match = _UNIT_LINE.match(line)
        if match and line.startswith(("ERROR: ", "FAIL: ")):
            match = None
        if match:
            where, method = match["where"], match["method"]
            waiting = where if where.endswith(f".{method}") else f"{where}.{method}"
            if where.startswith("unittest.loader._FailedTest"):
                waiting = method
        if waiting and (word := _UNIT_WORD.search(line if not match else match["rest"])):
            pairs.append((waiting, _unit_status(word["word"])))
            waiting = ""
    ran, verdicts = _RAN.findall(text), _VERDICT.findall(text)
    fault = ""
    if len(ran) != 1 or len(verdicts) != 1:
        fault = f"{len(ran)} closing lines 'Ran N tests'; one run writes one"
    elif len({name for name, _ in pairs}) > int(ran[0]):
        fault = f"{len(pairs)} outcomes, but the runner counts {ran[0]} tests"
    return collect(pairs, fault)


def _unit_status(word: str) -> Status:
    if word == "ok":
        return Status.PASS
    if word.startswith("skipped"):
        return Status.SKIP
    return Status.XFAIL if word == "expected failure" else Status.FAIL
