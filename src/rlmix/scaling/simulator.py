"""A fleet simulated event by event: the policy, router policy, operations and cost meter of a run,
on modelled replicas.

Sessions are the unit: a session's turns share the rate of its replica (`simulated_replicas`), so a
day of 20,000 sessions is some hundred thousand events and not tens of millions. Left out: weight
updates (nobody pauses, no cache is flushed), ramps, failed boots, the network. Invariants: one seed
gives one history; no session is lost from the books (`Ledger`).
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from heapq import nsmallest
from operator import itemgetter
from typing import Any

from rlmix.router.states import ReplicaState
from rlmix.router.strategies import Ask, Candidate, Refusal, Weights, choose_replica, shortest_delay
from rlmix.scaling.costs import SECONDS_PER_HOUR, CostMeter
from rlmix.scaling.policy import FleetLimits, PolicyRules
from rlmix.scaling.service import SessionShape
from rlmix.scaling.simulated_replicas import Face, LoadTable, Pool, Replica, Session
from rlmix.scaling.simulated_scaling import Scaler
from rlmix.scaling.simulated_trainer import Group, Ledger, Trainer

GROUP_TIME_WEIGHT = 0.02
"""Of the newest group in the running mean of their times: about the last fifty."""

Record = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Everything that a simulation follows from."""

    name: str
    replicas: Mapping[str, int]
    """Pool -> replicas that serve at the start."""
    shape: SessionShape
    prompt_tokens: int
    turns_spread: float
    sessions_per_step: int
    group_size: int
    max_staleness: int
    step_s: float
    """The trainer's own time for a step."""
    trainer_usd_per_hour: float
    burst_factor: float
    """The trainer is so many times as fast in the middle third."""
    max_sessions: int
    duration_s: float
    warm_up_s: float
    """Not counted in the rates of the outcome."""
    losses_per_day: float
    """Of each replica."""
    drain_s: float
    queue_timeout_s: float
    """A session whose weight view is nowhere is lost unless a replica of it comes within this."""
    every_s: float
    """Between two decisions."""
    rules: PolicyRules | None
    """None: the fleet stays as it is; lost replicas are started again."""
    limits: FleetLimits
    seed: int
    batch_frac: float
    """Sessions that end within this share of a session's time are taken together
    (`simulated_batches`); 0: each at its own moment."""
    trace: tuple[Mapping[str, Any], ...] = ()
    """Driving lines (`traces`); sessions and losses in it replace those that are drawn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of it. Rates are of the time after the warm-up. All of it is modelled."""

    name: str
    usd_per_update: float | None
    """Pools and trainer; None without an update."""
    pools_usd_per_update: float | None
    updates_per_h: float
    lost_sessions: int
    usd_per_hour: float
    """Pools and trainer, on the mean."""
    replicas: Mapping[str, float]
    """Pool -> held on the mean."""
    started: int
    trained: int
    stale: int
    rehomed: int
    open_sessions: int
    buffered: int
    trainer_wait_frac: float
    staleness: float
    """Of trained sessions, versions on the mean."""
    operations: int
    events: int

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "replicas": dict(self.replicas)}


def simulate(
    scenario: Scenario, tables: Mapping[str, LoadTable], *, record: Record | None = None
) -> Outcome:
    """Run a scenario to its end.

    Args:
        tables: pool -> its loads; may be shared between simulations of one shape.
        record: gets every line of the trace that comes out.
    Raises:
        ValueError: a pool of the scenario has no table.
    """
    if unknown := sorted(set(scenario.replicas) - set(tables)):
        raise ValueError(f"simulate: no model for pool {', '.join(unknown)}")
    if scenario.batch_frac > 0:
        # Made of this one, so it cannot be imported before it.
        from rlmix.scaling.simulated_batches import BatchedSimulation

        return BatchedSimulation(scenario, tables, record=record).run()
    return Simulation(scenario, tables, record=record).run()


