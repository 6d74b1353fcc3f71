"""The same simulation with sessions in arrays: what ends within a moment is taken together.

A fleet of thousands of replicas ends dozens of sessions a second; handling each alone costs most of
a simulation's time. Here time goes on in moments of `batch_frac` of a session's time, and to every
other event at its own time. All that ended in a moment leaves at once; what starts in its place is
placed by the router's policy, in one decision for all replicas of a pool that have equally many
sessions; and a session that takes the place of one that ended earlier in the moment gets the turns
of the time between. Trainer, policy, operations, losses and costs are the inherited ones.

Invariant: as in `simulator`, one seed gives one history and no session is lost from the books.
"""

import heapq
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from rlmix.router.states import ReplicaState
from rlmix.router.strategies import Ask, Refusal
from rlmix.scaling.service import Served
from rlmix.scaling.simulated_replicas import (
    BUCKETS_PER_OCTAVE,
    LoadTable,
    Pool,
    Replica,
    Session,
)
from rlmix.scaling.simulated_trainer import Group
from rlmix.scaling.simulator import GROUP_TIME_WEIGHT, Record, Scenario, Simulation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NOWHERE = -1
FULL_TURN_LEFT = 0.5
"""Of the turn that a loss cuts off, as in `Replica.take_all`."""
NUM_BUCKETS = 224
"""Of mean contexts: up to 2**28 tokens."""


