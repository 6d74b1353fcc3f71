"""Feeds the live view: gathers what the parts say of themselves a few times a second.

Reads only; nothing of the run depends on it.
"""

import asyncio
import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from types import TracebackType

from rlmix.config.schema.train import TrainConfig
from rlmix.loop.live_scaling import LiveScaling
from rlmix.loop.progress import Progress
from rlmix.loop.rollout import Rollout
from rlmix.loop.training import TrainingLoop
from rlmix.observe.live import LiveView, open_console
from rlmix.observe.live_state import EventLine, LiveState, PoolState
from rlmix.observe.log_follow import DRIVER_LOG
from rlmix.observe.run_dir import RunDir
from rlmix.plan.runplan import RunPlan
from rlmix.pools.fleet import Fleet
from rlmix.pools.spec import ReplicaStatus, SlotState

REFRESH_S = 0.5
NUM_EVENTS = 4
QUIET_EVENTS = frozenset({"checkpoint_saved", "replica_updating", "replica_updated", "scale_step"})
"""Normal at every step; in events.jsonl, not in the few lines of the view."""


class RunView:
    """Use as a context manager around the run."""

    def __init__(self, plan: RunPlan, config: TrainConfig, run: RunDir, *, as_json: bool) -> None:
        self._plan, self._config, self._run = plan, config, run
        self._live = LiveView(open_console(is_json=as_json), is_enabled=config.observe.live)
        self._started_s = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        self._events: deque[EventLine] = deque(maxlen=NUM_EVENTS)
        self._parts: tuple[TrainingLoop, Fleet, Rollout] | None = None
        self._scaling: LiveScaling | None = None
        self._counted: tuple[int, int] | None = None
        self._phase = "starting"

    def __enter__(self) -> "RunView":
        self._live.__enter__()
        self._run.events.subscribe(self._see_event)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.refresh()
        try:
            self._live.__exit__(kind, error, trace)
        except OSError:
            self._leave_terminal()

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self._phase = phase
        self._counted = None
        self.refresh()

    def count(self, phase: str, done: int) -> None:
        """Show progress over the held-out tasks."""
        self._phase, self._counted = phase, (done, self._config.loop.eval_tasks)
        self.refresh()

    def note(self, text: str) -> None:
        try:
            self._live.note(text)
        except OSError:
            self._leave_terminal()
            self._live.note(text)

    def attach(
        self, loop: TrainingLoop, fleet: Fleet, rollout: Rollout, scaling: LiveScaling
    ) -> None:
        self._parts = (loop, fleet, rollout)
        self._scaling = scaling

    def start_refreshing(self) -> Callable[[], Awaitable[None]]:
        """Refresh until the returned function is awaited."""

        async def refresh_forever() -> None:
            while True:
                self.refresh()
                await asyncio.sleep(REFRESH_S)

        task = asyncio.create_task(refresh_forever(), name="live view")

        async def stop() -> None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        return stop

    def refresh(self) -> None:
        try:
            self._live.update(self.state())
        except OSError:
            self._leave_terminal()

    def _leave_terminal(self) -> None:
        """The terminal is gone and the run goes on: what it prints goes to a file of the run."""
        self._run.events.append("terminal_lost", f"output goes on in logs/{DRIVER_LOG}")
        file = os.open(self._run.logs / DRIVER_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for fd in (1, 2):
            os.dup2(file, fd)
        os.close(file)
        self._live = LiveView(open_console(is_json=True), is_enabled=False)

    def _see_event(self, run_s: float, kind: str, reason: str) -> None:
        if kind not in QUIET_EVENTS:
            self._events.append(EventLine(run_s=run_s, kind=kind, reason=reason.split("\n")[0]))

    def state(self) -> LiveState:
        """What there is to show now."""
        loop, fleet, rollout = self._parts or (None, None, None)
        progress = loop.progress if loop is not None else Progress()
        metrics = loop.last_metrics if loop is not None else {}
        done, needed, unit = 0, 0, "sessions"
        if self._counted is not None:
            (done, needed), unit = self._counted, "tasks"
        elif rollout is not None:
            done, needed = rollout.sessions_towards_next, self._config.loop.sessions_per_step
        return LiveState(
            run=self._run.name,
            phase=loop.phase if loop is not None and loop.is_stepping else self._phase,
            step=len(progress.rewards),  # Steps whose metrics are there, too.
            num_steps=self._config.loop.steps,
            elapsed_s=time.monotonic() - self._started_s,
            eta_s=self._eta_s(progress),
            policy_version=progress.published_version,
            pools=self._pools(fleet.status() if fleet is not None else [], metrics),
            done=min(done, needed),
            needed=needed,
            unit=unit,
            rewards=tuple(progress.rewards),
            metrics=metrics,
            cost_usd=progress.cost_usd,
            alarms=loop.alarms.sentences() if loop is not None else {},
            operation="" if self._scaling is None else self._scaling.operation_line(),
            events=tuple(self._events),
        )

    def _eta_s(self, progress: Progress) -> float | None:
        """From the pace since this attempt's first finished step."""
        now_s = time.monotonic()
        if self._first_step is None:
            if self._parts is not None and self._parts[0].is_stepping and progress.step > 0:
                self._first_step = (progress.step, now_s)
            return None
        first, first_s = self._first_step
        if progress.step <= first:
            return None
        return (
            (now_s - first_s) / (progress.step - first) * (self._config.loop.steps - progress.step)
        )

    def _pools(
        self, statuses: list[ReplicaStatus], metrics: dict[str, float]
    ) -> tuple[PoolState, ...]:
        by_pool: defaultdict[str, list[ReplicaStatus]] = defaultdict(list)
        for status in statuses:
            by_pool[status.pool].append(status)
        states = []
        for name, pool in self._plan.pools.items():
            replicas = by_pool[name]
            serving = [r for r in replicas if r.state in (SlotState.READY, SlotState.UPDATING)]
            versions = [r.version for r in serving if r.version is not None]
            states.append(
                PoolState(
                    name=name,
                    accelerator=pool.accelerator,
                    is_emulated=pool.is_emulated,
                    weights=pool.weights,
                    kv=pool.kv,
                    replicas_ready=len(serving),
                    replicas_total=len(replicas),
                    running=sum(r.running for r in replicas),
                    queued=sum(r.queued for r in replicas),
                    tokens_per_s=sum(r.tokens_per_s for r in serving) if serving else None,
                    version=min(versions) if versions else None,
                    k3_kl=metrics.get(f"mismatch/by_pool/{name}/k3_kl"),
                    usd_per_hour=pool.usd_per_replica_hour
                    * sum(not r.state.is_final for r in replicas)
                    if replicas or self._parts is not None
                    else pool.usd_per_hour,
                )
            )
        return tuple(states)
