"""The task workers: a few processes, each running many sessions at once.

Invariant: a session that was handed over comes back exactly once, as a trajectory. When its
worker's process dies, the worker is replaced and the session is void, which the rollout counts
and samples again; it is never a 0.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from rlmix.core.errors import LaunchError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory
from rlmix.launch.handle import Handle

OPEN_LIMIT_S = 120.0
"""For a worker that imports, probes and starts its sandbox launcher on a busy machine."""


class SpecLike(Protocol):
    """What this room needs to know of a session spec."""

    @property
    def session_id(self) -> str: ...
    @property
    def group_id(self) -> str: ...
    @property
    def task_id(self) -> str: ...


class WorkerPool:
    """Hands each session to the worker with the fewest in flight."""

    def __init__(
        self,
        spawn: Callable[[int], Handle],
        *,
        num_workers: int,
        session_limit_s: float,
        on_event: Callable[..., None],
    ) -> None:
        """
        Args:
            spawn: makes worker number i, at the start and again after it died.
            session_limit_s: longest wait for one session; longer than the session's own limit.
        """
        self._spawn = spawn
        self._handles = [spawn(index) for index in range(num_workers)]
        self._in_flight = [0] * num_workers
        self._session_limit_s = session_limit_s
        self._on_event = on_event

    async def open(self) -> list[Any]:
        """Let every worker open its sandbox backend; returns what each says about it.

        Raises:
            SandboxError: sandboxes do not work here; the message says the fix.
        """
        calls = (handle.call("open", timeout_s=OPEN_LIMIT_S) for handle in self._handles)
        return list(await asyncio.gather(*calls))

    async def run(self, spec: SpecLike) -> Trajectory:
        index = min(range(len(self._handles)), key=self._in_flight.__getitem__)
        handle = self._handles[index]
        started_s = time.time()
        self._in_flight[index] += 1
        try:
            trajectory: Trajectory = await handle.call("run", spec, timeout_s=self._session_limit_s)
            return trajectory
        except LaunchError as error:
            self._replace(index, handle, str(error))
            reason = "worker_lost"
        except TimeoutError:
            self._on_event(
                "session_overdue",
                f"no answer after {self._session_limit_s:g} s; the session is void",
                session=spec.session_id,
                worker=index,
            )
            reason = "worker_overdue"
        finally:
            self._in_flight[index] -= 1
        return Trajectory(
            session_id=spec.session_id,
            group_id=spec.group_id,
            task_id=spec.task_id,
            prompt_ids=(),
            turns=(),
            stop_reason=StopReason.CANCELLED,
            outcome=Outcome.VOID,
            reward=0.0,
            void_reason=reason,
            started_s=started_s,
            finished_s=time.time(),
        )

    async def close(self, *, timeout_s: float = 10.0) -> None:
        """Let every worker remove its sandboxes; a worker that does not answer is left to Ray."""

        async def close_one(handle: Handle) -> None:
            if not handle.is_placed:
                handle.kill()  # It waits for a machine and has made nothing yet.
                return
            try:
                await handle.call("close", timeout_s=timeout_s)
            except (LaunchError, TimeoutError) as error:
                self._on_event("worker_not_closed", str(error) or "no answer", worker=handle.name)

        await asyncio.gather(*(close_one(handle) for handle in self._handles))

    def _replace(self, index: int, dead: Handle, reason: str) -> None:
        if self._handles[index] is dead:  # Only the first of its sessions to notice replaces it.
            self._on_event("worker_replaced", reason.splitlines()[0], worker=index)
            self._handles[index] = self._spawn(index)
