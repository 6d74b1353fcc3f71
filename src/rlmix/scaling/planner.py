"""The cheapest mix of pools for a demand: a mixed-integer programme, solved with HiGHS.

Whole replicas are bought; each spends shares of its time on the buckets of context length, at the
rate that it has for each. Invariant: an answer is never dearer than the best fleet of one kind of
replica within the same limits, for such a fleet is one of the answers; what cannot be met is said
in trajectories a second, with the limits that stand in the way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmix.core.errors import PlanError
from rlmix.scaling.policy import FleetLimits, PoolLimits

LONGEST_SOLVE_S = 30.0
"""Fleets have a handful of pools; a programme that takes longer is told, not waited for."""
TIE_USD = 1e-7
"""Price that each accelerator adds in the objective, so that of equally dear mixes the one with
fewer accelerators is chosen. Far below a cent an hour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolOffer:
    """One kind of replica that can be had."""

    name: str
    accelerator: str
    gpus: int
    """Of one replica."""
    usd_per_hour: float
    """Of one replica."""
    per_s: Mapping[str, float]
    """Bucket -> trajectories a second when the whole replica works on it; 0: does not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """Why a demand cannot be met."""

    per_s: Mapping[str, float]
    """Bucket -> trajectories a second that stay uncovered at best."""
    limits: tuple[str, ...]
    """Limits that are used up then."""

    @property
    def sentence(self) -> str:
        short = ", ".join(f"{name} lacks {rate:.3g}/s" for name, rate in self.per_s.items())
        return f"{short}; at their limit: {', '.join(self.limits) or 'no pool can serve it'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    replicas: Mapping[str, int]
    """Pool -> replicas; pools that get none are in it with 0."""
    shares: Mapping[str, Mapping[str, float]]
    """Pool -> bucket -> replicas' worth of time."""
    usd_per_hour: float
    gpus: int
    missing: Missing | None
    """None: the whole demand is met."""


def cheapest_mix(
    offers: Sequence[PoolOffer], demand_per_s: Mapping[str, float], *, limits: FleetLimits
) -> Mix:
    """The mix with the lowest price that meets the demand; when none does, the one that leaves the
    least uncovered, cheapest among those.

    Args:
        demand_per_s: bucket -> trajectories a second, 0 or more.
    Raises:
        PlanError: floors alone break a quota, a ceiling or the budget, or the solver gave up.
    """
    problem = _Problem(offers, demand_per_s, limits)
    whole = problem.solve(allowed_missing=0.0)
    if whole is not None:
        return problem.mix(whole, missing=None)
    least = problem.solve(allowed_missing=None)
    if least is None:
        raise PlanError(
            f"scaling: the floors ({problem.floors_text()}) break the quotas, ceilings or budget; "
            "lower a floor or raise a limit"
        )
    lacking = {
        bucket: float(rate)
        for bucket, rate in zip(problem.buckets, problem.missing(least), strict=True)
    }
    total = sum(lacking.values())
    # Of the mixes that leave as little, the cheapest.
    cheapest = problem.solve(allowed_missing=total * (1.0 + 1e-9) + 1e-12)
    chosen = least if cheapest is None else cheapest
    rates = problem.missing(chosen)
    missing = Missing(
        per_s={
            bucket: float(rate)
            for bucket, rate in zip(problem.buckets, rates, strict=True)
            if rate > 1e-9
        },
        limits=problem.used_up(chosen),
    )
    return problem.mix(chosen, missing=missing)


def best_homogeneous(
    offers: Sequence[PoolOffer], demand_per_s: Mapping[str, float], *, limits: FleetLimits
) -> Mix | None:
    """The cheapest fleet of one pool only that meets the demand; None when none does. Floors of
    other pools are left out: it is a fleet of its own."""
    found = []
    for offer in offers:
        own = limits.pools.get(offer.name, PoolLimits(floor=0))
        alone = FleetLimits(
            pools={offer.name: own},
            quota_gpus=limits.quota_gpus,
            usd_per_hour=limits.usd_per_hour,
        )
        mix = cheapest_mix([offer], demand_per_s, limits=alone)
        if mix.missing is None:
            found.append(mix)
    return min(found, key=lambda mix: mix.usd_per_hour, default=None)


