"""The policy at work in a run: looks at fleet and trainer, asks `scaling.policy`, asks the scaler.

Invariant: it acts only where `scaling.auto` is true and no operation is under way; every change
that it asks for is an operation like a person's, with the policy's reason.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError
from rlmix.loop.rollout import Rollout
from rlmix.loop.scaler import Scaler
from rlmix.plan.runplan import RunPlan
from rlmix.pools.callbacks import OnEvent
from rlmix.pools.fleet import Fleet
from rlmix.pools.spec import ReplicaStatus
from rlmix.scaling.demand import TrainerNeed, trajectories_per_s
from rlmix.scaling.modelled import fleet_limits, policy_rules
from rlmix.scaling.operation import Status
from rlmix.scaling.policy import (
    Change,
    FleetLimits,
    Observation,
    PolicyState,
    PoolLimits,
    PoolSeen,
    decide,
)
from rlmix.scaling.rates import PoolWindow, Rates, learn

LOOK_S = 1.0
"""How often loads are sampled; they change within a turn."""
SESSIONS_TO_TRUST = 2.0
"""Rates are believed after so many sessions' time without a change of the fleet."""
MOST_WASTE_FRAC = 0.5
LONGEST_PAUSE_S = 600.0
"""After operations that failed one after the other."""
AUTO, LOSS = "auto-", "loss-"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSeen:
    """The training loop, as far as scaling is concerned."""

    is_stepping: bool
    waited_s: float
    """For samples, since the start, the wait under way included."""
    metrics: Mapping[str, float]
    """Of the last step."""


@dataclass(slots=True)
class _Window:
    """Since the fleet last changed, or the last decision that learned from it."""

    started_s: float
    waited_s: float
    finished: Counter[str]
    ready: Mapping[str, int]
    used: defaultdict[str, float]
    looks: int = 0


