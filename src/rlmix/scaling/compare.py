"""Fleets side by side: mixed and homogeneous, fixed and scaled, each for the same trainer.

Fleets are bought by the planner for the demand that their own sessions allow, so a fleet whose
sessions take longer than the staleness bound likes is bought for fewer updates an hour, and shows
it. Invariant: no fleet is preferred here; limits hold for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlmix.scaling.demand import TrainerNeed, trajectories_per_s
from rlmix.scaling.planner import Mix, PoolOffer, cheapest_mix
from rlmix.scaling.policy import FleetLimits, PolicyRules, PoolLimits
from rlmix.scaling.service import ReplicaModel, SessionShape
from rlmix.scaling.simulated_replicas import LoadTable
from rlmix.scaling.simulator import Outcome, Record, Scenario, simulate

GROUP_SPREAD = 1.5
"""Time of the slowest of eight sessions over the mean, about, at a spread of 0.3."""
SIZED_FOR = 1.1
"""Supply bought over the demand: a fleet with none to spare makes the trainer wait."""
WHOLE = "supply"
"""The one bucket of a demand whose sessions all have one mean context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Replicas of some pools, bought for a demand."""

    name: str
    replicas: Mapping[str, int]
    usd_per_hour: float
    gpus: int
    needed_per_s: float
    supply_per_s: float
    missing: str
    """What the limits leave uncovered; empty: nothing."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {
            "replicas": dict(self.replicas)
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Market:
    """All kinds of replicas that can be had, their loads, and the trainer that they feed."""

    tables: Mapping[str, LoadTable]
    shape: SessionShape
    need: TrainerNeed
    """`session_s` is filled in by fleet."""
    limits: FleetLimits

    def model(self, pool: str) -> ReplicaModel:
        return self.tables[pool].model

    def per_s(self, pool: str) -> float:
        """Trajectories of one replica at its best load."""
        return self.tables[pool].best_turns_per_s / self.shape.turns

    def session_s(self, pools: Mapping[str, int]) -> float:
        """Of a group, on the slowest of the pools that have a replica."""
        times = [
            self.shape.turns * table.best_sessions / table.best_turns_per_s
            for pool, table in self.tables.items()
            if pools.get(pool) and table.best_turns_per_s > 0
        ]
        return GROUP_SPREAD * max(times, default=0.0)

    def needed_per_s(self, pools: Mapping[str, int]) -> float:
        return trajectories_per_s(replace(self.need, session_s=self.session_s(pools)))

    def offers(self, pools: Mapping[str, int] | None = None) -> list[PoolOffer]:
        names = list(self.tables) if pools is None else [name for name in pools if pools[name]]
        return [
            PoolOffer(
                name=name,
                accelerator=self.model(name).accelerator,
                gpus=self.model(name).gpus,
                usd_per_hour=self.model(name).usd_per_hour,
                per_s={WHOLE: self.per_s(name)},
            )
            for name in names
        ]


def given_fleet(name: str, replicas: Mapping[str, int], market: Market) -> Fleet:
    """Exactly these replicas."""
    return _fleet(name, replicas, market, missing="")


def planned_fleet(name: str, pools: list[str], market: Market) -> Fleet:
    """The cheapest mix of these pools within the limits. Its demand is that of the pools it takes:
    a slow pool lowers what the staleness bound lets the trainer take, so the mix is planned for the
    demand of the pools that the mix before it took, until it stays. Of equally dear fleets it is
    the one whose sessions are shortest, which the staleness bound hurts least."""
    chosen: dict[str, int] = dict.fromkeys(pools, 1)
    tried: list[Mix] = []
    for _ in range(4):
        needed = market.needed_per_s(chosen) * SIZED_FOR
        offers = [one for one in market.offers() if one.name in pools]
        mix = cheapest_mix(offers, {WHOLE: needed}, limits=market.limits)
        tried.append(mix)
        taken = {pool: count for pool, count in mix.replicas.items() if count}
        if not taken or set(taken) == {pool for pool, count in chosen.items() if count}:
            break
        chosen = taken
    best = tried[-1]
    floors = [own.floor for own in market.limits.pools.values()]
    if best.missing is None and not any(floors):
        alone = [cheapest_mix([one], {WHOLE: needed}, limits=market.limits) for one in offers]
        found = [best, *(mix for mix in alone if mix.missing is None)]
        best = min(
            found, key=lambda mix: (round(mix.usd_per_hour, 6), market.session_s(mix.replicas))
        )
    missing = best.missing
    return _fleet(
        name, best.replicas, market, missing=missing.sentence if missing is not None else ""
    )


def scaled_fleet(name: str, shape_of: Mapping[str, int], market: Market) -> Fleet:
    """A mix in the proportions of `shape_of`, as many times as the demand asks for, at least one
    replica of each pool, within the quotas."""
    needed = market.needed_per_s(shape_of) * SIZED_FOR
    one = sum(count * market.per_s(pool) for pool, count in shape_of.items())
    if one <= 0:
        return _fleet(name, shape_of, market, missing="no pool of it serves this context")
    factor = needed / one
    replicas = {
        pool: max(1, round(count * factor)) if count else 0 for pool, count in shape_of.items()
    }
    limited = False
    for accelerator, quota in market.limits.quota_gpus.items():
        users = [p for p in replicas if market.model(p).accelerator == accelerator]
        while sum(replicas[p] * market.model(p).gpus for p in users) > quota:
            largest = max(users, key=lambda p: (replicas[p] * market.model(p).gpus, p))
            replicas[largest] -= 1
            limited = True
    # What quotas took away is bought where the mix has room, in its own proportions.
    supply = sum(count * market.per_s(pool) for pool, count in replicas.items())
    if limited and supply < needed:
        floors = {
            pool: PoolLimits(floor=count, ceiling=count if not count else None)
            for pool, count in replicas.items()
        }
        limits = replace(market.limits, pools=floors)
        mix = cheapest_mix(market.offers(shape_of), {WHOLE: needed}, limits=limits)
        missing = mix.missing.sentence if mix.missing is not None else ""
        return _fleet(name, mix.replicas, market, missing=missing)
    return _fleet(name, replicas, market, missing="")


def run_fleet(
    fleet: Fleet,
    market: Market,
    scenario: Scenario,
    *,
    rules: PolicyRules | None = None,
    record: Record | None = None,
) -> Outcome:
    """Simulate a fleet; with `rules` it is scaled, from these replicas on."""
    replicas = {pool: count for pool, count in fleet.replicas.items() if count or rules is not None}
    return simulate(
        replace(scenario, name=fleet.name, replicas=replicas, rules=rules, limits=market.limits),
        market.tables,
        record=record,
    )


def _fleet(name: str, replicas: Mapping[str, int], market: Market, *, missing: str) -> Fleet:
    return Fleet(
        name=name,
        replicas=dict(replicas),
        usd_per_hour=sum(n * market.model(pool).usd_per_hour for pool, n in replicas.items()),
        gpus=sum(n * market.model(pool).gpus for pool, n in replicas.items()),
        needed_per_s=market.needed_per_s(replicas),
        supply_per_s=sum(n * market.per_s(pool) for pool, n in replicas.items()),
        missing=missing,
    )
