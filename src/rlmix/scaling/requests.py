"""What a request to scale may ask for, and which replicas it takes. Pure.

Invariant: what passes `check_targets` is within floors, ceilings, quotas and budget, names pools of
the run, and leaves at least one replica that can serve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmix.core.errors import ConfigError
from rlmix.scaling.policy import FleetLimits, PoolLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSize:
    """One pool as a request finds it."""

    accelerator: str
    gpus: int
    """Accelerators of one replica."""
    usd_per_hour: float
    """Of one replica."""
    replicas: int
    """That it has and that are not on their way out."""
    draining: int = 0
    """Paid for, and about to go."""
    is_held: bool = False
    """In quarantine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A replica that a smaller pool could do without."""

    name: str
    is_serving: bool
    sessions: int
    """That live on it."""
    in_flight: int
    """Their requests under way."""


def check_targets(
    targets: Mapping[str, int], *, pools: Mapping[str, PoolSize], limits: FleetLimits
) -> None:
    """Refuse a request that the run must not or cannot carry out.

    Args:
        targets: pool -> replicas asked for.
    Raises:
        ConfigError: one sentence with what was asked, what is allowed, and what to do.
    """
    if not targets:
        raise ConfigError("scale pools: no pool is named; give POOL=N, e.g. h100=2")
    for name, target in targets.items():
        asked = f"{name}={target}"
        if name not in pools:
            raise ConfigError(f"{asked}: no pool {name!r}; pools are {', '.join(pools)}")
        own = limits.pools.get(name, PoolLimits())
        if target < 0:
            raise ConfigError(f"{asked}: a pool has 0 replicas or more")
        if own.ceiling is not None and target > max(own.ceiling, pools[name].replicas):
            raise ConfigError(
                f"{asked}: above the ceiling of {own.ceiling}; ask for fewer, or start the run "
                f"with pools.{name}.max_replicas={target}"
            )
        if pools[name].is_held and target > pools[name].replicas:
            raise ConfigError(
                f"{asked}: pool {name} is in quarantine and gets no new replica; wait until its "
                "alarm is over, or make it smaller"
            )
    after = {name: targets.get(name, size.replicas) for name, size in pools.items()}
    if sum(after[name] for name, size in pools.items() if not size.is_held) == 0:
        raise ConfigError(
            f"{_text(targets)}: no pool that may serve would have a replica, so nothing could "
            "sample; keep one, or end the run with `rlmix runs stop`"
        )
    grows = [name for name, target in targets.items() if target > pools[name].replicas]
    for name in grows:
        _check_quota(name, after, targets, pools, limits)
    if grows and limits.usd_per_hour is not None:
        cost = sum(pools[name].usd_per_hour * number for name, number in after.items())
        if cost > limits.usd_per_hour + 1e-9:
            raise ConfigError(
                f"{_text(targets)}: all replicas would cost {cost:.2f} USD/h, and "
                f"scaling.budget_usd_per_hour is {limits.usd_per_hour:g}; ask for fewer, or give "
                "replicas of another pool back in the same command"
            )


def grows_first(
    targets: Mapping[str, int], *, pools: Mapping[str, PoolSize], limits: FleetLimits
) -> bool:
    """May the new replicas serve before the old ones go? False where both at a time are more than
    the machines or the budget allow: then the old ones make room."""
    most = {
        name: max(size.replicas, targets.get(name, 0)) + size.draining
        for name, size in pools.items()
    }
    for accelerator, quota in limits.quota_gpus.items():
        if _gpus(accelerator, most, pools) > quota:
            return False
    cost = sum(pools[name].usd_per_hour * number for name, number in most.items())
    return limits.usd_per_hour is None or cost <= limits.usd_per_hour + 1e-9


def choose_removed(candidates: Sequence[Candidate], number: int) -> list[str]:
    """Names of the replicas that go: first those that serve nobody yet, then those whose sessions
    are soonest gone or cheapest to move, the highest number among equals."""

    def last_first(one: Candidate) -> tuple[bool, int, int, int, str]:
        _, _, index = one.name.rpartition("-")
        place = int(index) if index.isdecimal() else 0
        return (one.is_serving, one.sessions, one.in_flight, -place, one.name)

    return [one.name for one in sorted(candidates, key=last_first)[:number]]


def free_indices(pool: str, taken: Sequence[str], number: int) -> list[int]:
    """The lowest `number` indices whose names, `<pool>-<index>`, nobody has."""
    used, index = set(taken), 0
    found: list[int] = []
    while len(found) < number:
        if f"{pool}-{index}" not in used:
            found.append(index)
        index += 1
    return found


def _check_quota(
    name: str,
    after: Mapping[str, int],
    targets: Mapping[str, int],
    pools: Mapping[str, PoolSize],
    limits: FleetLimits,
) -> None:
    accelerator = pools[name].accelerator
    quota = limits.quota_gpus.get(accelerator)
    needed = _gpus(accelerator, after, pools)
    if quota is not None and needed > quota:
        raise ConfigError(
            f"{name}={targets[name]}: its pools would need {needed} {accelerator}, and the "
            f"inventory has {quota}; ask for fewer, or add machines to inventory.nodes"
        )


def _gpus(accelerator: str, replicas: Mapping[str, int], pools: Mapping[str, PoolSize]) -> int:
    return sum(
        pools[name].gpus * number
        for name, number in replicas.items()
        if pools[name].accelerator == accelerator
    )


def _text(targets: Mapping[str, int]) -> str:
    return " ".join(f"{pool}={number}" for pool, number in targets.items())
