"""Carries scale operations out on the pools of a run; `scaling.operation` says what is next.

Who asks: a person through the control endpoint, or the policy (`loop.autoscale`). One task looks a
few times a second at the fleet and the router, tells the operation what happened, and does what
comes back. Invariants: the state is on disk before anything is done; an operation that failed ends
with the pools that it began with; new replicas serve before old ones close, unless machines or
budget allow only the other order; sessions that have nowhere to go are left to end.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from rlmix.core.errors import ConfigError, EngineError, LaunchError
from rlmix.loop.scale_news import Sessions, counts, facts_of, held_replicas, news_of
from rlmix.pools.callbacks import OnEvent
from rlmix.pools.fleet import Fleet
from rlmix.pools.spec import ReplicaSpec, ReplicaStatus, SlotState
from rlmix.router.client import RouterAdmin
from rlmix.scaling.history import ScaleState
from rlmix.scaling.operation import (
    Happened,
    Operation,
    Outcome,
    Status,
    Step,
    Task,
    advance,
    begin,
    cancel,
    check_deadlines,
    join,
    stay,
)
from rlmix.scaling.policy import FleetLimits
from rlmix.scaling.requests import (
    Candidate,
    PoolSize,
    check_targets,
    choose_removed,
    free_indices,
    grows_first,
)

LOOK_S = 0.2
"""While an operation is under way; one request to the router each while sessions drain."""
IDLE_LOOK_S = 1.0
REMOVE_LIMIT_S = 30.0
"""For the polite end of a replica; its slot is gone either way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolFacts:
    """What does not change of a pool."""

    accelerator: str
    gpus: int
    """Of one replica."""
    usd_per_hour: float
    """Of one replica."""
    view: str


