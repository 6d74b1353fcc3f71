"""Which pools grow and which shrink: a pure function of what is seen, the state, and the limits.

Growing is quick and shrinking slow: a missing replica makes the trainer wait, a superfluous one
costs its price for a while, and each start costs minutes of price without a token. Invariants: no
target is outside floor, ceiling, quota and budget, except where they contradict what already runs;
a demand that the limits can meet is met, in steps of `most_changes`; more demand never takes a
replica away; a pool that has just grown does not shrink before several of its cold starts have
passed; nothing here looks at a clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlmix.scaling.swap import SwapPool, SwapRules, best_swap

MOST_OPTIMISTIC = 4.0
"""Fitted rates are trusted within this factor of what the fleet is seen to finish."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSeen:
    """One pool as it is now."""

    name: str
    accelerator: str
    gpus: int
    """Accelerators of one replica."""
    usd_per_hour: float
    """Of one replica."""
    per_s: float
    """Trajectories a second that one replica finishes at full load: its fitted service rate."""
    ready: int
    starting: int = 0
    """Ordered and not ready yet."""
    draining: int = 0
    """Paid for, and about to go."""
    cold_start_s: float
    """Measured, from the order to the first session; the plan's guess before the first one."""
    in_flight_floor: int = 0
    """Replicas that open groups cannot do without."""
    kv_used_frac: float = 0.0
    queued_frac: float = 0.0
    """Requests that wait in its engines over those that are decoded."""
    reprefill_frac: float = 0.0
    """Share of prefilled tokens that had been cached once."""
    timeout_frac: float = 0.0
    """Share of its sessions that ended void because time ran out."""

    @property
    def coming(self) -> int:
        return self.ready + self.starting

    @property
    def held(self) -> int:
        """Paid for."""
        return self.ready + self.starting + self.draining


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    now_s: float
    """Of any clock that does not go back."""
    pools: tuple[PoolSeen, ...]
    needed_per_s: float
    """Trajectories a second that the trainer takes (`demand`)."""
    finished_per_s: float | None
    """Seen since the fleet last changed; None while that is not as long as a few sessions."""
    trainer_wait_frac: float
    """Share of the trainer's time that it waited for samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLimits:
    floor: int = 1
    ceiling: int | None = None
    """None: quota and budget decide."""
    may_be_zero: bool = False
    """The last replica may go when nothing is needed of it; the floor is 0 then."""

    @property
    def lowest(self) -> int:
        return 0 if self.may_be_zero else max(self.floor, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLimits:
    pools: Mapping[str, PoolLimits]
    quota_gpus: Mapping[str, int] = field(default_factory=dict)
    """Accelerator -> how many can be had for all pools on it; without an entry any number."""
    usd_per_hour: float | None = None
    """Most that all replicas together may cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRules:
    headroom_frac: float
    """Supply ordered beyond the demand."""
    surplus_frac: float
    """Supply beyond the demand that must remain when a replica goes; above `headroom_frac`."""
    out_delay_s: float
    """A shortage must last this long before anything is ordered."""
    in_delay_s: float
    """The same of a surplus before anything goes."""
    in_cold_starts: float
    """And this many cold starts of the pool, both of the surplus and since the pool last grew."""
    zero_delay_s: float
    """The same before the last replica of a pool goes."""
    most_changes: int
    """Replicas that one decision orders or gives back at most."""
    wait_high_frac: float
    """A trainer that waits more is short of samples, whatever the rates say."""
    kv_high_frac: float
    queued_high_frac: float
    reprefill_high_frac: float
    swap: SwapRules | None = None
    """None: replicas are never exchanged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyState:
    """What a decision must remember of earlier ones."""

    short_since_s: float | None = None
    surplus_since_s: float | None = None
    calm_since_s: float | None = None
    """Neither a shortage nor a surplus."""
    grown_s: Mapping[str, float] = field(default_factory=dict)
    """Pool -> when it was last told to grow."""
    calibration: float = 1.0
    """What the fleet finishes at full load over what the service rates promise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    pool: str
    replicas_from: int
    replicas_to: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    targets: Mapping[str, int]
    """Pool -> replicas that it should have, ready and starting together."""
    changes: tuple[Change, ...]
    supply_per_s: float
    """Of the targets."""
    unmet_per_s: float
    """Demand that the limits leave uncovered."""
    blocked_by: tuple[str, ...]
    """Limits that stand in the way of the rest of the demand."""
    state: PolicyState


