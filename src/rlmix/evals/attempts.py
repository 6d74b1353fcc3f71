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
from rlmix.sandbox.protocol import SandboxBackend
from rlmix.tasks.benchmark import Benchmark, BenchTask
from rlmix.tasks.rule import Verdict
from rlmix.tasks.verdict import judge

MAX_TRIES = 3
MAX_NAME_BYTES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What a watcher is told."""

    done: int
    needed: int
    running: tuple[str, ...]
    """Ids of tasks in work, the longest-running first."""


@dataclass(kw_only=True)
class Attempts:
    """All attempts of one evaluation."""

    benchmark: Benchmark
    agent: Agent
    backend: SandboxBackend
    ledger: Ledger
    per_task: int
    jobs: int
    on_progress: Callable[[Progress], None] = lambda _: None

    def __post_init__(self) -> None:
        self._running: dict[tuple[str, int], float] = {}

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
        return True

    async def _attempt(self, task: BenchTask, number: int) -> None:
        key = (task.public.task_id, number)
        self._running[key] = time.monotonic()
        self._tell()
        try:
            attempt = await self._once(task, number)
            for tries in range(2, MAX_TRIES + 1):
                if attempt.outcome != Outcome.VOID:
                    break
                attempt = replace(await self._once(task, number), tries=tries)
            self.ledger.add(attempt)
        finally:
            del self._running[key]
            self._tell()

    async def _once(self, task: BenchTask, number: int) -> Attempt:
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(task.agent_s + CAPTURE_S):
                answer = await self.agent.answer(task, number, self.backend)
        except TimeoutError:
            answer = Answer(diff=b"", stop_reason="time_limit", fault="agent: out of time")
        except SandboxError as error:
            return _attempt(task, number, _void(str(error)), Answer(diff=b""), 0.0, 0.0)
        agent_s = time.monotonic() - started_s
        started_s = time.monotonic()
        if answer.is_missing or answer.fault:
            detail = answer.fault or "no answer for this attempt"
            verdict = Verdict(outcome=Outcome.FAIL, detail=detail)
        else:
            self._save(task, number, answer.diff)
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

    def _tell(self) -> None:
        longest = sorted(self._running, key=lambda key: self._running[key])
        self.on_progress(
            Progress(
                done=len(self.ledger.attempts),
                needed=len(self.benchmark.tasks) * self.per_task,
                running=tuple(name for name, _ in longest),
            )
        )


def diff_path(folder: Path, task_id: str, number: int) -> Path:
    safe = "".join(char if char.isalnum() or char in "-_." else "_" for char in task_id)
    if safe != task_id or len(safe.encode()) > MAX_NAME_BYTES:
        digest = hashlib.sha256(task_id.encode("utf-8", "surrogatepass")).hexdigest()[:10]
        safe = f"{safe.encode()[:MAX_NAME_BYTES].decode(errors='ignore')}-{digest}"
    return folder / "diffs" / f"{safe}.{number}.diff"


def _void(reason: str) -> Verdict:
    return Verdict(outcome=Outcome.VOID, detail="sandbox fault", void_reason=reason)


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
    )