class Simulation:
    """The clock, the events, and the sessions; scaling acts through `Fleet`'s methods here."""

    def __init__(
        self, scenario: Scenario, tables: Mapping[str, LoadTable], *, record: Record | None
    ) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self.step_s = scenario.step_s
        self.pools = {name: self._make_pool(tables[name]) for name in scenario.replicas}
        self.ledger = Ledger()
        self.trainer = Trainer(
            sessions_per_step=scenario.sessions_per_step,
            max_staleness=scenario.max_staleness,
            ledger=self.ledger,
        )
        self.meter = CostMeter(
            {name: pool.model.usd_per_hour for name, pool in self.pools.items()}, is_modelled=True
        )
        self.group_s = _session_s(self.pools.values(), scenario.shape)
        """From start to end of a group, on the mean of late."""
        self.changed_s = 0.0
        """When the fleet last changed."""
        self._record = record
        self._random = random.Random(scenario.seed)
        self._draw_loss = random.Random(scenario.seed + 1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._number = itertools.count()
        self._waiting: deque[Session] = deque()
        self._open = 0
        self._faces: dict[str, tuple[tuple[float | str, ...], Face]] = {}
        """Pool -> the router's key for a new session on its emptiest replica, and that."""
        self._weights = Weights(busy_frac=0.0, uncached_tokens=scenario.shape.new_tokens)
        lines = [line for line in scenario.trace if line["kind"] == "session"]
        self._given = itertools.cycle(lines) if lines else None
        self._scaler = None if scenario.rules is None else Scaler(self, rules=scenario.rules)
        self._num_events = 0

    def run(self) -> Outcome:
        scenario = self.scenario
        for name, count in scenario.replicas.items():
            for _ in range(count):
                self.pools[name].open(self.pools[name].new())
        self.fleet_changed()
        self._plan_disturbances()
        if self._scaler is not None:
            self.after(scenario.every_s, self._tick)
        self.fill()
        self._until(scenario.warm_up_s)
        before = (self.trainer.version, self.trainer.waited_until(self.now_s), self.ledger.lost)
        self.meter.close_interval(self.now_s)
        self._until(scenario.duration_s)
        return self._outcome(*before)

    def _make_pool(self, table: LoadTable) -> Pool:
        return Pool(table)

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), call))

    def say(self, kind: str, **fields: Any) -> None:
        if self._record is not None:
            self._record({"at_s": self.now_s, "kind": kind, **fields})

    @property
    def held(self) -> dict[str, int]:
        """Pool -> replicas that are paid for."""
        return {name: len(pool.replicas) for name, pool in self.pools.items()}

    def fleet_changed(self) -> None:
        self.changed_s = self.now_s
        self.meter.observe(self.now_s, self.held)

    def start_replica(self, name: str) -> Replica:
        """It boots; `scaling` or `_boot` opens it."""
        replica = self.pools[name].new()
        self.fleet_changed()
        return replica

    def open_replica(self, replica: Replica) -> None:
        replica.pool.open(replica)
        self.changed_s = self.now_s
        self.say("ready", replica=replica.name)
        self.fill()

    def drop_replica(self, replica: Replica) -> None:
        """Gone, with the sessions that are on it re-homed if others can take them."""
        replica.pool.close(replica)
        self.rehome(replica)
        replica.pool.remove(replica)
        self.fleet_changed()

    def rehome(self, replica: Replica) -> None:
        """Its sessions go on elsewhere, on the same weight view, with their prefix to prefill."""
        for session in replica.take_all(now_s=self.now_s):
            session.view = replica.pool.model.view
            self.ledger.rehomed += 1
            self._waiting.append(session)
        self._serve_waiting()
        self._feed_trainer()

    def lose(self, replica: Replica) -> None:
        """A loss without notice; outside an operation, the launcher boots it again."""
        self.say("lose", replica=replica.name, sessions=replica.num_sessions)
        is_operated = self._scaler is not None and self._scaler.lost(replica.name)
        if not is_operated:
            self._boot(replica.pool.name)
        self.drop_replica(replica)
        self.fill()

    def fill(self) -> None:
        """Start groups while the fleet serves them best and the trainer will want them."""
        self._serve_waiting()
        if any(session.view is None for session in self._waiting):
            return
        scenario = self.scenario
        serves = sum(pool.num_ready * pool.table.best_sessions for pool in self.pools.values())
        bound = (scenario.max_staleness + 1) * scenario.sessions_per_step
        most = min(scenario.max_sessions, serves, bound - self.trainer.buffered)
        if (wanted := (most - self._open) // scenario.group_size) > 0:
            self._start_groups(wanted)

    def _start_groups(self, wanted: int) -> None:
        """Up to so many new groups; fewer when one finds no place."""
        size = self.scenario.group_size
        for _ in range(wanted):
            group = Group(size=size, version=self.trainer.version, started_s=self.now_s)
            sessions = [self._new_session(group) for _ in range(size)]
            refused = [one for one in sessions if self._place(one) is not None]
            self._waiting.extend(refused)
            if refused:
                return

    def _serve_waiting(self) -> None:
        """Places for those who wait, oldest first; a view without room holds up no other. What no
        replica can serve any more is lost, and counted."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, deque()
        full: set[str | None] = set()
        for session in waiting:
            if session.view in full:
                self._waiting.append(session)
                continue
            refusal = self._place(session)
            if refusal is None:
                continue
            if session.view is None or refusal is Refusal.ALL_FULL or self._comes(session.view):
                full.add(session.view)
                self._waiting.append(session)
                continue
            self._open -= 1
            self.ledger.lost += 1
            self._end_of(session, is_valid=False)

    def _comes(self, view: str) -> bool:
        """A replica of the view boots, and will serve before the router gives up."""
        return any(
            pool.model.view == view
            and pool.model.cold_start_s <= self.scenario.queue_timeout_s
            and pool.count(ReplicaState.STARTING)
            for pool in self.pools.values()
        )

    def _new_session(self, group: Group) -> Session:
        scenario, shape = self.scenario, self.scenario.shape
        if self._given is not None:
            turns = float(next(self._given)["turns"])
        else:
            spread = scenario.turns_spread
            # The mean of the lognormal is the shape's.
            turns = shape.turns * math.exp(self._random.gauss(-spread * spread / 2, spread))
            turns = float(max(1, round(turns)))
        grown = (shape.context_tokens - scenario.prompt_tokens) * turns / shape.turns
        session = Session(
            number=next(self._number),
            turns=turns,
            context_tokens=scenario.prompt_tokens + grown,
            group=group,
        )
        self._open += 1
        self.ledger.started += 1
        self.say("session", turns=turns)
        return session

    def _place(self, session: Session) -> Refusal | None:
        """None: placed."""
        view = session.view
        ask = Ask(
            context_tokens=int(session.context_tokens if view else self.scenario.prompt_tokens),
            output_tokens=self.scenario.shape.output_tokens,
            view=view,
        )
        chosen = self._choose(ask)
        if isinstance(chosen, Refusal):
            return chosen
        replica, count = chosen.replica, chosen.replica.num_sessions
        if view is not None:
            served = replica.served
            rate = served.turns_per_s / count if count else 1.0 / self.scenario.shape.tool_s
            session.turns += session.context_tokens * replica.pool.model.prefill_token_s * rate
        replica.add(session, now_s=self.now_s)
        replica.pool.moved(replica, count)
        self._expect_end(replica)
        return None

    def _choose(self, ask: Ask) -> Face | Refusal:
        """The router's choice. A new session asks what the one before it asked, so keys of pools
        that have not changed still hold, and the two smallest decide: the second is there because
        the policy may refuse the first."""
        if ask.view is not None:
            faces = [Face(one) for pool in self.pools.values() if (one := pool.emptiest())]
            return choose_replica(faces, strategy=shortest_delay, ask=ask, weights=self._weights)
        for name, pool in self.pools.items():
            if pool.is_changed:
                pool.is_changed = False
                emptiest = pool.emptiest()
                if emptiest is None:
                    self._faces.pop(name, None)
                else:
                    face = Face(emptiest)
                    face.key = shortest_delay(face, ask, self._weights)
                    self._faces[name] = ((*face.key, face.name), face)
        ranked = [face for _, face in nsmallest(2, self._faces.values(), key=itemgetter(0))]
        chosen = choose_replica(ranked, strategy=_kept_key, ask=ask, weights=self._weights)
        if isinstance(chosen, Refusal) and len(self._faces) > len(ranked):
            every = [face for _, face in self._faces.values()]
            return choose_replica(every, strategy=_kept_key, ask=ask, weights=self._weights)
        return chosen

    def _expect_end(self, replica: Replica) -> None:
        at_s = replica.next_end_s(now_s=self.now_s)
        if at_s is not None:
            stamp = replica.stamp
            self.after(at_s - self.now_s, lambda: self._sessions_end(replica, stamp))

    def _sessions_end(self, replica: Replica, stamp: int) -> None:
        if stamp != replica.stamp:
            return
        count = replica.num_sessions
        ended = replica.finish(now_s=self.now_s)
        if ended:
            replica.pool.moved(replica, count)
        for session in ended:
            self._open -= 1
            self._end_of(session, is_valid=True)
        self._expect_end(replica)
        if not replica.num_sessions and self._scaler is not None:
            self._scaler.drained(replica.name)
        self._feed_trainer()
        self.fill()

    def _end_of(self, session: Session, *, is_valid: bool) -> None:
        group = session.group
        assert isinstance(group, Group)
        if self.trainer.ended(group, is_valid=is_valid):
            self.group_s += GROUP_TIME_WEIGHT * (self.now_s - group.started_s - self.group_s)

    def _feed_trainer(self) -> None:
        if self.trainer.begin_step(now_s=self.now_s):
            self.after(self.step_s, self._step_ends)

    def _step_ends(self) -> None:
        self.trainer.end_step(now_s=self.now_s)
        self.say("step", version=self.trainer.version, usd_per_hour=self.meter.usd_per_hour)
        self._feed_trainer()
        self.fill()

    def _tick(self) -> None:
        assert self._scaler is not None
        self._scaler.tick()
        self.after(self.scenario.every_s, self._tick)

    def _boot(self, pool: str) -> None:
        replica = self.start_replica(pool)

        def ready() -> None:
            if replica.name in replica.pool.replicas and replica.state is ReplicaState.STARTING:
                self.open_replica(replica)

        self.after(replica.pool.model.cold_start_s, ready)

    def _plan_disturbances(self) -> None:
        scenario = self.scenario
        drives = {line["kind"] for line in scenario.trace}
        for line in scenario.trace:
            if line["kind"] == "lose":
                self.after(line["at_s"], partial(self._lose_named, line["replica"]))
            elif line["kind"] == "step_s":
                self.after(line["at_s"], partial(self._set_step, line["value"]))
        if scenario.losses_per_day > 0 and not drives & {"session", "lose"}:
            self._next_loss()
        if scenario.burst_factor > 1 and "step_s" not in drives:
            third = (scenario.duration_s - scenario.warm_up_s) / 3
            fast = scenario.step_s / scenario.burst_factor
            self.after(scenario.warm_up_s + third, lambda: self._set_step(fast))
            self.after(scenario.warm_up_s + 2 * third, lambda: self._set_step(scenario.step_s))

    def _set_step(self, value: float) -> None:
        self.step_s = float(value)
        self.say("step_s", value=self.step_s)

    def _lose_named(self, name: str) -> None:
        for pool in self.pools.values():
            if (replica := pool.replicas.get(name)) is not None:
                self.lose(replica)

    def _next_loss(self) -> None:
        each_s = 86_400.0 / self.scenario.losses_per_day
        count = sum(self.held.values())
        self.after(self._draw_loss.expovariate(max(count, 1) / each_s), self._random_loss)

    def _random_loss(self) -> None:
        ready = [one for pool in self.pools.values() for one in pool.ready()]
        if ready:
            self.lose(self._draw_loss.choice(ready))
        self._next_loss()

    def _until(self, end_s: float) -> None:
        events = self._events
        while events and events[0][0] <= end_s:
            self.now_s, _, call = heapq.heappop(events)
            self._num_events += 1
            call()
        self.now_s = end_s

    def _outcome(self, version: int, waited_s: float, lost: int) -> Outcome:
        scenario = self.scenario
        window_s = scenario.duration_s - scenario.warm_up_s
        cost = self.meter.close_interval(self.now_s)
        updates = self.trainer.version - version
        trainer_usd = scenario.trainer_usd_per_hour * window_s / SECONDS_PER_HOUR
        ledger, trained = self.ledger, max(self.ledger.trained, 1)
        assert ledger.is_balanced(open_sessions=self._open, buffered=self.trainer.buffered)
        return Outcome(
            name=scenario.name,
            usd_per_update=(cost.usd + trainer_usd) / updates if updates else None,
            pools_usd_per_update=cost.usd / updates if updates else None,
            updates_per_h=updates * SECONDS_PER_HOUR / window_s,
            lost_sessions=ledger.lost - lost,
            usd_per_hour=(cost.usd + trainer_usd) * SECONDS_PER_HOUR / window_s,
            replicas={name: seconds / window_s for name, seconds in cost.replica_s.items()},
            started=ledger.started,
            trained=ledger.trained,
            stale=ledger.stale,
            rehomed=ledger.rehomed,
            open_sessions=self._open,
            buffered=self.trainer.buffered,
            trainer_wait_frac=(self.trainer.waited_until(self.now_s) - waited_s) / window_s,
            staleness=self.trainer.staleness_sum / trained,
            operations=0 if self._scaler is None else self._scaler.operations,
            events=self._num_events,
        )


def _kept_key(candidate: Candidate, ask: Ask, weights: Weights) -> tuple[float, ...]:
    """A strategy that has been asked already."""
    del ask, weights
    assert isinstance(candidate, Face)
    return candidate.key


def _session_s(pools: Iterable[Pool], shape: SessionShape) -> float:
    """Time of a mean session on the slowest pool, each at its best load; 0 without any."""
    times = [
        shape.turns * pool.table.best_sessions / pool.table.best_turns_per_s
        for pool in pools
        if pool.table.best_turns_per_s > 0
    ]
    return max(times, default=0.0)
