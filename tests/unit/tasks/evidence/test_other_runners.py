"""Reports of runners that are not installed here, in the forms that their documentation shows."""

import json

import pytest

from rlmix.core.errors import DataError
from rlmix.tasks.evidence.compiled import parse_cargo, parse_go
from rlmix.tasks.evidence.javascript import parse_javascript
from rlmix.tasks.evidence.report import Status, TestReport
from rlmix.tasks.evidence.runners import RUNNERS, runner_of

PASS, FAIL, SKIP = {Status.PASS}, {Status.FAIL}, {Status.SKIP}


def outcomes(report: TestReport) -> dict[str, set[Status]]:
    return {name: set(said) for name, said in report.outcomes.items()}


GO_TEXT = """=== RUN   TestAdd
=== RUN   TestAdd/zero_case
--- PASS: TestAdd (0.00s)
    --- PASS: TestAdd/zero_case (0.00s)
=== RUN   TestSub
    sub_test.go:9: got 1
--- FAIL: TestSub (0.01s)
--- SKIP: TestNet (0.00s)
FAIL
FAIL	example.com/calc	0.013s
?   	example.com/none	[no test files]
FAIL
"""


def test_go_text_names_tests_and_subtests() -> None:
    report = parse_go(GO_TEXT)
    assert report.fault == ""
    assert outcomes(report) == {
        "TestAdd": PASS,
        "TestAdd/zero_case": PASS,
        "TestSub": FAIL,
        "TestNet": SKIP,
    }


def test_a_go_package_that_left_in_init_has_run_nothing() -> None:
    report = parse_go("ok  \texample.com/calc\t0.002s\n")
    assert (report.num_executed, report.fault) == (0, "")


def test_go_output_without_a_package_line_has_no_end() -> None:
    assert parse_go("--- PASS: TestAdd (0.00s)\n").fault == "no package reported its end"


def event(**fields: object) -> str:
    return json.dumps(fields) + "\n"


def test_go_events_give_plain_and_qualified_names_and_fail_what_never_ended() -> None:
    text = (
        "# noise from a build\n"
        + event(Action="run", Package="p/a", Test="TestX")
        + event(Action="output", Package="p/a", Test="TestX", Output="--- PASS: TestY (0.00s)\n")
        + event(Action="pass", Package="p/a", Test="TestX", Elapsed=0)
        + event(Action="pass", Package="p/a")
        + event(Action="run", Package="p/b", Test="TestX")
        + event(Action="fail", Package="p/b", Test="TestX")
        + event(Action="run", Package="p/b", Test="TestHung")
        + event(Action="fail", Package="p/b")
    )
    assert outcomes(parse_go(text)) == {
        "TestX": {Status.PASS, Status.FAIL},
        "p/a.TestX": PASS,
        "p/b.TestX": FAIL,
        "p/b.TestHung": FAIL,
        "TestHung": FAIL,
    }


CARGO = """
running 4 tests
test sums::tests::adds ... ok
test sums::tests::divides - should panic ... ok
test sums::tests::net ... ignored, needs a network
test sums::tests::subs ... FAILED

failures:

test result: FAILED. 2 passed; 1 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests sums

running 1 test
test src/lib.rs - sums::add (line 3) ... ok

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.30s
"""


def test_cargo_names_tests_of_all_crates() -> None:
    report = parse_cargo(CARGO)
    assert report.fault == ""
    assert outcomes(report) == {
        "sums::tests::adds": PASS,
        "sums::tests::divides": PASS,
        "sums::tests::net": SKIP,
        "sums::tests::subs": FAIL,
        "src/lib.rs - sums::add (line 3)": PASS,
    }


def test_a_printed_cargo_line_contradicts_the_count() -> None:
    report = parse_cargo(CARGO.replace("failures:", "test sums::tests::more ... ok"))
    assert report.fault == "4 tests are named as passed, the closing lines count 3"
    assert parse_cargo("test a ... ok\n").fault == "no crate reported its end"


JEST_TEXT = """PASS src/sum.test.js
  adding
    \u2713 adds two numbers (2 ms)
    \u2715 carries (1 ms)
    nested
      \u25cb skipped later
  \u2713 alone

Tests:       1 failed, 1 skipped, 2 passed, 4 total
"""


def test_jest_text_joins_the_titles() -> None:
    report = parse_javascript(JEST_TEXT)
    assert report.fault == ""
    assert outcomes(report) == {
        "adding adds two numbers": PASS,
        "adding carries": FAIL,
        "adding nested later": SKIP,
        "alone": PASS,
    }


