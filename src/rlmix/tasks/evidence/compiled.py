"""Reports of `go test` (text with -v, and -json) and `cargo test`.

Sources: `go doc test2json`; the libtest output that `cargo test` prints.
"""

import json
import re
from collections.abc import Iterator

from rlmix.tasks.evidence.python import ANSI
from rlmix.tasks.evidence.report import Status, TestReport, collect

_GO_WORDS = {"PASS": Status.PASS, "FAIL": Status.FAIL, "SKIP": Status.SKIP}
_GO_LINE = re.compile(r"^\s*--- (PASS|FAIL|SKIP): (\S+) \([\d.]+s\)$")
_GO_PACKAGE = re.compile(r"^(ok|FAIL|\?)[ \t]+\S+", re.MULTILINE)


def parse_go(text: str) -> TestReport:
    """Outcomes by test name (`TestA/case`); of JSON events also by `package.TestA/case`.

    A name that several packages share joins their outcomes, so one failure fails it.
    """
    text = ANSI.sub("", text).replace("\r\n", "\n")
    events = list(_events(text))
    if events:
        return _from_events(events)
    pairs = []
    for line in text.splitlines():
        if match := _GO_LINE.match(line):
            pairs.append((match[2], _GO_WORDS[match[1]]))
    fault = "" if _GO_PACKAGE.search(text) else "no package reported its end"
    return collect(pairs, fault)


def _events(text: str) -> Iterator[dict[str, object]]:
    for line in text.splitlines():
        if line.startswith("{") and '"Action"' in line:
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(event, dict):
                yield event


def _from_events(events: list[dict[str, object]]) -> TestReport:
    words = {"pass": Status.PASS, "fail": Status.FAIL, "skip": Status.SKIP}
    pairs, started, ended, has_end = [], set(), set(), False
    for event in events:
        action, package, test = event.get("Action"), event.get("Package", ""), event.get("Test")
        if not isinstance(test, str):
            has_end |= action in words
            continue
        name = f"{package}.{test}"
        if action == "run":
            started.add(name)
        elif isinstance(action, str) and action in words:
            ended.add(name)
            pairs += [(test, words[action]), (name, words[action])]
    # A test that never ended took its process with it.
    for name in started - ended:
        pairs += [(name, Status.FAIL), (name.rpartition(".")[2], Status.FAIL)]
    return collect(pairs, "" if has_end else "no package reported its end")


_CARGO_LINE = re.compile(r"^test (?P<name>.+?)(?: - should panic)? \.\.\. (?P<word>\w+).*$")
_CARGO_RESULT = re.compile(
    r"^test result: \w+\. (?P<passed>\d+) passed; (?P<failed>\d+) failed; (?P<ignored>\d+) ignored",
    re.MULTILINE,
)
_CARGO_WORDS = {"ok": Status.PASS, "FAILED": Status.FAIL, "ignored": Status.SKIP}


def parse_cargo(text: str) -> TestReport:
    """Outcomes by test path, such as `module::tests::adds`."""
    text = ANSI.sub("", text).replace("\r\n", "\n")
    pairs = []
    for line in text.splitlines():
        match = _CARGO_LINE.match(line)
        if match and match["word"] in _CARGO_WORDS:
            pairs.append((match["name"], _CARGO_WORDS[match["word"]]))
    results = list(_CARGO_RESULT.finditer(text))
    fault = "" if results else "no crate reported its end"
    counted = sum(int(result["passed"]) for result in results)
    named = sum(status is Status.PASS for _, status in pairs)
    if not fault and named != counted:
        fault = f"{named} tests are named as passed, the closing lines count {counted}"
    return collect(pairs, fault)