class Scaler:
    """Owned by the run. `request` and `cancel` answer at once; the work is done by `run`."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        router: RouterAdmin,
        pools: Mapping[str, PoolFacts],
        limits: Callable[[], FleetLimits],
        drain_s: Callable[[], float],
        keeps_view: bool,
        new_replica: Callable[[str, int], ReplicaSpec],
        state: ScaleState,
        save: Callable[[ScaleState], None],
        on_event: OnEvent,
        on_held: Callable[[Mapping[str, int]], None] = lambda held: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            limits, drain_s: asked at each request, since they may change while the run goes on.
            keeps_view: a session never changes its weight view (`router.view=strict`).
            new_replica: (pool, index) -> the spec of a replica; ConfigError where it cannot be had.
            save: keeps the state; called before anything is done about it.
            on_held: told how many replicas of each pool are paid for, whenever that may differ.
        """
        self._fleet = fleet
        self._router = router
        self._pools = dict(pools)
        self._limits = limits
        self._drain_s = drain_s
        self._keeps_view = keeps_view
        self._new_replica = new_replica
        self._state = state
        self._save = save
        self._on_event = on_event
        self._on_held = on_held
        self._clock = clock
        self._asking = asyncio.Lock()
        self._news = asyncio.Event()
        self._specs: dict[str, ReplicaSpec] = {}
        self._deferred: list[Task] = []
        self._doing: dict[str, asyncio.Task[None]] = {}
        self._grows_first = True
        self._told_waiting: set[str] = set()
        self._looking: asyncio.Task[None] | None = None
        self.changed_s = clock()
        """When a replica last came or went."""

    @property
    def state(self) -> ScaleState:
        return self._state

    def start(self) -> None:
        self._looking = asyncio.create_task(self._look_forever(), name="scaler")

    async def stop(self) -> None:
        """Leaves what is under way as it is: the next attempt continues it."""
        tasks = [task for task in (self._looking, *self._doing.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if running := self._state.running:
            self._on_event(
                "scale_left_open",
                "the pools end while it is under way; a resumed run continues it",
                **facts_of(running),
            )

    def raise_failure(self) -> None:
        """What ended the looking task, if a bug did."""
        task = self._looking
        if task is not None and task.done() and not task.cancelled() and (e := task.exception()):
            raise e

    def sizes(self) -> dict[str, PoolSize]:
        """Every pool as a request finds it."""
        statuses = self._fleet.status()
        return {
            name: PoolSize(
                accelerator=facts.accelerator,
                gpus=facts.gpus,
                usd_per_hour=facts.usd_per_hour,
                replicas=sum(counts(s) for s in statuses if s.pool == name),
                draining=sum(s.is_leaving for s in statuses if s.pool == name),
                is_held=any(s.is_held for s in statuses if s.pool == name),
            )
            for name, facts in self._pools.items()
        }

    def targets(self) -> dict[str, int]:
        """Pool -> replicas that it should have when all is done."""
        now = {name: size.replicas for name, size in self.sizes().items()}
        running = self._state.running
        if running is not None and running.status is Status.RUNNING:
            return now | dict(running.targets)
        return now

    def operation(self, operation_id: str) -> Operation:
        """Raises ConfigError where there is none of that id."""
        if operation_id not in self._state.operations:
            known = ", ".join(list(self._state.operations)[-5:]) or "none yet"
            raise ConfigError(f"no scale operation {operation_id!r}; the last ones are {known}")
        return self._state.operations[operation_id]

    async def request(
        self, targets: Mapping[str, int], *, operation_id: str, reason: str
    ) -> Operation:
        """Begin an operation, or find the one of that id.

        Raises:
            ConfigError: it must not be done, or another one is under way.
        """
        async with self._asking:
            known = self._state.operations
            if operation_id in known:
                return begin(
                    operation_id, targets, replicas_from={}, added={}, removed={},
                    drain_s=self._drain_s(), now_s=self._clock(), known=known,
                )[0]  # fmt: skip
            sizes = self.sizes()
            limits = self._limits()
            check_targets(targets, pools=sizes, limits=limits)
            added, removed = await self._choose(targets, sizes)
            operation, tasks = begin(
                operation_id,
                targets,
                replicas_from={pool: sizes[pool].replicas for pool in targets},
                added={name: spec.pool for name, spec in added.items()},
                removed=removed,
                drain_s=self._drain_s(),
                now_s=self._clock(),
                known=known,
            )
            self._specs = added
            self._grows_first = grows_first(targets, pools=sizes, limits=limits)
            self._begin(operation, tasks, reason)
            return operation

    async def move(
        self, names: Collection[str], *, operation_id: str, drain_s: float, reason: str
    ) -> Operation:
        """Drain replicas whose machine leaves, and let their slots find another one. Goes with the
        operation that is under way, or begins one of that id."""
        async with self._asking:
            moved = {s.name: s.pool for s in self._fleet.status() if s.name in names}
            if (busy := self._state.running) is not None:
                joined = join(busy, moved, drain_s=drain_s, now_s=self._clock())
                self._accept(busy, joined)
                return self._state.operations[busy.id]
            sizes = self.sizes()
            number = {pool: sizes[pool].replicas for pool in moved.values()}
            operation, tasks = begin(
                operation_id, number, replicas_from=number, added={}, removed={}, moved=moved,
                drain_s=drain_s, now_s=self._clock(), known=self._state.operations,
            )  # fmt: skip
            self._specs = {}
            self._begin(operation, tasks, reason)
            return operation

    def stay(self, names: Collection[str], *, reason: str) -> None:
        """Take `move` back for those that are still there."""
        if (busy := self._state.running) is not None:
            self._accept(busy, stay(busy, names, reason=reason, now_s=self._clock()))

    def keep_leaving(self, leaving: Mapping[str, str]) -> None:
        """Remember the machines that were told to leave, for the next attempt."""
        self._put(replace(self._state, leaving=dict(leaving)))

    def _begin(self, operation: Operation, tasks: tuple[Task, ...], reason: str) -> None:
        self._told_waiting = set()
        self._keep(operation)
        kind = "scale_done" if operation.status.is_final else "scale_started"
        self._on_event(kind, reason, **facts_of(operation))
        self._give(operation, tasks)

    def cancel(self, operation_id: str, *, reason: str) -> Operation:
        """Undo what an operation did, as far as it can be undone; one that is over stays as it is.

        Raises:
            ConfigError: there is none of that id.
        """
        operation = self.operation(operation_id)
        if operation.replicas and all(one.is_move for one in operation.replicas.values()):
            raise ConfigError(
                f"scale operation {operation_id}: its machine leaves whatever is asked of the "
                "pools; `rlmix scale pools --stay HOST` takes that back"
            )
        self._accept(operation, cancel(operation, reason=reason, now_s=self._clock()))
        return self._state.operations[operation_id]

    def change_settings(self, settings: Mapping[str, object]) -> None:
        """Keep values that were given to the run, for the next attempt."""
        self._put(replace(self._state, settings={**self._state.settings, **settings}))

    async def _choose(
        self, targets: Mapping[str, int], sizes: Mapping[str, PoolSize]
    ) -> tuple[dict[str, ReplicaSpec], dict[str, str]]:
        """Specs of the replicas to add by name, and names of those to remove with their pools."""
        statuses = self._fleet.status()
        added: dict[str, ReplicaSpec] = {}
        removed: dict[str, str] = {}
        shrinks = any(target < sizes[pool].replicas for pool, target in targets.items())
        sessions = await self._sessions() if shrinks else {}
        for pool, target in targets.items():
            change = target - sizes[pool].replicas
            names = [status.name for status in statuses]
            for index in free_indices(pool, names, max(change, 0)):
                spec = self._new_replica(pool, index)
                added[spec.name] = spec
            candidates = [
                Candidate(
                    name=status.name,
                    is_serving=status.is_routed,
                    sessions=(sessions or {}).get(status.name, Sessions()).open,
                    in_flight=(sessions or {}).get(status.name, Sessions()).in_flight,
                )
                for status in statuses
                if status.pool == pool and counts(status)
            ]
            removed |= dict.fromkeys(choose_removed(candidates, max(-change, 0)), pool)
        return added, removed

    async def _look_forever(self) -> None:
        while True:
            self._news.clear()
            await self._look()
            limit_s = IDLE_LOOK_S if self._state.running is None else LOOK_S
            try:
                async with asyncio.timeout(limit_s):
                    await self._news.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        statuses = {status.name: status for status in self._fleet.status()}
        self._on_held(held_replicas(statuses.values()))
        if self._state.running is None:
            await self._note_losses(statuses)
            return
        drains = any(one.step is Step.DRAINING for one in self._state.running.replicas.values())
        sessions = await self._sessions() if drains else {}
        for name in list(self._state.running.replicas):
            operation = self._state.running
            if operation is None:
                return
            waits = any(task.replica == name for task in self._deferred)
            if name in self._doing or waits:
                continue
            news = news_of(
                name, operation.replicas[name], statuses.get(name),
                sessions=None if sessions is None else sessions.get(name, Sessions()),
            )  # fmt: skip
            if news is not None:
                if news.outcome is Outcome.LOST:
                    await self._end(name, operation)
                self._accept(operation, advance(operation, news, now_s=self._clock()))
        operation = self._state.running
        if operation is not None:
            kept = self._stuck(operation, statuses)
            self._accept(operation, check_deadlines(operation, now_s=self._clock(), kept=kept))
            self._begin_deferred()

    def _stuck(self, operation: Operation, statuses: Mapping[str, ReplicaStatus]) -> frozenset[str]:
        """Draining replicas whose sessions would find no other replica of their weight view."""
        if not self._keeps_view:
            return frozenset()
        open_views = {
            self._pools[status.pool].view
            for status in statuses.values()
            if status.is_routed and not (status.is_leaving or status.is_held)
        }
        stuck = frozenset(
            name
            for name, one in operation.replicas.items()
            if one.step is Step.DRAINING and self._pools[one.pool].view not in open_views
        )
        for name in stuck - self._told_waiting:
            view = self._pools[operation.replicas[name].pool].view
            self._told_waiting.add(name)
            self._on_event(
                "scale_waits",
                f"no other replica serves the weight view {view}, which its sessions keep; they "
                "end where they are",
                operation=operation.id,
                replica=name,
            )
        return stuck

    async def _note_losses(self, statuses: Mapping[str, ReplicaStatus]) -> None:
        """A replica that was given up is a removal that nobody announced: a spot machine taken
        back. The last one stays, so that the run says why it ends."""
        lost = [s for s in statuses.values() if s.state is SlotState.RETIRED and s.has_served]
        alive = [s for s in statuses.values() if counts(s)]
        if not lost or not alive:
            return
        one = lost[0]
        before = self.sizes()[one.pool].replicas + 1
        operation, _ = begin(
            f"loss-{one.name}-{one.incarnation}-{len(self._state.operations)}",
            {one.pool: before - 1},
            replicas_from={one.pool: before},
            added={},
            removed={one.name: one.pool},
            drain_s=self._drain_s(),
            now_s=self._clock(),
            known={},
        )
        happened = Happened(
            replica=one.name, step=Step.CLOSING, outcome=Outcome.LOST, reason=one.reason
        )
        operation, _ = advance(operation, happened, now_s=self._clock())
        self._keep(operation)
        await self._fleet.remove(one.name)
        self._on_event("scale_done", f"lost without notice: {one.reason}", **facts_of(operation))

    async def _sessions(self) -> dict[str, Sessions] | None:
        """Replica -> its sessions; None while the router cannot be asked."""
        try:
            records = await self._router.replicas()
        except EngineError:
            return None
        return {
            record["name"]: Sessions(open=record["sessions"], in_flight=record["in_flight"])
            for record in records
        }

    def _accept(self, before: Operation, result: tuple[Operation, tuple[Task, ...]]) -> None:
        """Write down what changed, then do what comes of it."""
        operation, tasks = result
        if operation == before:
            return
        self._keep(operation)
        for name, one in operation.replicas.items():
            if name not in before.replicas or one.step is not before.replicas[name].step:
                self._on_event(
                    "scale_step",
                    one.reason or f"{name} is {one.step.value.replace('_', ' ')}",
                    operation=operation.id,
                    replica=name,
                    pool=one.pool,
                    step=one.step.value,
                )
        if operation.status is not before.status:
            reason = operation.reason or "every replica has arrived"
            self._on_event(f"scale_{operation.status.value}", reason, **facts_of(operation))
        self._give(operation, tasks)

    def _give(self, operation: Operation, tasks: tuple[Task, ...]) -> None:
        self._deferred += tasks
        self._begin_deferred()
        self._news.set()

    def _begin_deferred(self) -> None:
        operation = self._state.running
        waiting, self._deferred = self._deferred, []
        for task in waiting:
            one = None if operation is None else operation.replicas.get(task.replica)
            if one is None or one.step is not task.step:
                continue  # It was taken back meanwhile.
            assert operation is not None
            if self._must_wait(operation, task) or task.replica in self._doing:
                self._deferred.append(task)
                continue
            doing = asyncio.create_task(self._do(task), name=f"scale {task.replica}")
            self._doing[task.replica] = doing
            doing.add_done_callback(partial(self._done, task.replica))

    def _must_wait(self, operation: Operation, task: Task) -> bool:
        if operation.status is not Status.RUNNING or operation.replicas[task.replica].is_move:
            return False
        every = operation.replicas.values()
        under_way = [one for one in every if not (one.step.is_final or one.is_move)]
        if self._grows_first:
            return task.step is Step.CLOSING and any(one.is_growth for one in under_way)
        return task.step is Step.BOOTING and any(not one.is_growth for one in under_way)

    async def _do(self, task: Task) -> None:
        """One step; the ones that only take time are seen by `_look`."""
        name, failure = task.replica, ""
        try:
            match task.step:
                case Step.BOOTING:
                    self._fleet.add(self._specs[name])
                case Step.CLOSING:
                    await self._fleet.close(name)
                case Step.REOPENING:
                    await self._fleet.reopen(name)
                case Step.REHOMING:
                    await self._fleet.empty(name)
                case Step.STOPPING:
                    async with asyncio.timeout(REMOVE_LIMIT_S):
                        await self._end(name, self._state.running)
        except (LaunchError, EngineError, TimeoutError) as error:
            failure = str(error) or f"{task.step.value} took more than {REMOVE_LIMIT_S:g} s"
        self.changed_s = self._clock()
        operation = self._state.running
        is_answered = task.step in (Step.CLOSING, Step.REOPENING, Step.REHOMING, Step.STOPPING)
        if operation is None or not (is_answered or failure):
            return
        outcome = Outcome.FAILED if failure else Outcome.DONE
        happened = Happened(replica=name, step=task.step, outcome=outcome, reason=failure)
        self._accept(operation, advance(operation, happened, now_s=self._clock()))

    async def _end(self, name: str, operation: Operation | None) -> None:
        """Its slot goes, or is filled again where only the machine had to go."""
        if operation is not None and operation.replicas[name].is_move:
            await self._fleet.vacate(name, "its machine leaves")
        else:
            await self._fleet.remove(name)

    def _done(self, name: str, task: "asyncio.Task[None]") -> None:
        self._doing.pop(name, None)
        if not task.cancelled() and (error := task.exception()) and self._looking is not None:
            # A bug: the looking task ends with it, and the run is told.
            self._looking.cancel()
            self._looking = asyncio.get_running_loop().create_task(_raise(error))
        self._begin_deferred()
        self._news.set()

    def _keep(self, operation: Operation) -> None:
        self._put(self._state.with_operation(operation))

    def _put(self, state: ScaleState) -> None:
        self._state = state
        self._save(state)


async def _raise(error: BaseException) -> None:
    raise error
