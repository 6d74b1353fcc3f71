"""Decides whether a submitted diff solves its task: 1, 0, or void.

Only the bytes of the diff come from the agent's sandbox. They are applied to a fresh copy of the
base in a second sandbox, tests are put back, hidden tests are added and run.

Invariant: void only for a fault before any byte of the diff was applied, or one outside every
sandbox; whatever happens afterwards is the diff's, so nobody can void a failure.
"""

import base64
import re
import secrets
import zlib
from collections.abc import MutableMapping

from rlmix.core.errors import SandboxError
from rlmix.core.task import HiddenTask, PublicTask
from rlmix.core.trajectory import Outcome
from rlmix.sandbox.protocol import PythonResult, SandboxBackend
from rlmix.sandbox.repository import checked_path
from rlmix.tasks.evidence.harbor import NAMES, parse_reward
from rlmix.tasks.evidence.junit import parse_junit
from rlmix.tasks.evidence.names import renamed
from rlmix.tasks.evidence.pro import parse_pro
from rlmix.tasks.evidence.report import TestReport, collect
from rlmix.tasks.evidence.runners import RUNNERS, Runner, runner_of
from rlmix.tasks.inside.programs import program
from rlmix.tasks.rule import (
    CommandRun,
    Verdict,
    baseline_of,
    decide_command,
    decide_harbor,
    decide_pro,
    decide_unittest,
)

HARBOR = "harbor"
"""Runner of tasks whose own script says the reward."""
VERDICT_TIMEOUT_S = 10.0
"""Generated tests take milliseconds; a diff with an endless loop costs this much."""
MAX_ATTEMPTS = 2
"""A fault before the diff was applied is tried once more before the session is void."""
AROUND_COMMAND_S = 20.0
"""For applying, reading the report and ending processes, beside the command's own time."""
MAX_UNPACKED_BYTES = 16 << 20
_GITLINK = re.compile(rb"^(new file mode|new mode|index [0-9a-f.]+) 160000$", re.MULTILINE)
_NO_PYTHONPATH = re.compile(r"PYTHONPATH=|python\S* +(?:-\w+ +)*-\w*[IES]")

Baselines = MutableMapping[str, TestReport]
"""Task id -> report of the pristine tree; kept by whoever judges many diffs of a task."""


async def judge(
    public: PublicTask,
    hidden: HiddenTask,
    diff: bytes,
    backend: SandboxBackend,
    *,
    timeout_s: float = VERDICT_TIMEOUT_S,
    baselines: Baselines | None = None,
    runs_empty: bool = False,
) -> Verdict:
    """Judge a diff in a fresh sandbox.

    Args:
        diff: as `Sandbox.capture_diff` returned it, byte for byte.
        timeout_s: wall clock of the tests; running over it is a fail.
        baselines: reports of pristine trees, for tasks with a command that name no tests.
        runs_empty: run the tests even without a diff, as the gate of a task does.
    """
    if not diff and not runs_empty:
        return Verdict(outcome=Outcome.FAIL, detail="empty_diff")
    if _GITLINK.search(diff):
        return Verdict(outcome=Outcome.FAIL, detail="diff_refused: it adds a submodule")
    if hidden.runner == HARBOR:
        answer = await _ask(public, hidden, diff, backend, timeout_s=timeout_s)
        if isinstance(answer, Verdict):
            return answer
        harbor = command_run(*answer, hidden)
        return harbor if isinstance(harbor, Verdict) else decide_harbor(harbor, _reward(answer[0]))
    if hidden.scripts:
        answer = await _ask(public, hidden, diff, backend, timeout_s=timeout_s)
        if isinstance(answer, Verdict):
            return answer
        run = command_run(*answer, hidden)
        names = (*hidden.required_tests, *hidden.skippable_tests)
        return run if isinstance(run, Verdict) else decide_pro(run, names)
    if not hidden.test_command:
        answer = await _ask(public, hidden, diff, backend, timeout_s=timeout_s)
        if isinstance(answer, Verdict):
            return answer
        return decide_unittest(*answer, hidden.required_tests)
    baseline = None
    if _needs_baseline(hidden):
        known = {} if baselines is None else baselines
        if public.task_id not in known:
            answer = await _ask(public, hidden, b"", backend, timeout_s=timeout_s)
            if isinstance(answer, Verdict):
                return answer
            run = command_run(*answer, hidden)
            report = None if isinstance(run, Verdict) else baseline_of(run)
            if report is not None:
                known[public.task_id] = report
        baseline = known.get(public.task_id)
    answer = await _ask(public, hidden, diff, backend, timeout_s=timeout_s)
    if isinstance(answer, Verdict):
        return answer
    run = command_run(*answer, hidden)
    if isinstance(run, Verdict):
        return run
    return decide_command(
        run,
        required=hidden.required_tests,
        skippable=hidden.skippable_tests,
        baseline=baseline,
    )


def _needs_baseline(hidden: HiddenTask) -> bool:
    has_names = hidden.required_tests or hidden.skippable_tests
    return not has_names and runner_of(hidden.test_command, hidden.runner) is not None


Lines = list[tuple[str, str]]


def _reward(lines: Lines) -> float | str | None:
    """What the script's own file says: a number, the name of a file that holds none, or None
    when it wrote none."""
    said = dict(lines)
    for name in NAMES:
        if name in said:
            found = parse_reward(name, unpacked(said[name]))
            return name if found is None else found
    return None