class _Problem:
    """Variables: replicas of each pool (whole), shares of pool and bucket, missing rate of each
    bucket."""

    def __init__(
        self, offers: Sequence[PoolOffer], demand_per_s: Mapping[str, float], limits: FleetLimits
    ) -> None:
        if any(rate < 0 for rate in demand_per_s.values()):
            raise ValueError(f"planner: negative demand in {dict(demand_per_s)}")
        self._offers = list(offers)
        self._limits = limits
        self.buckets = list(demand_per_s)
        self._demand = [demand_per_s[bucket] for bucket in self.buckets]
        self._num_shares = len(self._offers) * len(self.buckets)
        self._size = len(self._offers) + self._num_shares + len(self.buckets)

    def solve(self, *, allowed_missing: float | None) -> Sequence[float] | None:
        """Values of all variables, None where infeasible. Without `allowed_missing` the rate that
        stays uncovered is what is made small."""
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp

        num_pools = len(self._offers)
        cost = np.zeros(self._size)
        if allowed_missing is None:
            cost[num_pools + self._num_shares :] = 1.0
        else:
            cost[:num_pools] = [one.usd_per_hour + TIE_USD * one.gpus for one in self._offers]
        rows, lows, highs = self._rows(allowed_missing)
        low = np.zeros(self._size)
        high = np.full(self._size, np.inf)
        for index, offer in enumerate(self._offers):
            own = self._own(offer)
            low[index] = own.floor
            high[index] = np.inf if own.ceiling is None else own.ceiling
        if np.any(low > high):
            return None
        answer = milp(
            cost,
            constraints=LinearConstraint(np.array(rows), np.array(lows), np.array(highs)),
            bounds=Bounds(low, high),
            integrality=np.array([1] * num_pools + [0] * (self._size - num_pools)),
            options={"mip_rel_gap": 0.0, "time_limit": LONGEST_SOLVE_S},
        )
        if answer.status == 2:
            return None
        if answer.x is None or answer.status != 0:
            raise PlanError(
                f"scaling: HiGHS ended with {answer.message!r} after at most {LONGEST_SOLVE_S:g} s "
                f"for {num_pools} pools and {len(self.buckets)} buckets; use fewer"
            )
        values: Sequence[float] = answer.x
        return values

    def _rows(self, allowed_missing: float | None) -> tuple[list[list[float]], list, list]:
        rows: list[list[float]] = []
        lows: list[float] = []
        highs: list[float] = []

        def add(entries: Mapping[int, float], low: float, high: float) -> None:
            row = [0.0] * self._size
            for column, value in entries.items():
                row[column] = value
            rows.append(row)
            lows.append(low)
            highs.append(high)

        buckets = range(len(self.buckets))
        for pool in range(len(self._offers)):
            used = {self._share(pool, bucket): 1.0 for bucket in buckets}
            add({**used, pool: -1.0}, -float("inf"), 0.0)
        for bucket, name in enumerate(self.buckets):
            served = {
                self._share(pool, bucket): offer.per_s.get(name, 0.0)
                for pool, offer in enumerate(self._offers)
            }
            add({**served, self._lack(bucket): 1.0}, self._demand[bucket], float("inf"))
        for accelerator, quota in self._limits.quota_gpus.items():
            add(self._gpus_on(accelerator), -float("inf"), float(quota))
        if self._limits.usd_per_hour is not None:
            prices = {pool: offer.usd_per_hour for pool, offer in enumerate(self._offers)}
            add(prices, -float("inf"), self._limits.usd_per_hour)
        if allowed_missing is not None:
            add({self._lack(bucket): 1.0 for bucket in buckets}, 0.0, allowed_missing)
        return rows, lows, highs

    def _share(self, pool: int, bucket: int) -> int:
        return len(self._offers) + pool * len(self.buckets) + bucket

    def _lack(self, bucket: int) -> int:
        return len(self._offers) + self._num_shares + bucket

    def _gpus_on(self, accelerator: str) -> dict[int, float]:
        return {
            pool: float(offer.gpus)
            for pool, offer in enumerate(self._offers)
            if offer.accelerator == accelerator
        }

    def _own(self, offer: PoolOffer) -> PoolLimits:
        return self._limits.pools.get(offer.name, PoolLimits(floor=0))

    def missing(self, values: Sequence[float]) -> Sequence[float]:
        return values[len(self._offers) + self._num_shares :]

    def used_up(self, values: Sequence[float]) -> tuple[str, ...]:
        """Limits that leave no room for one more replica of a pool that could help."""
        counts = [round(values[pool]) for pool in range(len(self._offers))]
        usd = sum(n * offer.usd_per_hour for n, offer in zip(counts, self._offers, strict=True))
        lacking = [
            bucket
            for bucket, rate in zip(self.buckets, self.missing(values), strict=True)
            if rate > 1e-9
        ]
        found = []
        for count, offer in zip(counts, self._offers, strict=True):
            if not any(offer.per_s.get(bucket, 0.0) > 0 for bucket in lacking):
                continue
            ceiling = self._own(offer).ceiling
            quota = self._limits.quota_gpus.get(offer.accelerator)
            held = sum(counts[pool] * n for pool, n in self._gpus_on(offer.accelerator).items())
            budget = self._limits.usd_per_hour
            if ceiling is not None and count >= ceiling:
                found.append(f"ceiling of {offer.name} ({ceiling})")
            elif quota is not None and held + offer.gpus > quota:
                found.append(f"quota of {offer.accelerator} ({quota})")
            elif budget is not None and usd + offer.usd_per_hour > budget + 1e-9:
                found.append(f"budget ({budget:g} USD/h)")
        return tuple(dict.fromkeys(found))

    def floors_text(self) -> str:
        return ", ".join(f"{one.name}={self._own(one).floor}" for one in self._offers)

    def mix(self, values: Sequence[float], *, missing: Missing | None) -> Mix:
        replicas = {offer.name: round(values[pool]) for pool, offer in enumerate(self._offers)}
        return Mix(
            replicas=replicas,
            shares={
                offer.name: {
                    bucket: float(values[self._share(pool, index)])
                    for index, bucket in enumerate(self.buckets)
                }
                for pool, offer in enumerate(self._offers)
            },
            usd_per_hour=sum(replicas[one.name] * one.usd_per_hour for one in self._offers),
            gpus=sum(replicas[one.name] * one.gpus for one in self._offers),
            missing=missing,
        )
