"""Output and reports that tested code wrote to stop or break whoever reads them."""

import time
from collections.abc import Callable

import pytest

from rlmix.tasks.evidence.compiled import parse_cargo, parse_go
from rlmix.tasks.evidence.javascript import parse_javascript
from rlmix.tasks.evidence.junit import parse_junit
from rlmix.tasks.evidence.names import NAME_STYLES, renamed
from rlmix.tasks.evidence.python import parse_pytest, parse_unittest
from rlmix.tasks.evidence.report import Status, collect
from rlmix.tasks.evidence.runners import RUNNERS
from rlmix.tasks.verdict import _read_report

N = 60_000
MOST_CPU_S = 5.0
"""Of this process. Patterns that need the square of the length took 10 to 150 s for these."""
SLOW: dict[str, tuple[Callable[[str], object], str]] = {
    "a closing line that goes on": (parse_pytest, "1 passed in 1s" + "=" * N + "x\n"),
    "a name of colons": (parse_pytest, "a" + "::" * (N // 2) + "\n"),
    "many words in a name": (parse_pytest, "a::b" + " PASSED (" * (N // 9) + "\n"),
    "a bracket that never closes": (parse_unittest, "a (" + "b" * 3 * N + "\n"),
    "a name of spaces": (parse_javascript, "\u2713 a" + " " * N + "x\n"),
    "many such names": (parse_javascript, ("\u2713 a" + " " * 4000 + "x\n") * 30),
    "a count of digits": (parse_javascript, "Tests: " + "1" * 3 * N + "\n"),
    "empty lines": (parse_javascript, "\n" * N),
    "dots": (parse_cargo, "test " + "a ... " * (N // 6) + "\n"),
    "events in events": (parse_go, '{"Action":' * N),
}


@pytest.mark.parametrize("name", SLOW)
def test_no_output_takes_more_than_its_length_to_read(name: str) -> None:
    parse, text = SLOW[name]
    started_s = time.process_time()
    parse(text)
    assert time.process_time() - started_s < MOST_CPU_S


@pytest.mark.parametrize("style", NAME_STYLES)
def test_no_name_takes_more_than_its_length_to_change(style: str) -> None:
    report = collect([(" " * N + "x", Status.PASS), ("a." * N + "!", Status.PASS)])
    started_s = time.process_time()
    renamed(report, style)
    assert time.process_time() - started_s < MOST_CPU_S


def test_progress_lines_are_read_as_before() -> None:
    text = (
        "t.py::a PASSED                [ 50%]\nt.py::b[x PASSED y] SKIPPED (no (net))  [100%]\n"
        "[gw0] [ 75%] FAILED t.py::c \nnot::ours here PASSED\nwords t.py::d PASSED\n"
        "=== 1 passed, 1 failed, 1 skipped in 0.01s (0:00:01) ===\n"
    )
    found = parse_pytest(text).outcomes
    assert {name: "/".join(said) for name, said in found.items()} == {
        "t.py::a": "pass",
        "t.py::b[x PASSED y]": "skip",
        "t.py::c": "fail",
        "not::ours here": "pass",
    }


@pytest.mark.parametrize(
    ("runner", "output"),
    [
        ("jest", '{"testResults": [1]}'),
        ("jest", '{"testResults": [{"assertionResults": [{"ancestorTitles": 5}]}]}'),
        ("mocha", '{"stats": {"tests": 1}, "tests": [null]}'),
        ("pytest", "1" * 5000 + " passed in 1s\n"),
        ("unittest", "Ran " + "1" * 5000 + " tests in 1s\n\nOK\n"),
    ],
)
def test_a_report_that_breaks_its_reader_is_worth_nothing(runner: str, output: str) -> None:
    report = _read_report(RUNNERS[runner], output, None)
    assert report.fault.startswith("it cannot be read: ")
    assert report.outcomes == {}


def test_an_entity_in_another_encoding_is_not_expanded() -> None:
    levels = "".join(f'<!ENTITY a{i + 1} "{f"&a{i};" * 10}">' for i in range(8))
    text = (
        f'<?xml version="1.0" encoding="utf-16"?><!DOCTYPE a [<!ENTITY a0 "x">{levels}]>'
        '<testsuite tests="1"><testcase name="&a8;"/></testsuite>'
    )
    assert parse_junit(text.encode("utf-16")).fault == (
        "the XML is no UTF-8, which every runner writes"
    )
