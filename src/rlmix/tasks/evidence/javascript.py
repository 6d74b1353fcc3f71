"""Reports of jest, vitest and mocha: their JSON reporters, else their text.

Sources: jest's `--json` document (vitest's JSON reporter has the same shape), mocha's `json`
reporter, and the marks that the default reporters print.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from rlmix.tasks.evidence.python import ANSI
from rlmix.tasks.evidence.report import Status, TestReport, collect

_JEST_WORDS = {
    "passed": Status.PASS,
    "failed": Status.FAIL,
    "pending": Status.SKIP,
    "skipped": Status.SKIP,
    "todo": Status.SKIP,
    "disabled": Status.SKIP,
}
_MARKS = {"✓": Status.PASS, "✔": Status.PASS, "√": Status.PASS, "✕": Status.FAIL, "×": Status.FAIL}
_SKIP_MARKS = {"○", "↓", "✎"}
_DURATION = re.compile(r"(?<!\s)\s+\(?\d+(?:\.\d+)?\s?m?s\)?$")
_LINE = re.compile(r"^(?P<indent>\s*)(?P<mark>\S)\s+(?P<name>\S.*)$")
_MOCHA_FAIL = re.compile(r"^(?P<indent>\s{2,})\d+\) +(?P<name>\S.*)$")
_MOCHA_PENDING = re.compile(r"^(?P<indent>\s{2,})- +(?P<name>\S.*)$")
_END = re.compile(
    r"^[ \t]*(?:Tests:?[ \t].*?\b\d+ (?:passed|failed|skipped)|\d+ passing)", re.MULTILINE
)


def parse_javascript(text: str) -> TestReport:
    """Outcomes by full name: the titles of its suites and its own, joined by one space.

    Vitest's text keeps its own form, `file > suite > test`.
    """
    text = ANSI.sub("", text).replace("\r\n", "\n")
    for document in _documents(text):
        if isinstance(document.get("testResults"), list):
            return collect(_jest(document), _jest_fault(document))
        if isinstance(document.get("stats"), dict) and isinstance(document.get("tests"), list):
            return collect(_mocha(document), _mocha_fault(document))
    fault = "" if _END.search(text) else "the run has no closing line"
    return collect(_text(text), fault)


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects that start at the beginning of a line; the last one first."""
    decoder = json.JSONDecoder()
    starts = [match.start() for match in re.finditer(r"^\{", text, re.MULTILINE)]
    for start in reversed(starts[-20:]):
        try:
            document, _ = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(document, dict):
            yield document


def _jest(document: dict[str, Any]) -> Iterator[tuple[str, Status]]:
    for suite in document["testResults"]:
        for test in suite.get("assertionResults", ()):
            status = _JEST_WORDS.get(str(test.get("status")), Status.FAIL)
            titles = [*test.get("ancestorTitles", ()), test.get("title", "")]
            yield str(test.get("fullName") or " ".join(map(str, titles))).strip(), status


def _jest_fault(document: dict[str, Any]) -> str:
    broken = [s for s in document["testResults"] if s.get("status") == "failed"]
    unread = [s for s in broken if not s.get("assertionResults")]
    return f"{len(unread)} test files could not be loaded" if unread else ""


def _mocha(document: dict[str, Any]) -> Iterator[tuple[str, Status]]:
    pending = {test.get("fullTitle") for test in document.get("pending", ())}
    for test in document["tests"]:
        name = str(test.get("fullTitle", ""))
        if test.get("fullTitle") in pending:
            yield name, Status.SKIP
        else:
            yield name, Status.FAIL if test.get("err") else Status.PASS
    # Failed hooks are no tests, yet they fail the run.
    for test in document.get("failures", ()):
        yield str(test.get("fullTitle", "")), Status.FAIL


def _mocha_fault(document: dict[str, Any]) -> str:
    counted, named = document["stats"].get("tests"), len(document["tests"])
    return "" if counted == named else f"{named} tests are listed, the summary counts {counted}"


def _text(text: str) -> Iterator[tuple[str, Status]]:
    """Marks at the start of a line; enclosing titles are the less indented lines above."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        if not line.strip():
            continue
        marked = _marked(line)
        indent = len(line) - len(line.lstrip())
        while above and above[-1][0] >= indent:
            above.pop()
        if marked is None:
            above.append((indent, line.strip()))
            continue
        title, status = marked
        suites = [name for depth, name in above if depth > 0]
        yield " ".join([*suites, title]), status


def _marked(line: str) -> tuple[str, Status] | None:
    line = line.rstrip()
    match = _LINE.match(line)
    if match and (match["mark"] in _MARKS or match["mark"] in _SKIP_MARKS):
        name = _DURATION.sub("", match["name"])
        name = name.removeprefix("skipped ") if match["mark"] == "○" else name
        return name, _MARKS.get(match["mark"], Status.SKIP)
    if match := _MOCHA_FAIL.match(line):
        return match["name"], Status.FAIL
    if match := _MOCHA_PENDING.match(line):
        return match["name"], Status.SKIP
    return None
