"""The replicas that the router knows, what is under way on each, and who waits for a place.

Who fills the queue of waiters: requests of new (or moved) sessions that no replica can take now.
What unblocks it: a replica that becomes ready or newer, and every answer, which frees a place.

Invariant: a place is taken before a connection is made, in the same step that chose the replica,
so that a burst of new sessions sees its own members and spreads.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlmix.router.strategies import (
    Refusal,
    ReplicaState,
    SpeedObservation,
    Strategy,
    choose_replica,
    refine_speeds,
)

RATE_MEMORY_TURNS = 64
"""The observed rate is an exponential mean with about this memory: it follows a replica whose
contexts grow, and does not jump with single turns."""

MIN_TURN_S = 1e-4
"""Floor of a turn's time in the rate; keeps a rejected request from looking infinitely fast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRecord:
    """What the fleet says about a replica; the body of `PUT /replicas/{name}`."""

    name: str
    pool: str
    url: str
    numerics_key: str
    speed: float
    """Prior, relative to the other replicas' (turns or tokens per second at full load)."""
    max_running: int
    version: int
    state: ReplicaState


class Upstream:
    """A replica as the router sees it. A replacement at another URL is another Upstream."""

    def __init__(self, record: ReplicaRecord) -> None:
        self.name = record.name
        self.pool = record.pool
        self.url = record.url
        self.numerics_key = record.numerics_key
        self.prior = record.speed
        self.speed = record.speed
        self.max_running = record.max_running
        self.version = record.version
        self.state = record.state
        self.is_lost = False
        """True for good once connections failed or the fleet said so; only a new record with
        state ready brings the name back."""
        self.in_flight = 0
        self.num_sessions = 0
        self.requests: set[asyncio.Task[object]] = set()
        """Requests under way; cancelled when the replica is lost."""
        self.turns = 0
        self.turn_s_sum = 0.0
        self.faults = 0
        self.turns_per_s: float | None = None

    @property
    def keeps_sessions(self) -> bool:
        return not self.is_lost and self.state.keeps_sessions

    def update(self, record: ReplicaRecord) -> None:
        self.pool = record.pool
        self.numerics_key = record.numerics_key
        self.prior = record.speed
        self.max_running = record.max_running
        self.version = record.version
        self.state = record.state

    def record(self, **changes: Any) -> ReplicaRecord:
        """What is held about it, with changes."""
        facts = {
            "name": self.name, "pool": self.pool, "url": self.url, "speed": self.prior,
            "numerics_key": self.numerics_key, "max_running": self.max_running,
            "version": self.version, "state": self.state,
        }  # fmt: skip
        return ReplicaRecord(**{**facts, **changes})

    def lose(self) -> None:
        """Nothing more goes there, and what is under way is given up."""
        self.is_lost = True
        self.state = ReplicaState.DEAD
        for task in self.requests:
            task.cancel()

    def observe_turn(self, turn_s: float, in_flight: float) -> None:
        """A turn was answered: `in_flight` is the mean number of requests there meanwhile."""
        self.turns += 1
        self.turn_s_sum += turn_s
        rate = in_flight / max(turn_s, MIN_TURN_S)
        weight = 1.0 / min(self.turns, RATE_MEMORY_TURNS)
        before = self.turns_per_s if self.turns_per_s is not None else rate
        self.turns_per_s = before + weight * (rate - before)


@dataclass(slots=True)
class _Waiter:
    min_version: int | None
    place: "asyncio.Future[Upstream | Refusal]"