def useful_per_s(pool: PoolSeen, rules: PolicyRules) -> float:
    """Trajectories a second of one replica that train: those that time out do not, and time spent
    on computing lost caches again, beyond the share that is usual, is not spent on sampling."""
    lost = max(0.0, pool.reprefill_frac - rules.reprefill_high_frac)
    return pool.per_s * (1.0 - min(pool.timeout_frac, 1.0)) * (1.0 - min(lost, 1.0))


def is_strained(pool: PoolSeen, rules: PolicyRules) -> bool:
    """Its engines have more to do than they can."""
    return pool.ready > 0 and (
        pool.kv_used_frac > rules.kv_high_frac
        or pool.queued_frac > rules.queued_high_frac
        or pool.reprefill_frac > rules.reprefill_high_frac
    )


def decide(
    seen: Observation, *, state: PolicyState, limits: FleetLimits, rules: PolicyRules
) -> Decision:
    """What every pool should have now.

    Source of the order of growing: the replica with the lowest price per trajectory that is still
    missing, price / min(rate, gap): a large replica for a small gap is dear. Of shrinking: the
    replica with the highest price per trajectory whose loss leaves the surplus that is wanted.
    While supply is right, one exchange between two pools that pays for itself in time (`swap`).
    """
    state = replace(state, calibration=_calibration(seen, state, rules))
    rates = {pool.name: useful_per_s(pool, rules) * state.calibration for pool in seen.pools}
    draft = _Draft(seen=seen, limits=limits, rates=rates, most=rules.most_changes)
    draft.repair()
    wanted_per_s = seen.needed_per_s * (1.0 + rules.headroom_frac)
    is_short = draft.supply() < wanted_per_s - 1e-12
    state = replace(state, short_since_s=_since(state.short_since_s, is_short, seen.now_s))
    blocked: tuple[str, ...] = ()
    if is_short and seen.now_s - (state.short_since_s or 0.0) >= rules.out_delay_s:
        blocked = draft.grow(wanted_per_s)
    is_waiting = seen.trainer_wait_frac > rules.wait_high_frac
    kept_per_s = seen.needed_per_s * (1.0 + rules.surplus_frac)
    has_surplus = not is_short and not is_waiting and draft.dearest(kept_per_s) is not None
    state = replace(state, surplus_since_s=_since(state.surplus_since_s, has_surplus, seen.now_s))
    if has_surplus and state.surplus_since_s is not None:
        draft.shrink(kept_per_s, state=state, rules=rules)
    is_calm = not is_short and not is_waiting and not has_surplus
    state = replace(state, calm_since_s=_since(state.calm_since_s, is_calm, seen.now_s))
    if is_calm and rules.swap is not None and not draft.changes:
        draft.swap(wanted_per_s, state=state, rules=rules)
    grown = {c.pool: seen.now_s for c in draft.changes if c.replicas_to > c.replicas_from}
    supply = draft.supply()
    return Decision(
        targets=dict(draft.targets),
        changes=tuple(draft.changes),
        supply_per_s=supply,
        unmet_per_s=max(0.0, seen.needed_per_s - supply),
        blocked_by=blocked,
        state=replace(state, grown_s={**state.grown_s, **grown}),
    )


def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
    if not holds:
        return None
    return now_s if since_s is None else since_s


