"""The rule for test commands, as a table: what was reported, and what it earns."""

import pytest

from rlmix.core.trajectory import Outcome
from rlmix.tasks.evidence.report import Status, TestReport, collect
from rlmix.tasks.rule import CommandRun, baseline_of, decide_command

PASS, FAIL, SKIP, XFAIL = Status.PASS, Status.FAIL, Status.SKIP, Status.XFAIL


def report(fault: str = "", **said: Status) -> TestReport:
    return collect(said.items(), fault)


ROWS = [
    # exit, report, required, skippable -> outcome, part of the detail
    (0, report(a=PASS, b=PASS), ("a",), ("b",), Outcome.PASS, "1 required tests passed"),
    (0, report(a=PASS, b=SKIP), ("a",), ("b",), Outcome.PASS, "1 required"),
    (0, report(a=XFAIL), ("a",), (), Outcome.PASS, "1 required"),
    (0, report(a=SKIP), ("a",), (), Outcome.FAIL, "no test ran"),
    (0, report(a=SKIP, c=PASS), ("a",), (), Outcome.FAIL, "0 of 1 required tests passed; a: skip"),
    (0, report(c=PASS), ("a",), (), Outcome.FAIL, "a: did not run"),
    (0, report(a=PASS), ("a",), ("b",), Outcome.FAIL, "b: did not run"),
    (1, report(a=PASS, b=FAIL), ("a",), ("b",), Outcome.FAIL, "b: fail"),
    (1, report(a=PASS, c=FAIL), ("a",), (), Outcome.PASS, "1 required"),
    (1, report(a=PASS), ("a",), (), Outcome.FAIL, "exit 1 although no test failed"),
    (0, report(), ("a",), (), Outcome.FAIL, "no test ran (exit 0)"),
    (0, report("x", a=PASS), ("a",), (), Outcome.FAIL, "report is worth nothing: x"),
    (None, report(a=PASS), ("a",), (), Outcome.FAIL, "timed_out"),
    (0, None, ("a",), (), Outcome.FAIL, "nobody can read this runner"),
    (0, None, (), (), Outcome.PASS, "unknown runner"),
    (3, None, (), (), Outcome.FAIL, "exit 3"),
    (0, report(a=PASS), (), (), Outcome.PASS, "1 tests passed, none named"),
    (1, report(a=PASS, b=FAIL), (), (), Outcome.FAIL, "1 tests failed; b"),
]


@pytest.mark.parametrize("row", ROWS)
def test_the_rule(row: tuple) -> None:  # type: ignore[type-arg]
    exit_code, said, required, skippable, outcome, detail = row
    run = CommandRun(exit_code=exit_code, report=said)
    verdict = decide_command(run, required=required, skippable=skippable)
    assert verdict.outcome is outcome, verdict
    assert detail in verdict.detail


def test_only_what_rests_on_an_exit_code_or_on_unnamed_tests_is_weak() -> None:
    named = decide_command(CommandRun(exit_code=0, report=report(a=PASS)), required=("a",))
    unnamed = decide_command(CommandRun(exit_code=0, report=report(a=PASS)), required=())
    unknown = decide_command(CommandRun(exit_code=0, report=None), required=())
    assert [v.is_weak for v in (named, unnamed, unknown)] == [False, True, True]


BASE = report(old=PASS, bug=FAIL, off=SKIP)
AFTER = [
    (report(old=PASS, bug=PASS, off=SKIP), Outcome.PASS, "1 tests that failed on the pristine"),
    (report(old=SKIP, bug=PASS), Outcome.PASS, "1 tests"),
    (report(old=PASS, bug=SKIP), Outcome.FAIL, "bug failed on the pristine tree and now: skip"),
    (report(old=PASS), Outcome.FAIL, "bug failed on the pristine tree and now: did not run"),
    (report(bug=PASS), Outcome.FAIL, "old passed on the pristine tree and now: did not run"),
    (report(old=PASS, bug=PASS, new=FAIL), Outcome.FAIL, "1 tests that the pristine tree had not"),
]


@pytest.mark.parametrize(("after", "outcome", "detail"), AFTER)
def test_a_pristine_run_stands_in_for_names(
    after: TestReport, outcome: Outcome, detail: str
) -> None:
    exit_code = 1 if after.failing() else 0
    run = CommandRun(exit_code=exit_code, report=after)
    verdict = decide_command(run, required=(), baseline=BASE)
    assert verdict.outcome is outcome, verdict
    assert detail in verdict.detail


def test_nothing_that_failed_before_means_nothing_was_shown() -> None:
    clean = report(old=PASS)
    run = CommandRun(exit_code=0, report=clean)
    verdict = decide_command(run, required=(), baseline=clean)
    assert verdict.detail == "nothing that failed on the pristine tree passes now"


CANARIES = {"t_n1_fails": FAIL, "t_n1_passes": PASS}


@pytest.mark.parametrize(
    ("exit_code", "canaries", "outcome", "detail"),
    [
        (1, CANARIES, Outcome.PASS, "1 required"),
        (0, CANARIES, Outcome.FAIL, "exit 0 although a canary test failed"),
        (1, {**CANARIES, "t_n1_fails": PASS}, Outcome.FAIL, "the runner was bent"),
        (1, {**CANARIES, "t_n1_passes": SKIP}, Outcome.FAIL, "the runner was bent"),
        (1, {"t_n1_fails": FAIL}, Outcome.FAIL, "1 of 2 canary tests"),
        (0, {}, Outcome.FAIL, "0 of 2 canary tests"),
        (2, CANARIES, Outcome.FAIL, "exit 2 although no test failed"),
    ],
)
def test_canaries_must_come_out_as_they_are(
    exit_code: int, canaries: dict[str, Status], outcome: Outcome, detail: str
) -> None:
    run = CommandRun(exit_code=exit_code, report=report(a=PASS, **canaries), canary="n1")
    verdict = decide_command(run, required=("a",))
    assert (verdict.outcome, verdict.num_executed if canaries == CANARIES else 1) == (outcome, 1)
    assert detail in verdict.detail


def test_a_baseline_holds_no_canary_and_no_doubt() -> None:
    run = CommandRun(exit_code=1, report=report(a=FAIL, **CANARIES), canary="n1")
    assert baseline_of(run) == report(a=FAIL)
    doubtful = CommandRun(exit_code=1, report=report("x", a=FAIL))
    assert baseline_of(doubtful) is None
    assert baseline_of(CommandRun(exit_code=None, report=report(a=FAIL))) is None