class Floor:
    """Sessions and replicas as columns; a row that is free may be taken again."""

    def __init__(self) -> None:
        # Sessions: [S]
        self.until: Floats = np.zeros(1024)
        """Their replica's counter of turns at which they end."""
        self.context: Floats = np.zeros(1024)
        self.where: Ints = np.full(1024, NOWHERE)
        """Row of the replica."""
        self.group: Ints = np.zeros(1024, dtype=np.int64)
        # Replicas: [R]
        self.count: Ints = np.zeros(64, dtype=np.int64)
        self.context_sum: Floats = np.zeros(64)
        self.done: Floats = np.zeros(64)
        self.rate: Floats = np.zeros(64)
        """Turns a second of each session there."""
        self.pool: Ints = np.zeros(64, dtype=np.int64)
        self.replicas: list[Replica | None] = []
        self._tables: list[LoadTable] = []
        self._rates: Floats = np.full((0, 64, NUM_BUCKETS), np.nan)
        """Turns a second of a whole replica: [pool, sessions, bucket of context]; nan: not asked
        yet."""

    def add_pool(self, table: LoadTable) -> int:
        self._tables.append(table)
        wider = np.full((1, *self._rates.shape[1:]), np.nan)
        self._rates = np.concatenate([self._rates, wider])
        return len(self._tables) - 1

    def add_replica(self, replica: Replica, pool: int) -> int:
        row = len(self.replicas)
        self.replicas.append(replica)
        if row == len(self.count):
            for name in ("count", "context_sum", "done", "rate", "pool"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.pool[row] = pool
        return row

    def free_rows(self, wanted: int) -> Ints:
        """Rows of sessions that are nowhere."""
        while True:
            rows = np.flatnonzero(self.where == NOWHERE)
            if len(rows) >= wanted:
                return rows[:wanted]
            size = len(self.where)
            self.until = np.concatenate([self.until, np.zeros(size)])
            self.context = np.concatenate([self.context, np.zeros(size)])
            self.where = np.concatenate([self.where, np.full(size, NOWHERE)])
            self.group = np.concatenate([self.group, np.zeros(size, dtype=np.int64)])

    def advance(self, seconds: float) -> None:
        self.done += self.rate * seconds

    def ended(self) -> Ints:
        """Rows of sessions that have had all their turns."""
        # The counter is a sum of floats; a billionth of a turn is nobody's.
        due = self.until <= self.done[self.where] + 1e-9
        due &= self.where != NOWHERE
        return np.flatnonzero(due)

    def leave(self, rows: Ints) -> None:
        where, size = self.where[rows], len(self.count)
        self.count -= np.bincount(where, minlength=size)
        self.context_sum -= np.bincount(where, weights=self.context[rows], minlength=size)
        self.where[rows] = NOWHERE

    def enter(self, rows: Ints, where: Ints, until: Floats, context: Floats, group: Ints) -> None:
        """Rows that are nowhere; several may enter one replica."""
        self.until[rows], self.context[rows] = until, context
        self.where[rows], self.group[rows] = where, group
        size = len(self.count)
        self.count += np.bincount(where, minlength=size)
        self.context_sum += np.bincount(where, weights=context, minlength=size)

    def update_rates(self) -> None:
        """Of all replicas, by their present load."""
        num = len(self.replicas)
        count, pool = self.count[:num], self.pool[:num]
        while count.max(initial=0) >= self._rates.shape[1]:
            self._rates = np.concatenate([self._rates, np.full_like(self._rates, np.nan)], axis=1)
        alone = np.maximum(count, 1)
        mean = np.maximum(self.context_sum[:num], 1.0) / alone
        bucket = np.rint(BUCKETS_PER_OCTAVE * np.log2(np.maximum(mean, 1.0))).astype(np.int64)
        rates = self._rates[pool, count, bucket]
        for row in np.flatnonzero(np.isnan(rates) & (count > 0)):
            served = self._tables[pool[row]].at(int(count[row]), float(mean[row]))
            self._rates[pool[row], count[row], bucket[row]] = served.turns_per_s
            rates[row] = served.turns_per_s
        self.rate[:num] = np.where(count > 0, rates / alone, 0.0)


class BatchReplica(Replica):
    """A replica whose sessions are rows of the floor."""

    __slots__ = ("floor", "row")

    def __init__(self, name: str, pool: "BatchPool") -> None:
        super().__init__(name, pool)
        self.floor = pool.floor
        self.row = pool.floor.add_replica(self, pool.number)

    @property
    def num_sessions(self) -> int:
        return int(self.floor.count[self.row])

    @property
    def mean_context_tokens(self) -> float:
        count = self.num_sessions
        return float(self.floor.context_sum[self.row]) / count if count else 0.0

    @property
    def served(self) -> Served:
        return self.pool.table.at(self.num_sessions, self.mean_context_tokens)

    def add(self, session: Session, *, now_s: float) -> None:
        """One session that comes from elsewhere. The floor's counters are at `now_s` already."""
        del now_s
        floor = self.floor
        assert isinstance(session.group, int)
        floor.enter(
            floor.free_rows(1),
            np.array([self.row]),
            np.array([floor.done[self.row] + session.turns]),
            np.array([session.context_tokens]),
            np.array([session.group]),
        )
        floor.update_rates()

    def take_all(self, *, now_s: float) -> list[Session]:
        del now_s
        floor = self.floor
        rows = np.flatnonzero(floor.where == self.row)
        left = []
        for row in rows:
            session = Session(
                number=int(row),
                turns=max(float(floor.until[row] - floor.done[self.row]), 0.0) + FULL_TURN_LEFT,
                context_tokens=float(floor.context[row]),
                group=int(floor.group[row]),
            )
            left.append(session)
        floor.leave(rows)
        floor.update_rates()
        return left

    def next_end_s(self, *, now_s: float) -> float | None:
        """Ends are looked for by the simulation."""
        del now_s
        return None


class BatchPool(Pool):
    """Replicas of one kind; the rows of those that take new sessions are an array."""

    def __init__(self, table: LoadTable, floor: Floor) -> None:
        super().__init__(table)
        self.floor = floor
        self.number = floor.add_pool(table)
        self.rows: Ints = np.zeros(0, dtype=np.int64)

    def _make(self, name: str) -> Replica:
        return BatchReplica(name, self)

    def open(self, replica: Replica) -> None:
        assert isinstance(replica, BatchReplica)
        replica.state = ReplicaState.READY
        self.num_ready += 1
        self.is_changed = True
        self.rows = np.append(self.rows, replica.row)

    def close(self, replica: Replica) -> None:
        assert isinstance(replica, BatchReplica)
        if replica.state is ReplicaState.READY:
            self.rows = self.rows[self.rows != replica.row]
            self.num_ready -= 1
            self.is_changed = True
        replica.state = ReplicaState.DRAINING

    def remove(self, replica: Replica) -> None:
        assert isinstance(replica, BatchReplica)
        super().remove(replica)
        self.floor.replicas[replica.row] = None

    def moved(self, replica: Replica, before: int) -> None:
        del replica, before
        self.is_changed = True

    def emptiest(self) -> Replica | None:
        if not len(self.rows):
            return None
        return self.floor.replicas[self.rows[np.argmin(self.floor.count[self.rows])]]


class BatchedSimulation(Simulation):
    """`Simulation`, moment by moment."""

    def __init__(
        self, scenario: Scenario, tables: Mapping[str, LoadTable], *, record: Record | None
    ) -> None:
        self._floor = Floor()
        super().__init__(scenario, tables, record=record)
        self._draw = np.random.default_rng(scenario.seed)
        self._drawn: Floats = np.zeros(0)
        """Turns of the sessions that start next."""
        self._late_s: Floats = np.zeros(0)
        """How long ago sessions ended whose places are free now."""
        # Groups: [G], in the order in which they started.
        self._left: Ints = np.zeros(1024, dtype=np.int64)
        self._valid: Ints = np.zeros(1024, dtype=np.int64)
        self._version: Ints = np.zeros(1024, dtype=np.int64)
        self._started_s: Floats = np.zeros(1024)
        self._num_groups = 0
        self._batch_s = scenario.batch_frac * _quickest_s(self.pools.values(), scenario)

    def _make_pool(self, table: LoadTable) -> Pool:
        return BatchPool(table, self._floor)

    def _until(self, end_s: float) -> None:
        events = self._events
        while True:
            next_s = min(end_s, self.now_s + self._batch_s, events[0][0] if events else end_s)
            self._floor.advance(next_s - self.now_s)
            self.now_s = next_s
            self._num_events += 1
            self._sessions_of_moment_end()
            while events and events[0][0] <= self.now_s:
                self._num_events += 1
                heapq.heappop(events)[2]()
            if self.now_s >= end_s:
                return

    def _sessions_of_moment_end(self) -> None:
        floor = self._floor
        rows = floor.ended()
        if not len(rows):
            return
        where = floor.where[rows]
        self._late_s = (floor.done[where] - floor.until[rows]) / floor.rate[where]
        floor.leave(rows)
        for pool in self.pools.values():
            pool.is_changed = True
        self._open -= len(rows)
        self.trainer.buffered += len(rows)
        self._leave_groups(floor.group[rows], is_valid=True)
        if self._scaler is not None:
            for row in np.unique(where[floor.count[where] == 0]):
                if (replica := floor.replicas[row]) is not None:
                    self._scaler.drained(replica.name)
        floor.update_rates()
        self._feed_trainer()
        self.fill()
        self._late_s = np.zeros(0)

    def _end_of(self, session: Session, *, is_valid: bool) -> None:
        assert isinstance(session.group, int)
        if is_valid:
            self.trainer.buffered += 1
        self._leave_groups(np.array([session.group]), is_valid=is_valid)

    def _leave_groups(self, groups: Ints, *, is_valid: bool) -> None:
        """A session of each is over; a group may be named several times."""
        np.subtract.at(self._left, groups, 1)
        if is_valid:
            np.add.at(self._valid, groups, 1)
        for number in np.unique(groups[self._left[groups] == 0]).tolist():
            started_s = float(self._started_s[number])
            group = Group(size=0, version=int(self._version[number]), started_s=started_s)
            group.valid = int(self._valid[number])
            self.trainer.completed(group)
            self.group_s += GROUP_TIME_WEIGHT * (self.now_s - started_s - self.group_s)

    def _start_groups(self, wanted: int) -> None:
        floor, size = self._floor, self.scenario.group_size
        turns = self._next_turns(wanted * size)
        context = self._context_tokens(turns)
        where = self._seats(context)
        # Those who find no place wait, and no further group starts.
        started = min(wanted, len(where) // size + 1)
        turns, context = turns[: started * size], context[: started * size]
        self._drawn = self._drawn[started * size :]
        groups = np.repeat(self._new_groups(started), size)
        self._open += len(turns)
        self.ledger.started += len(turns)
        if self._record is not None:
            for value in turns:
                self.say("session", turns=float(value))
        floor.update_rates()
        seated = len(where)
        until = floor.done[where] + turns[:seated]
        late_s = self._late_s[:seated]
        until[: len(late_s)] -= late_s * floor.rate[where[: len(late_s)]]
        rows = floor.free_rows(seated)
        floor.until[rows], floor.context[rows] = until, context[:seated]
        floor.where[rows], floor.group[rows] = where, groups[:seated]
        for turn, tokens, group in zip(
            turns[seated:], context[seated:], groups[seated:], strict=True
        ):
            session = Session(
                number=next(self._number),
                turns=float(turn),
                context_tokens=float(tokens),
                group=int(group),
            )
            self._waiting.append(session)

    def _seats(self, context: Floats) -> Ints:
        """Row of a replica for each new session, in order; fewer when no place is left. Loads are
        counted up as places are taken."""
        floor, shape = self._floor, self.scenario.shape
        ask = Ask(context_tokens=self.scenario.prompt_tokens, output_tokens=shape.output_tokens)
        taken: list[Ints] = []
        num_taken = 0
        while num_taken < len(context):
            chosen = self._choose(ask)
            if isinstance(chosen, Refusal):
                break
            pool = chosen.replica.pool
            assert isinstance(pool, BatchPool)
            # All with as many sessions as the chosen one look like it to the policy.
            alike = pool.rows[floor.count[pool.rows] == chosen.num_sessions]
            alike = alike[: len(context) - num_taken]
            floor.count[alike] += 1
            floor.context_sum[alike] += context[num_taken : num_taken + len(alike)]
            pool.is_changed = True
            taken.append(alike)
            num_taken += len(alike)
        return np.concatenate(taken) if taken else np.zeros(0, dtype=np.int64)

    def _next_turns(self, count: int) -> Floats:
        """Turns of the next sessions, without taking them off `_drawn`."""
        while len(self._drawn) < count:
            if self._given is not None:
                more = np.array([float(next(self._given)["turns"]) for _ in range(count)])
            else:
                spread = self.scenario.turns_spread
                # The mean of the lognormal is the shape's.
                more = self._draw.normal(-spread * spread / 2, spread, size=max(count, 4096))
                more = np.maximum(1.0, np.rint(self.scenario.shape.turns * np.exp(more)))
            self._drawn = np.concatenate([self._drawn, more])
        return self._drawn[:count]

    def _context_tokens(self, turns: Floats) -> Floats:
        prompt, shape = self.scenario.prompt_tokens, self.scenario.shape
        return prompt + (shape.context_tokens - prompt) * turns / shape.turns

    def _new_groups(self, count: int) -> Ints:
        first = self._num_groups
        self._num_groups += count
        while self._num_groups > len(self._left):
            for name in ("_left", "_valid", "_version", "_started_s"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self._left[first : self._num_groups] = self.scenario.group_size
        self._version[first : self._num_groups] = self.trainer.version
        self._started_s[first : self._num_groups] = self.now_s
        return np.arange(first, self._num_groups)


def _quickest_s(pools: Iterable[Pool], scenario: Scenario) -> float:
    """Time of a mean session on the quickest pool at its best load; without any, that of a
    decision."""
    times = [
        scenario.shape.turns * pool.table.best_sessions / pool.table.best_turns_per_s
        for pool in pools
        if pool.table.best_turns_per_s > 0
    ]
    return min(times, default=scenario.every_s)
