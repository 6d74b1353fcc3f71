"""Acts on the alarms of a run: writes them down, takes pools out, ends the run.

The rules are `algos.alarms`; here is what happens at an onset. Invariants: an alarm is an event
once when it is raised and once when it clears; the last pool that serves is never taken out; what
the rules remember and which pools are out is in every checkpoint.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from rlmix.algos.alarms import (
    RULES,
    Alarm,
    AlarmMemory,
    AlarmRules,
    Rule,
    check_alarms,
)
from rlmix.config.schema.alarms import AlarmsConfig
from rlmix.pools.callbacks import OnEvent

MIN_LIMIT = 1e-9
"""Stands in for a limit of 0 where alarms are put in order by how far they are beyond theirs."""


class Pools(Protocol):
    """What this file asks of the fleet."""

    async def quarantine(self, pool: str, reason: str) -> list[str]: ...
    def release(self, pool: str) -> list[str]: ...
    def serving_pools(self) -> frozenset[str]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class AlarmRecord:
    """One alarm over its whole life, for summaries."""

    name: str
    pool: str | None
    since_step: int
    raised_step: int
    """Step at whose end it was raised."""
    cleared_step: int | None
    """None while it stands."""
    value: float
    """The farthest from the limit so far."""
    threshold: float
    action: str
    text: str


def alarm_rules(config: AlarmsConfig, tolerances_nats: Mapping[str, float]) -> AlarmRules:
    return AlarmRules(
        rules={
            name: Rule(
                limit=getattr(config, f"{name}_limit"), action=getattr(config, f"{name}_action")
            )
            for name in RULES
        },
        patience=config.patience,
        min_tokens=config.min_tokens,
        head_min_tokens=config.head_min_tokens,
        window=config.window,
        drift_min_nats=config.pool_drift_min_nats,
        drift_format_gap=config.pool_drift_format_gap,
        tolerances_nats=tolerances_nats,
    )


class AlarmWatch:
    """Asked once per step. Owned by the training loop."""

    def __init__(
        self,
        config: AlarmsConfig,
        *,
        pools: Pools,
        on_event: OnEvent,
        tolerances_nats: Mapping[str, float],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            tolerances_nats: pool -> its `canary_tolerance_nats`.
            state: what `state()` gave before a checkpoint; None starts without a past.
        """
        self._config = config
        self._rules = alarm_rules(config, tolerances_nats)
        self._pools = pools
        self._on_event = on_event
        self._memory = AlarmMemory()
        self._standing: list[Alarm] = []
        self._records: list[AlarmRecord] = []
        self._quarantined: dict[str, int] = {}
        if state:
            self._memory = AlarmMemory.from_dict(state["memory"])
            self._records = [AlarmRecord(**record) for record in state["records"]]
            for record in self._records:
                rule = self._rules.rules.get(record.name)
                if record.cleared_step is None and (rule is None or rule.action != record.action):
                    # Resumed with another action: what stands must be raised again to have it.
                    self._memory = self._memory.forget_breach(_key(record))
            active = {key for key, breach in self._memory.breaches.items() if breach.is_active}
            for index, record in enumerate(self._records):
                # An alarm that stopped the run, or whose action is another one now: over with
                # that attempt, judged afresh in this.
                if record.cleared_step is None and _key(record) not in active:
                    ended = {"cleared_step": record.raised_step}
                    self._records[index] = AlarmRecord(**asdict(record) | ended)
            self._quarantined = dict(state["quarantined"])

    def sentences(self) -> dict[str, str]:
        """What stands now, by name, for the live view: alarms, and pools that are out."""
        alarms = {
            alarm.key: f"{alarm.describe()}, since step {alarm.since_step}"
            for alarm in self._standing
        }
        out = {
            f"out/{pool}": f"pool {pool} is in quarantine since step {step}"
            for pool, step in self._quarantined.items()
        }
        return alarms | out

    @property
    def records(self) -> tuple[AlarmRecord, ...]:
        """Every alarm of the run, the oldest first."""
        return tuple(self._records)

    @property
    def quarantined(self) -> Mapping[str, int]:
        """Pool -> step after which it was taken out."""
        return dict(self._quarantined)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; JSON values only."""
        return {
            "memory": self._memory.to_dict(),
            "records": [asdict(record) for record in self._records],
            "quarantined": self.quarantined,
        }

    async def hold_again(self) -> None:
        """After a resume and before the fleet starts: pools that were out stay out."""
        for pool, step in self._quarantined.items():
            reason = f"in quarantine since step {step}"
            replicas = await self._pools.quarantine(pool, reason)
            self._on_event("pool_quarantined", reason, pool=pool, replicas=replicas, step=step)

    async def after_step(self, step: int, metrics: Mapping[str, float | None]) -> str:
        """Judge a step and act.

        Returns:
            Why the run must stop, as one sentence; empty when it goes on.
        """
        self._release_due(step)
        before = {key for key, breach in self._memory.breaches.items() if breach.is_active}
        self._standing, self._memory = check_alarms(self._rules, self._memory, metrics, step=step)
        keys = {alarm.key for alarm in self._standing}
        self._clear([key for key in sorted(before) if key not in keys], step)
        stops = []
        # The worst pool first: the last one that serves cannot be taken out any more.
        for alarm in sorted(self._standing, key=_times_its_limit, reverse=True):
            if alarm.key in before:
                self._update_record(alarm)
                if alarm.action == "quarantine" and self._others_serve(alarm.pool):
                    await self._quarantine(alarm, step)  # Refused before, as the last that served.
                continue
            self._raise_alarm(alarm, step)
            if alarm.action == "stop":
                stops.append(alarm)
            if alarm.action == "quarantine":
                is_out = await self._quarantine(alarm, step)
                if not is_out and self._config.last_pool == "stop":
                    stops.append(alarm)
        return self._stop_sentence(stops) if stops else ""

    def _raise_alarm(self, alarm: Alarm, step: int) -> None:
        self._records.append(
            AlarmRecord(
                name=alarm.name,
                pool=alarm.pool,
                since_step=alarm.since_step,
                raised_step=step,
                cleared_step=None,
                value=alarm.value,
                threshold=alarm.threshold,
                action=alarm.action,
                text=alarm.describe(),
            )
        )
        self._on_event(
            "alarm_raised",
            f"{alarm.describe()}, since step {alarm.since_step}",
            alarm=alarm.name,
            pool=alarm.pool,
            step=step,
            since_step=alarm.since_step,
            value=alarm.value,
            threshold=alarm.threshold,
            action=alarm.action,
        )

    def _clear(self, keys: Sequence[str], step: int) -> None:
        for index, record in enumerate(self._records):
            if record.cleared_step is None and _key(record) in keys:
                self._records[index] = AlarmRecord(**asdict(record) | {"cleared_step": step})
                self._on_event(
                    "alarm_cleared",
                    f"{_key(record)} is within its limit again",
                    alarm=record.name,
                    pool=record.pool,
                    step=step,
                    since_step=record.since_step,
                )

    def _update_record(self, alarm: Alarm) -> None:
        """Keep the worst value: the one farthest from the limit."""
        for index, record in enumerate(self._records):
            if record.cleared_step is not None or _key(record) != alarm.key:
                continue
            if abs(alarm.value - alarm.threshold) > abs(record.value - record.threshold):
                worse = {"value": alarm.value, "text": alarm.describe()}
                self._records[index] = AlarmRecord(**asdict(record) | worse)

    async def _quarantine(self, alarm: Alarm, step: int) -> bool:
        """Take the alarm's pool out; False when it is the last one that serves."""
        pool = alarm.pool
        assert pool is not None
        if pool in self._quarantined:
            return True
        if not self._others_serve(pool):
            self._on_event(
                "quarantine_refused",
                f"pool {pool} is the last one that serves; alarms.last_pool="
                f"{self._config.last_pool}",
                pool=pool,
                step=step,
            )
            return False
        reason = f"{alarm.describe()}, since step {alarm.since_step}"
        self._quarantined[pool] = step
        replicas = await self._pools.quarantine(pool, reason)
        self._on_event(
            "pool_quarantined", reason, pool=pool, replicas=replicas, step=step, alarm=alarm.name
        )
        return True

    def _others_serve(self, pool: str | None) -> bool:
        return bool(self._pools.serving_pools() - {pool})

    def _release_due(self, step: int) -> None:
        after = self._config.release_after_steps
        for pool, since in self.quarantined.items():
            if not after or step - since < after:
                continue
            del self._quarantined[pool]
            # Judged afresh: a fault that is still there needs the full patience once more.
            keys = [name if pool is None else f"{name}/{pool}" for name in RULES]
            self._clear(keys, step)
            for key in keys:
                self._memory = self._memory.forget_breach(key)
            replicas = self._pools.release(pool)
            self._on_event(
                "pool_released",
                f"{step - since} steps in quarantine; it serves again once its canaries pass",
                pool=pool,
                replicas=replicas,
                step=step,
            )

    def _stop_sentence(self, alarms: Sequence[Alarm]) -> str:
        for alarm in alarms:
            # A run that is resumed on purpose has the full patience to do better.
            self._memory = self._memory.forget_breach(alarm.key)
        first = min(alarms, key=lambda alarm: alarm.since_step)
        what = "; ".join(alarm.describe() for alarm in alarms)
        return (
            f"alarms: the run diverged: {what}, since step {first.since_step}; lower trainer.lr, "
            "narrow algo.low and algo.high, or take the pool out, and resume; to go on as it is "
            f"resume with alarms.{first.name}_action=event"
        )


def _times_its_limit(alarm: Alarm) -> float:
    return alarm.value / max(alarm.threshold, MIN_LIMIT)


def _key(record: AlarmRecord) -> str:
    return record.name if record.pool is None else f"{record.name}/{record.pool}"
