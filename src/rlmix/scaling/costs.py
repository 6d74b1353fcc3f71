"""What a step cost: replica-seconds times price. Pure arithmetic; time comes in as an argument.

A replica is paid for from the moment it is held until it is given back, whether it works or not,
so booting and idle time count. For an embedded engine the price is that of the accelerator it
emulates: such costs are modelled, never measured, and everything that shows them says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """The cost of one interval, usually one optimizer step."""

    usd: float
    by_pool_usd: dict[str, float]
    replica_s: dict[str, float]
    """Replica-seconds held, by pool."""
    is_modelled: bool
    """True when at least one pool's accelerator is emulated."""

    def metrics(self) -> dict[str, float]:
        """Under the names of `metrics.jsonl`."""
        pools = {f"cost/by_pool/{pool}_usd": usd for pool, usd in self.by_pool_usd.items()}
        return {"cost/step_usd": self.usd, **pools}


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCosts:
    """What one piece of a step cost; None where the step had none of it."""

    trajectory_usd: float | None
    """Of a trajectory that trained; dropped and void ones are in its price."""
    per_1k_tokens_usd: float | None
    """Of 1,000 trained tokens."""

    def metrics(self) -> dict[str, float]:
        """Under the names of `metrics.jsonl`; what is not known is left out."""
        named = {
            "cost/trajectory_usd": self.trajectory_usd,
            "cost/per_1k_tokens_usd": self.per_1k_tokens_usd,
        }
        return {name: usd for name, usd in named.items() if usd is not None}


def unit_costs(usd: float, *, trajectories: int, trained_tokens: int) -> UnitCosts:
    """Spread the cost of an interval over what was trained in it.

    Worked: 0.60 USD for 120 trajectories of 400 tokens: 0.005 USD each, and 0.60 / 48 = 0.0125
    USD for 1,000 tokens.

    Raises:
        ValueError: a number is negative.
    """
    if trajectories < 0 or trained_tokens < 0:
        raise ValueError(f"negative amount: {trajectories} trajectories, {trained_tokens} tokens")
    return UnitCosts(
        trajectory_usd=usd / trajectories if trajectories else None,
        per_1k_tokens_usd=1000.0 * usd / trained_tokens if trained_tokens else None,
    )


def interval_cost(
    replica_s: Mapping[str, float],
    usd_per_replica_hour: Mapping[str, float],
    *,
    is_modelled: bool,
) -> StepCost:
    """Price replica-seconds.

    Args:
        replica_s: replica-seconds held by pool, >= 0.
        usd_per_replica_hour: price of ONE replica (all its accelerators) for an hour, by pool.
    Raises:
        ValueError: a pool has no price, or a duration is negative.
    """
    if missing := sorted(set(replica_s) - set(usd_per_replica_hour)):
        raise ValueError(
            f"no price for pool {', '.join(missing)}; priced are "
            f"{', '.join(sorted(usd_per_replica_hour))}"
        )
    if negative := sorted(pool for pool, seconds in replica_s.items() if seconds < 0):
        raise ValueError(f"negative replica-seconds in pool {', '.join(negative)}")
    by_pool = {
        pool: seconds * usd_per_replica_hour[pool] / SECONDS_PER_HOUR
        for pool, seconds in replica_s.items()
    }
    return StepCost(
        usd=sum(by_pool.values()),
        by_pool_usd=by_pool,
        replica_s=dict(replica_s),
        is_modelled=is_modelled,
    )


class CostMeter:
    """Adds up replica-seconds from observations of how many replicas each pool holds.

    The numbers of one observation hold until the next one (a step function), so observe at every
    change and at every step's end.
    """

    def __init__(self, usd_per_replica_hour: Mapping[str, float], *, is_modelled: bool) -> None:
        self._prices = dict(usd_per_replica_hour)
        self._is_modelled = is_modelled
        self._held: dict[str, int] = dict.fromkeys(self._prices, 0)
        self._replica_s: dict[str, float] = dict.fromkeys(self._prices, 0.0)
        self._last_s: float | None = None
        self.total_usd = 0.0
        """Sum over the intervals closed so far."""

    def observe(self, now_s: float, replicas: Mapping[str, int]) -> None:
        """From `now_s` on the pools hold `replicas`; pools not named hold none.

        Args:
            now_s: any clock that does not go back, in seconds.
        Raises:
            ValueError: an unknown pool, a negative number, or a clock that went back.
        """
        if unknown := sorted(set(replicas) - set(self._prices)):
            raise ValueError(
                f"no price for pool {', '.join(unknown)}; priced are "
                f"{', '.join(sorted(self._prices))}"
            )
        if any(number < 0 for number in replicas.values()):
            raise ValueError(f"negative number of replicas: {dict(replicas)}")
        self._advance(now_s)
        self._held = {pool: replicas.get(pool, 0) for pool in self._prices}

    def close_interval(self, now_s: float) -> StepCost:
        """Cost since the last call (or the first observation); the replicas stay held."""
        self._advance(now_s)
        cost = interval_cost(self._replica_s, self._prices, is_modelled=self._is_modelled)
        self._replica_s = dict.fromkeys(self._prices, 0.0)
        self.total_usd += cost.usd
        return cost

    @property
    def usd_per_hour(self) -> float:
        """What the replicas held now cost per hour."""
        return sum(number * self._prices[pool] for pool, number in self._held.items())

    def _advance(self, now_s: float) -> None:
        if self._last_s is not None:
            if now_s < self._last_s:
                raise ValueError(f"the clock went back from {self._last_s} s to {now_s} s")
            for pool, number in self._held.items():
                self._replica_s[pool] += number * (now_s - self._last_s)
        self._last_s = now_s
