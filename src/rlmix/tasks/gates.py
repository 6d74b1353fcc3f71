"""Gates that a task passes before it is trained on: its reference always solves it, nothing never
does, and both say the same every time.

Invariant: a task is accepted only on runs that were made; a fault of the sandbox is reported as
one and never taken for a flaky test.
"""

import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass

from rlmix.core.errors import DataError, RlmixError, SandboxError
from rlmix.core.task import HiddenTask, PublicTask
from rlmix.core.trajectory import Outcome
from rlmix.sandbox.protocol import SandboxBackend
from rlmix.tasks.evidence.runners import runner_of
from rlmix.tasks.inside.programs import program
from rlmix.tasks.rule import Verdict
from rlmix.tasks.verdict import HARBOR, judge

PLACING_S = 60.0
SLOW_SHARE = 0.5
"""Of the verdict's limit: a reference slower than this would time out on a busier machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """What the gates say about one task."""

    task_id: str
    reason: str
    """Empty: it passed all gates."""
    num_runs: int
    longest_s: float
    is_weak: bool = False
    """The verdict rests on an exit code, or no reference shows that the task can be solved."""

    @property
    def is_ok(self) -> bool:
        return not self.reason


async def check_task(
    public: PublicTask,
    hidden: HiddenTask,
    reference: bytes,
    backend: SandboxBackend,
    *,
    runs: int,
    timeout_s: float,
    script: Mapping[str, str] | None = None,
) -> GateResult:
    """Run the gates of one task.

    Args:
        reference: the fix as a diff; empty when the set has none, or a script makes it.
        script: absolute path -> content of the files that make the fix; the first one is run.
        runs: how often each gate is run, at least 1.
        timeout_s: the limit of a verdict, as in training.
    """
    longest_s, count, weak = 0.0, 0, not (reference or script)

    async def once(diff: bytes) -> Verdict:
        nonlocal longest_s, count
        started_s = time.monotonic()
        verdict = await judge(public, hidden, diff, backend, timeout_s=timeout_s, runs_empty=True)
        longest_s = max(longest_s, time.monotonic() - started_s)
        count += 1
        return verdict

    def end(reason: str) -> GateResult:
        return GateResult(
            task_id=public.task_id,
            reason=reason,
            num_runs=count,
            longest_s=longest_s,
            is_weak=weak,
        )

    try:
        if script and not reference:
            reference = await solve(public, script, backend, timeout_s=timeout_s)
            if not reference:
                return end("reference earns 0: its script changes nothing in the repository")
        for diff, wanted in ((reference, Outcome.PASS), (b"", Outcome.FAIL)):
            if wanted is Outcome.PASS and not reference:
                continue
            verdicts = [await once(diff) for _ in range(runs)]
            reason = _reason(verdicts, wanted)
            if reason:
                return end(reason)
            if weak and not reference and _reports(hidden) and not verdicts[0].num_executed:
                return end(f"nothing shows that its tests can run: {verdicts[0].detail}")
            weak = weak or any(verdict.is_weak for verdict in verdicts)
            if longest_s > SLOW_SHARE * timeout_s:
                return end(f"slow: {longest_s:.1f} s of the {timeout_s:g} s of a verdict")
    except RlmixError as error:
        return end(f"cannot be run: {error}")
    return end("")


async def solve(
    public: PublicTask, script: Mapping[str, str], backend: SandboxBackend, *, timeout_s: float
) -> bytes:
    """The diff that a reference script makes in a sandbox of the task.

    Raises:
        SandboxError: the sandbox broke, or the script cannot be put into it.
        DataError: the script failed.
    """
    sandbox = await backend.create(await backend.prepare(public.repository))
    try:
        put = await sandbox.run_python(program("files"), {"files": dict(script)}, PLACING_S)
        if put.exit_code != 0:
            raise SandboxError(f"the script cannot be put in place: {put.output.strip()[-200:]}")
        first = shlex.quote(next(iter(script)))
        done = await sandbox.run(f"bash {first}", timeout_s=timeout_s)
        if done.exit_code != 0 or done.timed_out:
            said = done.output.strip()[-200:]
            raise DataError(f"the reference's script ends with {done.exit_code}: {said}")
        return await sandbox.capture_diff()
    finally:
        await sandbox.destroy()


def _reports(hidden: HiddenTask) -> bool:
    """Its runner says how many tests ran."""
    if hidden.scripts:
        return hidden.runner != HARBOR
    return not hidden.test_command or runner_of(hidden.test_command, hidden.runner) is not None


def _reason(verdicts: list[Verdict], wanted: Outcome) -> str:
    who = "reference" if wanted is Outcome.PASS else "no change"
    void = [verdict for verdict in verdicts if verdict.outcome is Outcome.VOID]
    if void:
        return f"sandbox fault: {void[0].void_reason}"
    wrong = [verdict for verdict in verdicts if verdict.outcome is not wanted]
    if len(wrong) == len(verdicts):
        said = "earns 0" if wanted is Outcome.PASS else "earns 1"
        return f"{who} {said}: {wrong[0].detail}"
    if wrong:
        return f"flaky: {who} {len(wrong)} of {len(verdicts)} times wrong: {wrong[0].detail}"
    details = {(verdict.detail, verdict.num_executed) for verdict in verdicts}
    if len(details) > 1:
        one, other = sorted(details)[:2]
        return f"flaky: {who} once {one[0]!r} ({one[1]} tests), once {other[0]!r} ({other[1]})"
    return ""
