"""What counts as solved: pure rules from what a verdict's sandbox reported to an outcome.

Invariant: exit code 0 alone never earns 1 where the runner is known. Tests must have run, required
names must have passed, an absent or skipped name has not, and a report that contradicts itself is
worth nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rlmix.core.trajectory import Outcome
from rlmix.sandbox.protocol import PythonResult
from rlmix.tasks.evidence.report import Status, TestReport

FAILING_CANARY, PASSING_CANARY = "canary.Canary.test_fails", "canary.Canary.test_passes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What hidden tests say about a diff."""

    outcome: Outcome
    detail: str
    """One line: which rule decided."""
    void_reason: str = ""
    reverted: tuple[str, ...] = ()
    """Protected paths that the diff had changed and that were put back."""
    num_passed: int = 0
    """Required tests that passed."""
    num_executed: int = 0
    """Tests that the runner reported as run; 0 when nobody could read its report."""
    exit_code: int | None = None
    """Of the test command; None when it never ended or there is none."""
    timed_out: bool = False
    is_weak: bool = False
    """The reward rests on an exit code, or on tests that nobody named: easier to get wrongly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandRun:
    """One run of a test command."""

    exit_code: int | None
    """None: out of time."""
    report: TestReport | None
    """None: the runner is unknown."""
    canary: str = ""
    """Part of the names of two tests of ours, one that fails and one that passes; empty when the
    runner was given none."""
    reverted: tuple[str, ...] = ()


def decide_command(
    run: CommandRun,
    *,
    required: tuple[str, ...],
    skippable: tuple[str, ...] = (),
    baseline: TestReport | None = None,
) -> Verdict:
    """The verdict on a test command.

    Args:
        required: names that must have passed.
        skippable: names that must have passed or been skipped.
        baseline: the same command on the pristine tree with the hidden tests; stands in for the
            lists where a task has none: what failed there must pass, what passed must not fail.
    """
    report = run.report
    num_executed = 0 if report is None else report.num_executed

    def end(outcome: Outcome, detail: str, *, weak: bool = False, passed: int = 0) -> Verdict:
        return Verdict(
            outcome=outcome,
            detail=detail,
            reverted=run.reverted,
            num_passed=passed,
            num_executed=num_executed,
            exit_code=run.exit_code,
            timed_out=run.exit_code is None,
            is_weak=weak,
        )

    if run.exit_code is None:
        return end(Outcome.FAIL, "timed_out")
    if report is None:
        if required:
            return end(Outcome.FAIL, "required tests are named, but nobody can read this runner")
        if run.exit_code != 0:
            return end(Outcome.FAIL, f"exit {run.exit_code}", weak=True)
        return end(Outcome.PASS, "exit 0 of an unknown runner", weak=True)
    if report.fault:
        return end(Outcome.FAIL, f"report is worth nothing: {report.fault}")
    report, fault, exit_code = _without_canary(report, run)
    num_executed = report.num_executed
    if fault:
        return end(Outcome.FAIL, fault)
    if num_executed == 0:
        return end(Outcome.FAIL, f"no test ran (exit {run.exit_code})")
    failing = report.failing()
    if exit_code != 0 and not failing:
        return end(Outcome.FAIL, f"exit {exit_code} although no test failed")
    if not required and not skippable:
        return _unlisted(report, failing, exit_code, baseline, end)
    passed = [name for name in required if report.has_passed(name)]
    if len(passed) < len(required):
        missing = next(name for name in required if not report.has_passed(name))
        detail = f"{len(passed)} of {len(required)} required tests passed; {missing}: "
        return end(Outcome.FAIL, detail + report.said(missing), passed=len(passed))
    broken = [name for name in skippable if not report.has_passed_or_skipped(name)]
    if broken:
        detail = f"{len(broken)} tests that passed before do not; {broken[0]}: "
        return end(Outcome.FAIL, detail + report.said(broken[0]), passed=len(passed))
    return end(Outcome.PASS, f"{len(passed)} required tests passed", passed=len(passed))


def baseline_of(run: CommandRun) -> TestReport | None:
    """The report of a run on the pristine tree without our own tests; None when nobody can read
    it or it contradicts itself."""
    if run.report is None or run.report.fault or run.exit_code is None:
        return None
    report, fault, _ = _without_canary(run.report, run)
    return None if fault else report


def _without_canary(report: TestReport, run: CommandRun) -> tuple[TestReport, str, int]:
    """(report without our two tests, what is wrong with them, exit code without them)."""
    assert run.exit_code is not None
    if not run.canary:
        return report, "", run.exit_code
    ours = {name for name in report.outcomes if run.canary in name}
    said = {name.rpartition("_")[2]: report.outcomes[name] for name in ours}
    rest = TestReport(outcomes={n: s for n, s in report.outcomes.items() if n not in ours})
    if said != {"fails": {Status.FAIL}, "passes": {Status.PASS}}:
        return rest, f"{len(ours)} of 2 canary tests gave their outcome: the runner was bent", 1
    if run.exit_code == 0:
        return rest, "exit 0 although a canary test failed: the runner was bent", 0
    return rest, "", 0 if run.exit_code == 1 and not rest.failing() else run.exit_code


def _unlisted(report, failing, exit_code, baseline, end):  # type: ignore[no-untyped-def]
    """Tasks that name no tests: the pristine run says which ones matter."""
    if failing and baseline is None:
        return end(Outcome.FAIL, f"{len(failing)} tests failed; {failing[0]}")
    if baseline is None:
        return end(Outcome.PASS, f"{report.num_executed} tests passed, none named", weak=True)
    fixed = [name for name in baseline.failing() if report.has_passed(name)]
    for name in baseline.outcomes:
        was_bad = not baseline.has_passed_or_skipped(name)
        if was_bad and not report.has_passed(name):
            said = report.said(name)
            return end(Outcome.FAIL, f"{name} failed on the pristine tree and now: {said}")
        if baseline.has_passed(name) and not report.has_passed_or_skipped(name):
            said = report.said(name)
            return end(Outcome.FAIL, f"{name} passed on the pristine tree and now: {said}")
    new = [name for name in failing if name not in baseline.outcomes]
    if new:
        return end(Outcome.FAIL, f"{len(new)} tests that the pristine tree had not fail; {new[0]}")
    count = len(fixed)
    if not count and not set(report.outcomes) - set(baseline.outcomes):
        return end(Outcome.FAIL, "nothing that failed on the pristine tree passes now")
    detail = f"{count} tests that failed on the pristine tree pass"
    return end(Outcome.PASS, detail, weak=exit_code != 0 or count == 0, passed=count)


def decide_pro(run: CommandRun, names: tuple[str, ...]) -> Verdict:
    """SWE-bench Pro's own rule, so that numbers compare: every listed name has passed. The script's
    exit code decides nothing there, and neither does it here."""
    report = run.report
    passed = [name for name in names if report is not None and report.has_passed(name)]
    if run.exit_code is None:
        detail = "timed_out"
    elif report is None or report.fault:
        detail = f"report is worth nothing: {report.fault if report else 'there is none'}"
    elif not names:
        detail = "task names no required test"
    elif len(passed) < len(names):
        missing = next(name for name in names if name not in passed)
        detail = f"{len(passed)} of {len(names)} listed tests passed; {missing}: "
        detail += report.said(missing)
    else:
        detail = ""
    return Verdict(
        outcome=Outcome.FAIL if detail else Outcome.PASS,
        detail=detail or f"{len(passed)} listed tests passed",
        reverted=run.reverted,
        num_passed=len(passed),
        num_executed=0 if report is None else report.num_executed,
        exit_code=run.exit_code,
        timed_out=run.exit_code is None,
    )


def decide_harbor(run: CommandRun, reward: float | str | None) -> Verdict:
    """The rule of Harbor tasks. The script wrote its reward beside the code that it tested, so a
    pass is weak.

    Args:
        reward: the number in the script's file; the name of a file that holds none; None when it
            wrote none, and its exit code decides.
    """
    if run.exit_code is None:
        outcome, detail = Outcome.FAIL, "timed_out"
    elif isinstance(reward, str):
        outcome, detail = Outcome.FAIL, f"{reward} holds no number"
    elif reward is not None:
        outcome = Outcome.PASS if reward >= 1 else Outcome.FAIL
        detail = f"the script's reward is {reward:g}"
    else:
        outcome = Outcome.PASS if run.exit_code == 0 else Outcome.FAIL
        detail = f"exit {run.exit_code} of the script, which wrote no reward"
    return Verdict(
        outcome=outcome,
        detail=detail,
        reverted=run.reverted,
        exit_code=run.exit_code,
        timed_out=run.exit_code is None,
        is_weak=True,
    )


def decide_unittest(
    lines: list[tuple[str, str]], result: PythonResult, required: tuple[str, ...]
) -> Verdict:
    """The rule for hidden unittest files: what their runner reported, and how it ended."""
    kinds = [kind for kind, _ in lines]
    reverted = tuple(text for kind, text in lines if kind == "reverted")
    outcomes: dict[str, set[str]] = {}
    for kind, text in lines:
        if kind in ("pass", "fail", "skip"):
            outcomes.setdefault(text, set()).add(kind)
    passed = [name for name in required if outcomes.get(name) == {"pass"}]

    def end(outcome: Outcome, detail: str) -> Verdict:
        return Verdict(
            outcome=outcome,
            detail=detail,
            reverted=reverted,
            num_passed=len(passed),
            num_executed=_executed(outcomes),
            timed_out=result.timed_out,
        )

    broken = [text for kind, text in lines if kind == "broken"]
    checks = (
        (result.timed_out, "timed_out"),
        ("unappliable" in kinds, f"patch_failed: {_first_line(result.output)}"),
        ("applied" not in kinds, f"broke before the tests (exit {result.exit_code})"),
        (
            kinds.count("done") != 1 or result.exit_code != 0,
            f"tests did not finish (exit {result.exit_code})",
        ),
        (
            outcomes.get(FAILING_CANARY) != {"fail"} or outcomes.get(PASSING_CANARY) != {"pass"},
            "runner was tampered with: a canary test gave the wrong outcome",
        ),
        (bool(broken), f"tests cannot be loaded: {broken[0][:200] if broken else ''}"),
        (not required, "task names no required test"),
    )
    for failed, detail in checks:
        if failed:
            return end(Outcome.FAIL, detail)
    if len(passed) < len(required):
        missing = next(name for name in required if name not in passed)
        said = "/".join(sorted(outcomes.get(missing, {"did not run"})))
        detail = f"{len(passed)} of {len(required)} required tests passed; {missing}: {said}"
        return end(Outcome.FAIL, detail)
    return end(Outcome.PASS, f"{len(passed)} required tests passed")


def _executed(outcomes: Mapping[str, set[str]]) -> int:
    ours = (FAILING_CANARY, PASSING_CANARY)
    return sum(said != {"skip"} for name, said in outcomes.items() if name not in ours)


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]