def _calibration(seen: Observation, state: PolicyState, rules: PolicyRules) -> float:
    """When the trainer waits and engines are strained, what is finished is all that can be. At any
    other time it is a lower bound."""
    promised = sum(pool.ready * useful_per_s(pool, rules) for pool in seen.pools)
    if promised <= 0 or seen.finished_per_s is None:
        return state.calibration
    shown = min(max(seen.finished_per_s / promised, 1.0 / MOST_OPTIMISTIC), MOST_OPTIMISTIC)
    is_full = seen.trainer_wait_frac > rules.wait_high_frac and any(
        is_strained(pool, rules) for pool in seen.pools
    )
    if is_full:
        return (state.calibration + shown) / 2.0
    return max(state.calibration, min(shown, 1.0))


class _Draft:
    """The targets while a decision is being made."""

    def __init__(
        self, *, seen: Observation, limits: FleetLimits, rates: Mapping[str, float], most: int
    ) -> None:
        self._pools = {pool.name: pool for pool in seen.pools}
        self._limits = limits
        self._rates = rates
        self._left = most
        self._now_s = seen.now_s
        self.targets = {pool.name: pool.coming for pool in seen.pools}
        self.changes: list[Change] = []

    def supply(self) -> float:
        return sum(self._rates[name] * number for name, number in self.targets.items())

    def repair(self) -> None:
        """Floors and ceilings hold at once, whatever the demand."""
        for name in self._pools:
            own = self._own(name)
            before = self.targets[name]
            while self.targets[name] < own.floor and not self._blocker(name):
                self.targets[name] += 1
            if own.ceiling is not None and self.targets[name] > own.ceiling:
                self.targets[name] = max(own.ceiling, self._pools[name].in_flight_floor)
            self._note(name, before, "floor" if self.targets[name] > before else "ceiling")

    def grow(self, wanted_per_s: float) -> tuple[str, ...]:
        """Returns:
        What stands in the way, when the demand stays uncovered.
        """
        before = dict(self.targets)
        blocked: set[str] = set()
        while (gap := wanted_per_s - self.supply()) > 1e-12 and self._left > 0:
            open_pools, blocked = [], set()
            for name in self._pools:
                if self._rates[name] <= 0:
                    continue
                if blocker := self._blocker(name):
                    blocked.add(blocker)
                else:
                    open_pools.append(name)
            if not open_pools:
                break
            best = min(open_pools, key=lambda name: (self._usd_for(name, gap), name))
            self.targets[best] += 1
            self._left -= 1
            blocked = set()
        for name, number in before.items():
            self._note(name, number, f"supply below the {wanted_per_s:.3g} trajectories/s wanted")
        return tuple(sorted(blocked))

    def dearest(self, kept_per_s: float) -> str | None:
        """Pool whose replica costs most per trajectory and can be spared."""
        spare = [
            name
            for name, pool in self._pools.items()
            if self.targets[name] > self._lowest(name)
            and pool.ready > 0
            and self.supply() - self._rates[name] >= kept_per_s - 1e-12
        ]
        return max(spare, key=lambda name: (self._usd_per_trajectory(name), name), default=None)

    def shrink(self, kept_per_s: float, *, state: PolicyState, rules: PolicyRules) -> None:
        lasted_s = self._now_s - (state.surplus_since_s or 0.0)
        before = dict(self.targets)
        settled = {name: self._is_settled(name, lasted_s, state, rules) for name in self._pools}
        while self._left > 0:
            # Judged among all: a cheap replica does not go because a dear one must still wait.
            name = self.dearest(kept_per_s)
            if name is None or not settled[name]:
                break
            if self.targets[name] == 1 and lasted_s < rules.zero_delay_s:
                break
            self.targets[name] -= 1
            self._left -= 1
        for name, number in before.items():
            self._note(name, number, f"more than the {kept_per_s:.3g} trajectories/s to keep")

    def swap(self, wanted_per_s: float, *, state: PolicyState, rules: PolicyRules) -> None:
        """Old replicas against new ones of another pool, after calm as long as shrinking wants."""
        assert rules.swap is not None
        lasted_s = self._now_s - (state.calm_since_s or 0.0)
        settled = {name: self._is_settled(name, lasted_s, state, rules) for name in self._pools}
        if any(pool.starting or pool.draining for pool in self._pools.values()):
            return
        pools = [
            SwapPool(
                name=name,
                usd_per_hour=pool.usd_per_hour,
                per_s=self._rates[name],
                cold_start_s=pool.cold_start_s,
                may_leave=self._spare(name, lasted_s, rules) if settled[name] else 0,
                may_come=self._room(name) if settled[name] else 0,
            )
            for name, pool in self._pools.items()
        ]
        found = best_swap(
            pools, supply_per_s=self.supply(), wanted_per_s=wanted_per_s, rules=rules.swap
        )
        if found is None:
            return
        reason = (
            f"{found.num_in} {found.into} do the work of {found.num_out} {found.out} for "
            f"{found.saved_usd_per_hour:.3g} USD/h less; the exchange costs "
            f"{found.exchange_usd:.3g} USD"
        )
        for name, change in ((found.into, found.num_in), (found.out, -found.num_out)):
            before = self.targets[name]
            self.targets[name] += change
            self._note(name, before, reason)

    def _spare(self, name: str, lasted_s: float, rules: PolicyRules) -> int:
        """Replicas that may go for others; the last of a pool only after the time for that."""
        lowest = self._lowest(name)
        if lowest == 0 and lasted_s < rules.zero_delay_s:
            lowest = 1
        return min(max(0, self.targets[name] - lowest), self._left)

    def _room(self, name: str) -> int:
        """Replicas that may come beside all that are there."""
        before, room = self.targets[name], 0
        while room < self._left and not self._blocker(name):
            self.targets[name] += 1
            room += 1
        self.targets[name] = before
        return room

    def _is_settled(
        self, name: str, lasted_s: float, state: PolicyState, rules: PolicyRules
    ) -> bool:
        calm_s = max(rules.in_delay_s, rules.in_cold_starts * self._pools[name].cold_start_s)
        grown_s = state.grown_s.get(name)
        return lasted_s >= calm_s and (grown_s is None or self._now_s - grown_s >= calm_s)

    def _own(self, name: str) -> PoolLimits:
        return self._limits.pools.get(name, PoolLimits())

    def _lowest(self, name: str) -> int:
        return max(self._own(name).lowest, self._pools[name].in_flight_floor)

    def _usd_for(self, name: str, gap: float) -> float:
        return self._pools[name].usd_per_hour / min(self._rates[name], gap)

    def _usd_per_trajectory(self, name: str) -> float:
        rate = self._rates[name]
        return self._pools[name].usd_per_hour / rate if rate > 0 else float("inf")

    def _blocker(self, name: str) -> str:
        """The limit that forbids one more replica; empty: none."""
        pool, own = self._pools[name], self._own(name)
        if own.ceiling is not None and self.targets[name] >= own.ceiling:
            return f"ceiling of {name} ({own.ceiling})"
        quota = self._limits.quota_gpus.get(pool.accelerator)
        if quota is not None and self._gpus(pool.accelerator) + pool.gpus > quota:
            return f"quota of {pool.accelerator} ({quota})"
        budget = self._limits.usd_per_hour
        if budget is not None and self._usd_per_hour() + pool.usd_per_hour > budget + 1e-9:
            return f"budget ({budget:g} USD/h)"
        return ""

    def _gpus(self, accelerator: str) -> int:
        return sum(
            pool.gpus * (self.targets[name] + pool.draining)
            for name, pool in self._pools.items()
            if pool.accelerator == accelerator
        )

    def _usd_per_hour(self) -> float:
        return sum(
            pool.usd_per_hour * (self.targets[name] + pool.draining)
            for name, pool in self._pools.items()
        )

    def _note(self, name: str, before: int, reason: str) -> None:
        if self.targets[name] != before:
            self.changes.append(
                Change(
                    pool=name, replicas_from=before, replicas_to=self.targets[name], reason=reason
                )
            )