async def _ask(
    public: PublicTask,
    hidden: HiddenTask,
    diff: bytes,
    backend: SandboxBackend,
    *,
    timeout_s: float,
) -> tuple[Lines, PythonResult] | Verdict:
    """What the program inside reported; the verdict void when it never began."""
    reason = ""
    for _ in range(MAX_ATTEMPTS):
        nonce = secrets.token_hex(16)
        try:
            result = await _run(public, hidden, diff, backend, nonce=nonce, timeout_s=timeout_s)
        except SandboxError as error:
            reason = str(error)
            continue
        lines = report_lines(result.report, nonce)
        if ("begin", "") in lines:
            return lines, result
        reason = f"verdict did not start (exit {result.exit_code}): {result.output.strip()[-300:]}"
    return Verdict(outcome=Outcome.VOID, detail="sandbox fault", void_reason=reason)


async def _run(
    public: PublicTask,
    hidden: HiddenTask,
    diff: bytes,
    backend: SandboxBackend,
    *,
    nonce: str,
    timeout_s: float,
) -> PythonResult:
    template = await backend.prepare(public.repository)
    sandbox = await backend.create(template)
    try:
        tests = {checked_path(path): text for path, text in hidden.tests.items()}
        data: dict[str, object] = {"nonce": nonce, "diff": diff, "tests": tests}
        if not hidden.test_command and not hidden.scripts:
            return await sandbox.run_python(program("unittest"), data, timeout_s)
        runner = None if hidden.scripts else runner_of(hidden.test_command, hidden.runner)
        data |= {
            "command": hidden.test_command,
            "runner": next((name for name, known in RUNNERS.items() if known is runner), ""),
            "has_canary": has_canary(hidden),
            "scripts": dict(hidden.scripts),
            "hidden_patch": hidden.hidden_patch,
            "env": dict(hidden.test_env),
            "timeout_s": timeout_s,
        }
        limit_s = timeout_s + AROUND_COMMAND_S
        name = "pro" if hidden.scripts else "command"
        if hidden.runner == HARBOR:
            name = "harbor"
        return await sandbox.run_python(program(name), data, limit_s)
    finally:
        await sandbox.destroy()


def has_canary(hidden: HiddenTask) -> bool:
    """pytest and `python -m unittest` run two tests of ours after all others. They come through
    PYTHONPATH, so a command that sets or ignores that goes without."""
    if hidden.scripts:
        return False
    runner = runner_of(hidden.test_command, hidden.runner)
    if "PYTHONPATH" in hidden.test_env or _NO_PYTHONPATH.search(hidden.test_command):
        return False
    if runner is RUNNERS["unittest"]:
        return "-m unittest" in hidden.test_command
    return runner is RUNNERS["pytest"]


def report_lines(report: bytes, nonce: str) -> Lines:
    """(kind, text) of the lines that carry the nonce; anything else is noise."""
    found = []
    for line in report.decode(errors="replace").split("\n"):
        mark, _, rest = line.partition(" ")
        if mark == nonce:
            kind, _, text = rest.partition(" ")
            found.append((kind, text))
    return found


def command_run(lines: Lines, result: PythonResult, hidden: HiddenTask) -> CommandRun | Verdict:
    """The run that the lines tell of, or the verdict when there was none."""
    said = dict(lines)
    reverted = tuple(text for kind, text in lines if kind == "reverted")

    def fail(detail: str) -> Verdict:
        return Verdict(
            outcome=Outcome.FAIL, detail=detail, reverted=reverted, timed_out=result.timed_out
        )

    first_line = result.output.strip().split("\n")[0][:200]
    if "unappliable" in said:
        return fail(f"patch_failed: {first_line}")
    if "foreign" in said:
        return fail(f"diff_refused: it adds installed code at {said['foreign']}")
    if "hidden_unappliable" in said:
        return fail(f"hidden tests do not apply beside this diff: {first_line}")
    if result.timed_out:
        return fail("timed_out")
    if [kind for kind, _ in lines].count("done") != 1 or result.exit_code != 0:
        return fail(f"verdict was ended before its time (exit {result.exit_code}): {first_line}")
    runner = None if hidden.scripts else runner_of(hidden.test_command, hidden.runner)
    report = None
    if hidden.runner != HARBOR and hidden.scripts and said["exit"] != "none":
        if "outcomes" not in said:
            return fail(f"the parser of the task read nothing: {said.get('unread', '')[-200:]}")
        report = parse_pro(unpacked(said["outcomes"]))
    if runner is not None:
        output = unpacked(said["output"]).decode(errors="replace")
        junit = unpacked(said["junit"]) if "junit" in said else None
        report = _read_report(runner, output, junit)
        report = renamed(report, hidden.name_style)
    nonce = said["canary"] if has_canary(hidden) and "canary" in said else ""
    return CommandRun(
        exit_code=None if said["exit"] == "none" else int(said["exit"]),
        report=report,
        canary=nonce,
        reverted=reverted,
    )


def _read_report(runner: Runner, output: str, junit: bytes | None) -> TestReport:
    """What the runner reported. Tested code may have written it, so one that breaks its reader is
    worth nothing; it must not end the session."""
    try:
        return runner.parse(output) if junit is None else parse_junit(junit)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        return collect((), f"it cannot be read: {type(error).__name__}")


def unpacked(text: str) -> bytes:
    """An attachment of the report, cut at a size that no honest one has."""
    return zlib.decompressobj().decompress(base64.b64decode(text), MAX_UNPACKED_BYTES)