def test_the_json_of_jest_is_taken_before_any_text() -> None:
    document = {
        "numTotalTests": 2,
        "testResults": [
            {
                "name": "/repo/a.test.js",
                "status": "failed",
                "assertionResults": [
                    {"fullName": "adding works", "status": "passed"},
                    {"ancestorTitles": ["adding"], "title": "fails", "status": "failed"},
                    {"fullName": "adding waits", "status": "pending"},
                ],
            }
        ],
    }
    text = "  \u2713 adding fails\n" + json.dumps(document) + "\nDone\n"
    report = parse_javascript(text)
    assert report.fault == ""
    assert outcomes(report) == {"adding works": PASS, "adding fails": FAIL, "adding waits": SKIP}


def test_a_test_file_that_cannot_be_loaded_is_a_fault() -> None:
    document = {"testResults": [{"name": "a", "status": "failed", "assertionResults": []}]}
    assert parse_javascript(json.dumps(document)).fault == "1 test files could not be loaded"


VITEST_TEXT = """
 \u2713 src/a.test.ts > adding > adds 3ms
 \u00d7 src/a.test.ts > adding > carries 1ms
 \u2193 src/a.test.ts > adding > later

 Test Files  1 failed (1)
      Tests  1 failed | 1 passed | 1 skipped (3)
"""


def test_vitest_text_keeps_its_own_names() -> None:
    report = parse_javascript(VITEST_TEXT)
    assert report.fault == ""
    assert outcomes(report) == {
        "src/a.test.ts > adding > adds": PASS,
        "src/a.test.ts > adding > carries": FAIL,
        "src/a.test.ts > adding > later": SKIP,
    }


MOCHA_TEXT = """

  Sums
    \u2714 adds (41ms)
    1) carries
    - waits

  1 passing (5ms)
  1 pending
  1 failing

"""


def test_mocha_text_is_read() -> None:
    report = parse_javascript(MOCHA_TEXT)
    assert report.fault == ""
    assert outcomes(report) == {"Sums adds": PASS, "Sums carries": FAIL, "Sums waits": SKIP}


def test_the_json_of_mocha_fails_hooks_and_checks_its_count() -> None:
    document = {
        "stats": {"tests": 2},
        "tests": [
            {"fullTitle": "Sums adds", "err": {}},
            {"fullTitle": "Sums waits", "err": {}},
        ],
        "pending": [{"fullTitle": "Sums waits"}],
        "failures": [{"fullTitle": 'Sums "before each" hook', "err": {"message": "x"}}],
    }
    report = parse_javascript(json.dumps(document, indent=2))
    assert report.fault == ""
    assert outcomes(report) == {
        "Sums adds": PASS,
        "Sums waits": SKIP,
        'Sums "before each" hook': FAIL,
    }
    document["stats"] = {"tests": 3}
    assert "the summary counts 3" in parse_javascript(json.dumps(document)).fault


def test_a_run_cut_off_in_the_middle_has_no_closing_line() -> None:
    assert parse_javascript("  \u2713 adds\n").fault == "the run has no closing line"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("pytest -rA tests/test_a.py", "pytest"),
        ("cd /testbed && python -m pytest -q", "pytest"),
        ("./.venv/bin/py.test", "pytest"),
        ("python3 -W ignore -m unittest -v tests", "unittest"),
        ("./tests/runtests.py --verbosity 2 admin", "unittest"),
        ("python manage.py test app", "unittest"),
        ("go test -v ./...", "go"),
        ("cargo +nightly test --all", "cargo"),
        ("npx jest --ci", "jest"),
        ("yarn vitest run", "vitest"),
        ("node_modules/.bin/mocha spec", "mocha"),
    ],
)
def test_the_runner_is_found_in_a_command(command: str, name: str) -> None:
    assert runner_of(command) is RUNNERS[name]


@pytest.mark.parametrize(
    "command", ["./check.sh", "make test", "pytest a && go test ./...", "cat pytest_notes.txt"]
)
def test_an_unknown_or_mixed_command_has_no_runner(command: str) -> None:
    assert runner_of(command) is None


def test_a_hint_decides_and_a_wrong_one_is_refused() -> None:
    assert runner_of("./check.sh", "go") is RUNNERS["go"]
    with pytest.raises(DataError, match=r"runner 'gotest'; allowed: pytest, unittest, go"):
        runner_of("./check.sh", "gotest")
