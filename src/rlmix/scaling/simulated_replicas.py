"""Replicas of a simulated fleet: sessions share each one's rate, whatever their length.

A session has so many turns of work; a replica gives every session on it the same share of the turns
that it serves a second (`service`), so one counter of turns per session (`done`) is kept for all of
them, and a session ends when the counter has passed what it began at plus its work. Invariant: the
work that sessions get is the turns that the replica serves, however loads change.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import replace

from rlmix.router.states import Health, ReplicaState
from rlmix.router.step_model import StepModel
from rlmix.scaling.service import ReplicaModel, Served, SessionShape, best_load, serve

BUCKETS_PER_OCTAVE = 8.0
"""Mean contexts are told apart in steps of 9 %."""


class Session:
    """One simulated session."""

    __slots__ = ("context_tokens", "group", "number", "turns", "until", "view")

    def __init__(self, *, number: int, turns: float, context_tokens: float, group: object) -> None:
        self.number = number
        self.turns = turns
        """Left to do, when it is placed the next time."""
        self.context_tokens = context_tokens
        self.group = group
        self.view: str | None = None
        """Weight view that it must have, once it has turns in one and lost its replica."""
        self.until = 0.0
        """Its replica's counter at which it ends."""


class LoadTable:
    """`service.serve` for whole numbers of sessions and buckets of context, computed once."""

    def __init__(self, model: ReplicaModel, shape: SessionShape) -> None:
        self.model = model
        self.shape = shape
        best = best_load(model, shape)
        self.best_sessions = max(1, int(best.sessions)) if best.turns_per_s > 0 else 0
        self.best_turns_per_s = best.turns_per_s
        self._known: dict[tuple[int, int], Served] = {}

    def at(self, sessions: int, context_tokens: float) -> Served:
        bucket = round(BUCKETS_PER_OCTAVE * math.log2(context_tokens)) if sessions else 0
        key = (sessions, bucket)
        known = self._known.get(key)
        if known is None:
            shape = replace(self.shape, context_tokens=2.0 ** (bucket / BUCKETS_PER_OCTAVE))
            known = self._known[key] = serve(self.model, shape, float(sessions))
        return known


class Replica:
    """One replica and the sessions on it."""

    __slots__ = (
        "_last_s", "_queue", "_rate", "context_sum", "done", "name", "pool", "sessions", "stamp",
        "state",
    )  # fmt: skip

    def __init__(self, name: str, pool: "Pool") -> None:
        self.name = name
        self.pool = pool
        self.state = ReplicaState.STARTING
        self.sessions: dict[int, Session] = {}
        self.context_sum = 0.0
        self.done = 0.0
        """Turns that each session here has had since the start."""
        self.stamp = 0
        """Changes with every change of load, so that old ends are known as such."""
        self._queue: list[tuple[float, int, Session]] = []
        self._rate = 0.0
        self._last_s = 0.0

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    @property
    def mean_context_tokens(self) -> float:
        """0 without sessions."""
        return self.context_sum / len(self.sessions) if self.sessions else 0.0

    @property
    def served(self) -> Served:
        return self.pool.table.at(self.num_sessions, self.mean_context_tokens)

    def add(self, session: Session, *, now_s: float) -> None:
        self._advance(now_s)
        session.until = self.done + session.turns
        self.sessions[session.number] = session
        self.context_sum += session.context_tokens
        heapq.heappush(self._queue, (session.until, session.number, session))
        self._changed()

    def finish(self, *, now_s: float) -> list[Session]:
        """Takes out those that have ended."""
        self._advance(now_s)
        ended = []
        # The counter is a sum of floats; a billionth of a turn is nobody's.
        while self._queue and self._queue[0][0] <= self.done + 1e-9:
            session = heapq.heappop(self._queue)[2]
            del self.sessions[session.number]
            self.context_sum -= session.context_tokens
            ended.append(session)
        if ended:
            self._changed()
        return ended

    def take_all(self, *, now_s: float) -> list[Session]:
        """All sessions leave, with the turns that they still have to do and the one that was cut
        off."""
        self._advance(now_s)
        left = list(self.sessions.values())
        for session in left:
            session.turns = max(session.until - self.done, 0.0) + 0.5
        self.sessions.clear()
        self._queue.clear()
        self.context_sum = 0.0
        self._changed()
        return left

    def next_end_s(self, *, now_s: float) -> float | None:
        """When the first of its sessions ends at this load; None: none ever."""
        if not self._queue or self._rate <= 0:
            return None
        return now_s + max(0.0, self._queue[0][0] - self.done) / self._rate

    def _advance(self, now_s: float) -> None:
        self.done += self._rate * (now_s - self._last_s)
        self._last_s = now_s

    def _changed(self) -> None:
        self.stamp += 1
        count = len(self.sessions)
        self._rate = self.served.turns_per_s / count if count else 0.0


