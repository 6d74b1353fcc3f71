"""Makes every attempt of an evaluation: agent, then a verdict in a fresh sandbox, then the ledger.

Invariant: a void attempt is made again, at most `MAX_TRIES` times in all; a failed one never is.
Whatever ends the evaluation, what is in the ledger stays, and nothing runs on.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rlmix.core.errors import RlmixError, SandboxError
from rlmix.core.trajectory import Outcome
from rlmix.evals.agents import CAPTURE_S, Agent, Answer
from rlmix.evals.ledger import Attempt, Ledger
from rlmix.evals.probes import Probe, append_probe, failed_probe, probe, read_probes
from rlmix.sandbox.protocol import SandboxBackend
from rlmix.tasks.benchmark import Benchmark, BenchTask
from rlmix.tasks.rule import Verdict
from rlmix.tasks.verdict import judge

MAX_TRIES = 3
MAX_NAME_BYTES = 200
TELL_EVERY_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a watcher is told."""

    done: int
    needed: int
    running: tuple[tuple[str, float], ...]
    """(task id, seconds) of attempts in work, the longest-running first."""


@dataclass(kw_only=True)
class Attempts:
    """All attempts of one evaluation."""

    benchmark: Benchmark
    agent: Agent
    backend: SandboxBackend
    ledger: Ledger
    per_task: int
    jobs: int
    """Attempts at a time."""
    verdicts: int = 4
    """Verdicts at a time; they are pure CPU."""
    on_progress: Callable[[Progress], None] = lambda _: None

    def __post_init__(self) -> None:
        self._running: dict[tuple[str, int], float] = {}
        self._judging = asyncio.Semaphore(self.verdicts)
        self.stuck: tuple[tuple[str, float], ...] = ()
        """What was in work when the deadline came, with its seconds."""
        self.probes: dict[str, Probe] = read_probes(self.ledger.folder)
        self._probing: set[str] = set(self.probes)

    async def make(self, deadline_s: float | None = None) -> bool:
        """Make what is missing; False when the deadline came first.

        Raises:
            RlmixError: the first task that cannot be judged at all; others are ended.
        """
        missing = [
            (task, number)
            for number in range(self.per_task)
            for task in self.benchmark.tasks
            if (task.public.task_id, number) not in self.ledger.attempts
        ]
        room = asyncio.Semaphore(self.jobs)
        self._tell()

        async def one(task: BenchTask, number: int) -> None:
            async with room:
                await self._attempt(task, number)

        telling = asyncio.create_task(self._keep_telling(), name="eval progress")
        try:
            async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
                for task, number in missing:
                    group.create_task(one(task, number), name=f"{task.public.task_id} {number}")
        except TimeoutError:
            return False
        except ExceptionGroup as group:
            if isinstance(group.exceptions[0], RlmixError):
                raise group.exceptions[0] from None
            raise
        finally:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
        return True

    async def _attempt(self, task: BenchTask, number: int) -> None:
        key = (task.public.task_id, number)
        self._running[key] = time.monotonic()
        self._tell()
        try:
            await self._probe(task)
            attempt = await self._once(task, number)
            for tries in range(2, MAX_TRIES + 1):
                if attempt.outcome != Outcome.VOID:
                    break
                attempt = replace(await self._once(task, number), tries=tries)
            self.ledger.add(attempt)
        except asyncio.CancelledError:
            self.stuck = (*self.stuck, (key[0], time.monotonic() - self._running[key]))
            raise
        finally:
            del self._running[key]
            self._tell()

    async def _probe(self, task: BenchTask) -> None:
        """Once per task, before its first attempt, where an agent works in a sandbox."""
        task_id = task.public.task_id
        if not self.agent.works_in_sandbox or task_id in self._probing:
            return
        self._probing.add(task_id)
        try:
            found = await probe(task, self.backend)
        except SandboxError as error:
            found = failed_probe(task_id, str(error))
        self.probes[task_id] = found
        append_probe(self.ledger.folder, found)

    async def _once(self, task: BenchTask, number: int) -> Attempt:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(task.agent_s + CAPTURE_S):
                answer = await self.agent.answer(task, number, self.backend)
        except TimeoutError:
            answer = Answer(diff=b"", stop_reason="time_limit", fault="agent: out of time")
        except SandboxError as error:
            answer = Answer(diff=b"", void_reason=str(error))
        agent_s = time.monotonic() - started_s
        if answer.void_reason:
            return _attempt(task, number, _void(answer), answer, agent_s, 0.0)
        started_s = time.monotonic()
        if answer.is_missing or answer.fault:
            detail = answer.fault or "no answer for this attempt"
            verdict = Verdict(outcome=Outcome.FAIL, detail=detail)
        else:
            self._save(task, number, answer.diff)
            async with self._judging:
                started_s = time.monotonic()
                verdict = await judge(
                    task.public,
                    task.hidden,
                    answer.diff,
                    self.backend,
                    timeout_s=task.verify_s,
                    runs_empty=self.agent.name == "empty",
                )
        return _attempt(task, number, verdict, answer, agent_s, time.monotonic() - started_s)

    def _save(self, task: BenchTask, number: int, diff: bytes) -> None:
        """Keep the diff that is judged, whole or not at all."""
        folder = self.ledger.folder / "diffs"
        folder.mkdir(exist_ok=True)
        path = diff_path(self.ledger.folder, task.public.task_id, number)
        part = path.with_suffix(".part")
        part.write_bytes(diff)
        part.replace(path)

    async def _keep_telling(self) -> None:
        """Names of what hangs, also while nothing ends."""
        while True:
            await asyncio.sleep(TELL_EVERY_S)
            self._tell()

    def _tell(self) -> None:
        now_s = time.monotonic()
        longest = sorted(self._running.items(), key=lambda item: item[1])
        self.on_progress(
            Progress(
                done=len(self.ledger.attempts),
                needed=len(self.benchmark.tasks) * self.per_task,
                running=tuple((name, now_s - since_s) for (name, _), since_s in longest),
            )
        )


def diff_path(folder: Path, task_id: str, number: int) -> Path:
    safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in task_id)
    if safe != task_id or len(safe.encode()) > MAX_NAME_BYTES:
        digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
        safe = f"{safe.encode()[:MAX_NAME_BYTES].decode(errors='ignore')}-{digest}"
    return folder / "diffs" / f"{safe}.{number}.diff"


def _void(answer: Answer) -> Verdict:
    return Verdict(
        outcome=Outcome.VOID, detail="fault of the machine", void_reason=answer.void_reason
    )


def _attempt(
    task: BenchTask,
    number: int,
    verdict: Verdict,
    answer: Answer,
    agent_s: float,
    verify_s: float,
) -> Attempt:
    return Attempt(
        task_id=task.public.task_id,
        number=number,
        outcome=verdict.outcome.value,
        detail=verdict.detail,
        diff_bytes=len(answer.diff),
        agent_s=round(agent_s, 3),
        verify_s=round(verify_s, 3),
        stop_reason=answer.stop_reason,
        void_reason=verdict.void_reason,
        timed_out=verdict.timed_out,
        num_tests=verdict.num_executed,
        num_tokens=answer.num_tokens,
        num_turns=answer.num_turns,
        model_s=answer.model_s,
    )
