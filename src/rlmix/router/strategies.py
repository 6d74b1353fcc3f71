"""Which replica a new session goes to: pure functions of what is known about each replica.

Invariant: a session is never placed on a replica that is not ready, too old, or full; and making
a replica busier never makes it the chosen one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar


class ReplicaState(StrEnum):
    """What the fleet says about a replica."""

    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    DEAD = "dead"

    @property
    def takes_new_sessions(self) -> bool:
        return self is ReplicaState.READY

    @property
    def keeps_sessions(self) -> bool:
        """True when sessions that are already there continue there."""
        return self in (ReplicaState.READY, ReplicaState.UPDATING, ReplicaState.DRAINING)


class Candidate(Protocol):
    """What a strategy may look at. Read only."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> ReplicaState: ...
    @property
    def version(self) -> int:
        """Weight version that the replica serves."""
        ...

    @property
    def speed(self) -> float:
        """Turns per second at full load, relative to the others; above 0."""
        ...

    @property
    def max_running(self) -> int:
        """Requests that the engine runs at a time; what comes on top waits there."""
        ...

    @property
    def in_flight(self) -> int:
        """Requests sent and not answered, running or waiting in the engine."""
        ...

    @property
    def num_sessions(self) -> int:
        """Open sessions that live there, with or without a request under way."""
        ...


class Refusal(StrEnum):
    """Why nothing was chosen."""

    NONE_READY = "none_ready"
    ALL_FULL = "all_full"
    TOO_OLD = "too_old"


C = TypeVar("C", bound=Candidate)

Strategy = Callable[[Candidate, float], tuple[float, ...]]
"""(candidate, busy_frac) -> sort key; the smallest is chosen."""


def shortest_delay(candidate: Candidate, busy_frac: float) -> tuple[float, ...]:
    """Shortest expected delay: the work that is there, and mine, over the speed.

    A session between two turns is in a sandbox now and back in a moment: it counts with the
    share of its time that it has been seen to spend in the model. Counting requests alone would
    send every new session to whichever replica's agents happen to be running their tests.

    Returns:
        (seconds in units of the speeds' scale, sessions): sessions decide between equals.
    Source: shortest expected delay for unequal servers, argmin (q + 1) / mu, arXiv:1509.03535.
    """
    idle = max(0, candidate.num_sessions - candidate.in_flight)
    work = candidate.in_flight + busy_frac * idle
    return ((work + 1.0) / candidate.speed, float(candidate.num_sessions))


def least_sessions(candidate: Candidate, busy_frac: float) -> tuple[float, ...]:
    """Fewest sessions, whatever the speed: what routers for equal replicas do; a baseline."""
    del busy_frac
    return (float(candidate.num_sessions), float(candidate.in_flight))


STRATEGIES: Mapping[str, Strategy] = {
    "shortest_delay": shortest_delay,
    "least_sessions": least_sessions,
}


def choose_replica(
    candidates: Iterable[C], *, strategy: Strategy, busy_frac: float, min_version: int | None
) -> C | Refusal:
    """The replica for a new session, or why there is none.

    Args:
        candidates: every replica that is known, in any state and order.
        busy_frac: share of an open session's time that it has a request under way, 0 to 1.
        min_version: oldest weight version that the session accepts; None accepts all.
    Returns:
        The candidate with the smallest key, the first name among equals. `TOO_OLD` only when
        some replica is ready and none of those is new enough: a new version is on its way, so
        asking again is right. `ALL_FULL` when waiting for an answer to free a place is right.
    """
    best: C | None = None
    best_key: tuple[tuple[float, ...], str] | None = None
    num_ready = num_new_enough = 0
    for candidate in candidates:
        if not candidate.state.takes_new_sessions:
            continue
        num_ready += 1
        if min_version is not None and candidate.version < min_version:
            continue
        num_new_enough += 1
        if candidate.in_flight >= candidate.max_running:
            continue
        key = (strategy(candidate, busy_frac), candidate.name)
        if best_key is None or key < best_key:
            best, best_key = candidate, key
    if best is not None:
        return best
    if num_new_enough:
        return Refusal.ALL_FULL
    return Refusal.TOO_OLD if num_ready else Refusal.NONE_READY


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedObservation:
    """One replica's prior and what its turns have shown."""

    prior: float
    """Relative speed that the plan expects, above 0."""
    turns_per_s: float | None
    """Mean of requests in flight over turn time (Little's law): None before the first turn."""
    turns: int
    """How many turns the mean is made of."""


SPEED_TRUST_TURNS = 32
"""Turns after which observation and prior weigh the same: turn lengths vary about twofold, so
the mean of 32 is good to about 15 %."""

SPEED_RATIO_MAX = 4.0
"""Observation moves a speed by at most this factor either way. Under light load a batching
engine answers no faster with less to do, and looks slower than it is; the bound keeps such a
replica in play."""


def refine_speeds(observations: Mapping[str, SpeedObservation]) -> dict[str, float]:
    """Priors corrected by what was observed, on the priors' scale.

    A replica's share of the observed turns per second is compared with its share of the priors,
    over the replicas that have been observed at all; the correction is the ratio, to the power
    of how much the observation is trusted, n / (n + 32).

    Returns:
        name -> relative speed, above 0. Equal to the prior where nothing was observed.
    """
    seen = {n: o for n, o in observations.items() if o.turns_per_s is not None and o.turns > 0}
    total_rate = sum(o.turns_per_s or 0.0 for o in seen.values())
    total_prior = sum(o.prior for o in seen.values())
    speeds = {name: o.prior for name, o in observations.items()}
    if total_rate <= 0.0:
        return speeds
    for name, o in seen.items():
        ratio = ((o.turns_per_s or 0.0) / total_rate) / (o.prior / total_prior)
        ratio = min(max(ratio, 1.0 / SPEED_RATIO_MAX), SPEED_RATIO_MAX)
        speeds[name] = o.prior * ratio ** (o.turns / (o.turns + SPEED_TRUST_TURNS))
    return speeds