class Autoscaler:
    """One task; `status` is what the control endpoint and the live view show of it."""

    def __init__(
        self,
        *,
        config: TrainConfig,
        plan: RunPlan,
        scaler: Scaler,
        fleet: Fleet,
        rollout: Rollout,
        trainer: Callable[[], TrainerSeen],
        on_event: OnEvent,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._plan = plan
        self._scaler = scaler
        self._fleet = fleet
        self._rollout = rollout
        self._trainer = trainer
        self._on_event = on_event
        self._clock = clock
        self._state = PolicyState()
        self._rates = Rates()
        self._window: _Window | None = None
        self._next_s = 0.0
        self._last_id = ""
        self._failures = 0
        self._blocked: tuple[str, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self.status: dict[str, float | None] = {}

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="autoscaler")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def raise_failure(self) -> None:
        """What ended the task, if a bug did."""
        task = self._task
        if task is not None and task.done() and not task.cancelled() and (e := task.exception()):
            raise e

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            seen = self._trainer()
            if not seen.is_stepping:
                self._window = None
                continue
            self._look(seen)
            if self._clock() >= self._next_s:
                self._next_s = self._clock() + self._config.scaling.every_s
                await self._decide(seen)

    def _look(self, seen: TrainerSeen) -> None:
        """Sample the loads; a fleet that changed begins a new window."""
        statuses = self._fleet.status()
        ready = Counter(s.pool for s in statuses if s.is_routed and not s.is_leaving)
        window = self._window
        if window is None or window.ready != ready:
            window = self._window = self._new_window(seen, ready)
        window.looks += 1
        for status in statuses:
            if status.is_routed and not status.is_leaving:
                most = self._plan.pools[status.pool].max_running
                window.used[status.pool] += min(1.0, (status.running + status.queued) / most)

    def _new_window(self, seen: TrainerSeen, ready: Mapping[str, int]) -> _Window:
        return _Window(
            started_s=self._clock(),
            waited_s=seen.waited_s,
            finished=Counter(self._rollout.finished_by_pool),
            ready=dict(ready),
            used=defaultdict(float),
        )

    async def _decide(self, seen: TrainerSeen) -> None:
        observation = self._observation(seen)
        if observation is None:
            return
        decision = decide(
            observation,
            state=self._state,
            limits=self.limits(),
            rules=policy_rules(self._config.scaling),
        )
        self.status = {
            "needed_per_s": observation.needed_per_s,
            "supply_per_s": decision.supply_per_s,
            "finished_per_s": observation.finished_per_s,
            "trainer_wait_frac": observation.trainer_wait_frac,
        }
        if not self._config.scaling.auto or self._scaler.state.running is not None:
            return
        self._state = decision.state
        if decision.blocked_by != self._blocked:
            self._blocked = decision.blocked_by
            if decision.blocked_by:
                self._on_event(
                    "scale_blocked",
                    f"{decision.unmet_per_s:.3g} of {observation.needed_per_s:.3g} trajectories/s "
                    f"stay uncovered; at their limit: {', '.join(decision.blocked_by)}",
                    **self.status,
                )
        if self._may_ask() and decision.changes:
            await self._ask({c.pool: c.replicas_to for c in decision.changes}, decision.changes)

    def _may_ask(self) -> bool:
        """Operations that failed are not begun again at once: what broke needs time."""
        last = self._scaler.state.operations.get(self._last_id)
        if last is not None and last.status is Status.FAILED:
            self._failures += 1
            pause_s = min(LONGEST_PAUSE_S, self._config.scaling.every_s * 2.0**self._failures)
            self._next_s, self._last_id = self._clock() + pause_s, ""
            return False
        if last is not None and last.status is Status.DONE:
            self._failures = 0
        return True

    async def _ask(self, targets: dict[str, int], changes: Sequence[Change]) -> None:
        reasons = dict.fromkeys(change.reason for change in changes)
        number = 1 + sum(name.startswith(AUTO) for name in self._scaler.state.operations)
        while f"{AUTO}{number}" in self._scaler.state.operations:
            number += 1
        self._last_id = f"{AUTO}{number}"
        try:
            await self._scaler.request(
                targets, operation_id=self._last_id, reason="; ".join(reasons)
            )
        except ConfigError as error:
            self._on_event("scale_refused", str(error), targets=targets)

    def limits(self) -> FleetLimits:
        """Of the configuration as it is now. A pool that a person made smaller than its floor is
        not grown again because of it."""
        limits = fleet_limits(self._config, self._plan)
        pools = dict(limits.pools)
        for operation in self._scaler.state.operations.values():
            if operation.status is Status.DONE and not operation.id.startswith((AUTO, LOSS)):
                for pool, target in operation.targets.items():
                    own = pools.get(pool, PoolLimits())
                    if target < own.floor:
                        pools[pool] = replace(own, floor=target, may_be_zero=target == 0)
        return replace(limits, pools=pools)

    def _observation(self, seen: TrainerSeen) -> Observation | None:
        """None before the first step is over."""
        metrics, window, now_s = seen.metrics, self._window, self._clock()
        if window is None or "time/step_s" not in metrics:
            return None
        rules = self._config.scaling
        session_s = metrics.get("time/session_mean_s", 0.0)
        seconds = now_s - window.started_s
        finished = Counter(self._rollout.finished_by_pool)
        finished.subtract(window.finished)
        waited = min(1.0, (seen.waited_s - window.waited_s) / seconds) if seconds > 0 else 0.0
        is_settled = seconds >= max(SESSIONS_TO_TRUST * session_s, LOOK_S)
        total = sum(finished.values()) / seconds if is_settled else None
        if is_settled:
            windows = {
                pool: PoolWindow(
                    ready=number,
                    finished=finished[pool],
                    used_frac=window.used[pool] / number / max(window.looks, 1),
                )
                for pool, number in window.ready.items()
            }
            is_waiting = waited > rules.wait_high_frac
            self._rates = learn(self._rates, windows, seconds=seconds, is_waiting=is_waiting)
            self._window = self._new_window(seen, window.ready)
        sessions = max(metrics.get("rollout/sessions", 0.0), 1.0)
        stale = metrics.get("rollout/stale_groups", 0.0) * self._config.loop.group_size
        waste = metrics.get("rollout/void_frac", 0.0) + stale / (sessions + stale)
        need = TrainerNeed(
            sessions_per_step=self._config.loop.sessions_per_step,
            step_s=max(metrics["time/step_s"] - metrics.get("time/wait_s", 0.0), 1e-3),
            max_staleness=self._config.loop.max_staleness,
            session_s=session_s,
            waste_frac=min(MOST_WASTE_FRAC, waste),
        )
        statuses = self._fleet.status()
        return Observation(
            now_s=now_s,
            pools=tuple(self._pool(name, statuses) for name in self._plan.pools),
            needed_per_s=trajectories_per_s(need),
            finished_per_s=total,
            trainer_wait_frac=waited,
        )

    def _pool(self, name: str, statuses: list[ReplicaStatus]) -> PoolSeen:
        plan = self._plan.pools[name]
        mine = [s for s in statuses if s.pool == name and not s.state.is_final]
        leaving = [s for s in mine if s.is_leaving]
        ready = [s for s in mine if s.is_routed and not s.is_leaving]
        running = sum(s.running for s in ready)
        boots = [s.boot_s for s in statuses if s.boot_s is not None]
        own = [s.boot_s for s in mine if s.boot_s is not None] or boots
        view_mates = any(
            s.is_routed and not s.is_leaving
            for s in statuses
            if s.pool != name and self._plan.pools[s.pool].weights == plan.weights
        )
        speeds = {pool: planned.speed for pool, planned in self._plan.pools.items()}
        return PoolSeen(
            name=name,
            accelerator=plan.accelerator,
            gpus=plan.tp,
            usd_per_hour=plan.usd_per_replica_hour,
            per_s=self._rates.of(name, speeds),
            ready=len(ready),
            starting=len([s for s in mine if not (s.is_routed or s.is_leaving or s.is_held)]),
            draining=len(leaving),
            cold_start_s=sum(own) / len(own) if own else self._config.launch.boot_timeout_s,
            in_flight_floor=1 if ready and running and not view_mates else 0,
            kv_used_frac=sum(s.kv_used_frac for s in ready) / max(len(ready), 1),
            queued_frac=sum(s.queued for s in ready) / running if running else 0.0,
        )