class Pool:
    """All replicas of one kind, and the face of its emptiest one for the router's policy.

    Replicas of a pool differ only in their load, and the policy prefers the less loaded one, so
    showing it one of each pool gives the choice that showing all would give.
    """

    def __init__(self, table: LoadTable) -> None:
        self.table = table
        self.model = table.model
        self.name = table.model.pool
        self.replicas: dict[str, Replica] = {}
        self.num_ready = 0
        self.is_changed = True
        """Since its emptiest replica was looked at last."""
        self._open: list[dict[str, Replica]] = []
        self._lowest = 0
        self._next_number = 0

    def new(self) -> Replica:
        replica = self._make(f"{self.name}-{self._next_number}")
        self._next_number += 1
        self.replicas[replica.name] = replica
        return replica

    def remove(self, replica: Replica) -> None:
        self.close(replica)
        del self.replicas[replica.name]

    def open(self, replica: Replica) -> None:
        """From now on it takes new sessions."""
        replica.state = ReplicaState.READY
        self.num_ready += 1
        self.is_changed = True
        self._bucket(replica.num_sessions)[replica.name] = replica
        self._lowest = min(self._lowest, replica.num_sessions)

    def close(self, replica: Replica) -> None:
        if replica.state is ReplicaState.READY:
            del self._bucket(replica.num_sessions)[replica.name]
            self.num_ready -= 1
            self.is_changed = True
        replica.state = ReplicaState.DRAINING

    def moved(self, replica: Replica, before: int) -> None:
        """Its number of sessions was `before`."""
        if replica.state is ReplicaState.READY:
            self.is_changed = True
            del self._open[before][replica.name]
            now = replica.num_sessions
            self._bucket(now)[replica.name] = replica
            self._lowest = min(self._lowest, now)

    def emptiest(self) -> Replica | None:
        while self._lowest < len(self._open):
            bucket = self._open[self._lowest]
            if bucket:
                return next(iter(bucket.values()))
            self._lowest += 1
        return None

    def _make(self, name: str) -> Replica:
        return Replica(name, self)

    def count(self, state: ReplicaState) -> int:
        return sum(one.state is state for one in self.replicas.values())

    def ready(self) -> Iterator[Replica]:
        return (one for one in self.replicas.values() if one.state is ReplicaState.READY)

    def _bucket(self, sessions: int) -> dict[str, Replica]:
        while len(self._open) <= sessions:
            self._open.append({})
        return self._open[sessions]


class Face:
    """What the router's policy sees of a replica (`router.strategies.Candidate`)."""

    def __init__(self, replica: Replica) -> None:
        model, served = replica.pool.model, replica.served
        self.replica = replica
        self.name = replica.name
        self.pool = replica.pool.name
        self.view = model.view
        self.state = replica.state
        self.health = Health.HEALTHY
        self.version = 0
        self.model: StepModel = model.router_model
        self.max_running = model.max_running
        self.in_flight = round(served.in_flight)
        self.peers_in_flight = 0
        self.others = 0.0
        self.num_sessions = replica.num_sessions
        self.mean_context_tokens = replica.mean_context_tokens
        self.waiting_tokens = 0.0
        self.reserved_tokens = int(served.in_flight * self.mean_context_tokens)
        self.max_total_tokens: int | None = model.kv_tokens
        self.max_context_tokens: int | None = model.max_context_tokens
        self.ramp_room = 1 << 30
        self.key: tuple[float, ...] = ()
        """The strategy's, for a new session."""
