"""Decides whether a submitted diff solves its task: 1, 0, or void.

Only the bytes of the diff come from the agent's sandbox. They are applied to a fresh copy of the
base in a second sandbox, tests are put back, hidden tests are added and run.

Invariant: void only for a fault before any byte of the diff was applied, or one outside every
sandbox; whatever happens afterwards is the diff's, so nobody can void a failure.
"""

import re
import secrets
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType

from rlmix.core.errors import SandboxError
from rlmix.core.task import HiddenTask, PublicTask
from rlmix.core.trajectory import Outcome
from rlmix.sandbox.protocol import PythonResult, SandboxBackend
from rlmix.sandbox.repository import checked_path

VERDICT_TIMEOUT_S = 10.0
"""Generated tests take milliseconds; a diff with an endless loop costs this much."""
MAX_ATTEMPTS = 2
"""A fault before the diff was applied is tried once more before the session is void."""
_GITLINK = re.compile(rb"^(new file mode|new mode|index [0-9a-f.]+) 160000$", re.MULTILINE)
_FAILING, _PASSING = "canary.Canary.test_fails", "canary.Canary.test_passes"


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


async def judge(
    public: PublicTask,
    hidden: HiddenTask,
    diff: bytes,
    backend: SandboxBackend,
    *,
    timeout_s: float = VERDICT_TIMEOUT_S,
) -> Verdict:
    """Judge a diff in a fresh sandbox.

    Args:
        diff: as `Sandbox.capture_diff` returned it, byte for byte.
        timeout_s: wall clock of applying and testing; running over it is a fail.
    """
    if not diff:
        return Verdict(outcome=Outcome.FAIL, detail="empty_diff")
    if _GITLINK.search(diff):
        return Verdict(outcome=Outcome.FAIL, detail="diff_refused: it adds a submodule")
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
            return decide(lines, result, hidden.required_tests)
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
    template = await backend.prepare(public.history)
    sandbox = await backend.create(template)
    try:
        tests = {checked_path(path): text for path, text in hidden.tests.items()}
        data: dict[str, object] = {"nonce": nonce, "diff": diff, "tests": tests}
        return await sandbox.run_python(_runner(), data, timeout_s)
    finally:
        await sandbox.destroy()


@cache
def _runner() -> CodeType:
    path = Path(__file__).with_name("verdict_runner.py")
    return compile(path.read_text(), "verdict_runner", "exec", dont_inherit=True)


def report_lines(report: bytes, nonce: str) -> list[tuple[str, str]]:
    """(kind, text) of the lines that carry the nonce; anything else is noise."""
    found = []
    for line in report.decode(errors="replace").split("\n"):
        mark, _, rest = line.partition(" ")
        if mark == nonce:
            kind, _, text = rest.partition(" ")
            found.append((kind, text))
    return found


def decide(
    lines: list[tuple[str, str]], result: PythonResult, required: tuple[str, ...]
) -> Verdict:
    """The rule, applied to what the runner reported and how it ended."""
    kinds = [kind for kind, _ in lines]
    reverted = tuple(text for kind, text in lines if kind == "reverted")
    outcomes: dict[str, set[str]] = {}
    for kind, text in lines:
        if kind in ("pass", "fail", "skip"):
            outcomes.setdefault(text, set()).add(kind)
    passed = [name for name in required if outcomes.get(name) == {"pass"}]

    def fail(detail: str) -> Verdict:
        return Verdict(
            outcome=Outcome.FAIL, detail=detail, reverted=reverted, num_passed=len(passed)
        )

    if result.timed_out:
        return fail("timed_out")
    if "unappliable" in kinds:
        return fail(f"patch_failed: {_first_line(result.output)}")
    if "applied" not in kinds:
        return fail(f"broke before the tests (exit {result.exit_code})")
    if kinds.count("done") != 1 or result.exit_code != 0:
        return fail(f"tests did not finish (exit {result.exit_code})")
    if outcomes.get(_FAILING) != {"fail"} or outcomes.get(_PASSING) != {"pass"}:
        return fail("runner was tampered with: a canary test gave the wrong outcome")
    broken = [text for kind, text in lines if kind == "broken"]
    if broken:
        return fail(f"tests cannot be loaded: {broken[0][:200]}")
    if not required:
        return fail("task names no required test")
    if len(passed) < len(required):
        missing = next(name for name in required if name not in passed)
        said = "/".join(sorted(outcomes.get(missing, {"did not run"})))
        return fail(f"{len(passed)} of {len(required)} required tests passed; {missing}: {said}")
    return Verdict(
        outcome=Outcome.PASS,
        detail=f"{len(passed)} required tests passed",
        reverted=reverted,
        num_passed=len(passed),
    )


def _first_line(text: str) -> str:
    return text.strip().split("\n")[0][:200]