class Registry:
    """All replicas by name, and the queue in front of them."""

    def __init__(self, *, strategy: Strategy, observe_speeds: bool) -> None:
        self._strategy = strategy
        self._observe_speeds = observe_speeds
        self._upstreams: dict[str, Upstream] = {}
        self._waiters: deque[_Waiter] = deque()
        self.busy_frac = 0.5
        """Share of an open session's time that it spends in the model; see `observe_session`."""
        self._model_s = 1.0
        self._tool_s = 1.0

    @property
    def upstreams(self) -> Mapping[str, Upstream]:
        return self._upstreams

    @property
    def num_waiting(self) -> int:
        return len(self._waiters)

    def put(self, record: ReplicaRecord) -> Upstream:
        """Add a replica, replace it (its URL changed, or it was lost), or change its facts."""
        known = self._upstreams.get(record.name)
        if known is not None and (known.url != record.url or known.is_lost):
            known.lose()
            known = None
        if known is None:
            known = self._upstreams[record.name] = Upstream(record)
        else:
            known.update(record)
        if record.state in (ReplicaState.DEAD, ReplicaState.QUARANTINED):
            known.lose()
        self.refresh_speeds()
        self._serve_waiters()
        return known

    def remove(self, name: str) -> bool:
        known = self._upstreams.pop(name, None)
        if known is None:
            return False
        known.lose()
        return True

    async def take_place(self, *, min_version: int | None, timeout_s: float) -> Upstream | Refusal:
        """A replica for a new session, with one request already counted there.

        Waits up to `timeout_s` when nothing is ready or all are full, first come first served;
        `TOO_OLD` is answered at once, because a client that backs off waits better.
        """
        if not self._waiters:
            chosen = self._choose(min_version)
            if not isinstance(chosen, Refusal) or chosen is Refusal.TOO_OLD:
                return chosen
        waiter = _Waiter(min_version, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self._serve_waiters()
        try:
            await asyncio.wait((waiter.place,), timeout=timeout_s)
        except asyncio.CancelledError:
            if waiter.place.done() and isinstance(place := waiter.place.result(), Upstream):
                self.give_place(place)
            raise
        finally:
            if not waiter.place.done():
                self._waiters.remove(waiter)
        return waiter.place.result() if waiter.place.done() else self._choose(min_version)

    def give_place(self, upstream: Upstream) -> None:
        """A request there has ended."""
        upstream.in_flight -= 1
        if self._waiters:
            self._serve_waiters()

    def observe_session(self, *, model_s: float, tool_s: float | None) -> None:
        """A turn took `model_s`, after the session had been away for `tool_s` (None: its first).

        Exponential sums with a memory of about 200 turns, over all sessions.
        """
        keep = 1.0 - 1.0 / 200.0
        self._model_s = self._model_s * keep + model_s
        if tool_s is not None:
            self._tool_s = self._tool_s * keep + tool_s
        self.busy_frac = self._model_s / (self._model_s + self._tool_s)

    def refresh_speeds(self) -> None:
        """Recompute every replica's speed; cheap, called on changes and every few seconds."""
        if not self._observe_speeds:
            for upstream in self._upstreams.values():
                upstream.speed = upstream.prior
            return
        observations = {
            name: SpeedObservation(
                prior=upstream.prior, turns_per_s=upstream.turns_per_s, turns=upstream.turns
            )
            for name, upstream in self._upstreams.items()
            if not upstream.is_lost
        }
        for name, speed in refine_speeds(observations).items():
            self._upstreams[name].speed = speed

    def _choose(self, min_version: int | None) -> Upstream | Refusal:
        chosen = choose_replica(
            self._upstreams.values(),
            strategy=self._strategy,
            busy_frac=self.busy_frac,
            min_version=min_version,
        )
        if isinstance(chosen, Upstream):
            chosen.in_flight += 1
        return chosen

    def _serve_waiters(self) -> None:
        """Give places to those who wait, in order; one that asks for too new a version does not
        hold up those behind it."""
        refused_from: float = float("inf")
        for waiter in list(self._waiters):
            wanted = -1 if waiter.min_version is None else waiter.min_version
            if wanted >= refused_from:
                continue
            chosen = self._choose(waiter.min_version)
            if isinstance(chosen, Refusal) and chosen is not Refusal.TOO_OLD:
                if wanted < 0:
                    return
                refused_from = wanted
                continue
            self._waiters.remove(waiter)
            waiter.place.set_result(chosen)
