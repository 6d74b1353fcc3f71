"""The scaling policy at work in a simulation: observes, decides, and carries operations out.

The part that a run's loop plays: policy (`policy.decide`) and operations (`operation`) are the ones
of a run, tasks of an operation take simulated time.
"""

from collections import deque
from typing import TYPE_CHECKING

from rlmix.router.states import ReplicaState
from rlmix.scaling.demand import TrainerNeed, trajectories_per_s
from rlmix.scaling.operation import (
    Happened,
    Operation,
    Outcome,
    Step,
    Task,
    advance,
    begin,
    check_deadlines,
)
from rlmix.scaling.policy import Observation, PolicyRules, PolicyState, PoolSeen, decide

if TYPE_CHECKING:
    from rlmix.scaling.simulated_replicas import Pool, Replica
    from rlmix.scaling.simulator import Simulation

LOOKED_AT = 32
"""Replicas of a pool whose load stands for all; the router keeps them alike."""
COLD_START_SHARES = {Step.BOOTING: 0.7, Step.CATCHING_UP: 0.2, Step.VERIFYING: 0.1}
"""Of a cold start: process and graphs, newest weights, canaries."""
SESSIONS_TO_TRUST = 2.0
"""Rates are believed after so many sessions' time without a change of the fleet."""


class Scaler:
    """Feeds the policy and acts on its answers; one operation at a time."""

    def __init__(self, simulation: "Simulation", *, rules: PolicyRules) -> None:
        self._world = simulation
        self._rules = rules
        self._state = PolicyState()
        self._operation: Operation | None = None
        self._replicas: dict[str, Replica] = {}
        self._seen: deque[tuple[float, int, float]] = deque()
        self.operations = 0

    def tick(self) -> None:
        world = self._world
        ledger = world.ledger
        finished = ledger.trained + ledger.stale + world.trainer.buffered
        self._seen.append((world.now_s, finished, world.trainer.waited_until(world.now_s)))
        if self._operation is not None:
            self._acted(check_deadlines(self._operation, now_s=world.now_s))
        if self._operation is not None:
            return
        decision = decide(
            self._observation(), state=self._state, limits=world.scenario.limits, rules=self._rules
        )
        self._state = decision.state
        if decision.changes:
            self._begin({c.pool: c.replicas_to for c in decision.changes}, decision.blocked_by)

    def drained(self, name: str) -> None:
        """The last session of a replica has ended."""
        one = None if self._operation is None else self._operation.replicas.get(name)
        if one is not None and one.step is Step.DRAINING:
            self._done(name, Step.DRAINING)

    def lost(self, name: str) -> bool:
        """A replica died.

        Returns:
            True when it was part of the operation, which answers for it.
        """
        operation = self._operation
        if operation is None or name not in operation.replicas:
            return False
        step = operation.replicas[name].step
        if step.is_final:
            return False
        self._tell(name, step, Outcome.LOST, "lost without notice")
        return True

    def _observation(self) -> Observation:
        world, scenario = self._world, self._world.scenario
        ledger = world.ledger
        wasted = ledger.stale + ledger.lost
        need = TrainerNeed(
            sessions_per_step=scenario.sessions_per_step,
            step_s=world.step_s,
            max_staleness=scenario.max_staleness,
            session_s=world.group_s,
            waste_frac=min(0.5, wasted / max(1, ledger.trained + wasted)),
        )
        trusted_s = SESSIONS_TO_TRUST * world.group_s
        while len(self._seen) > 2 and self._seen[1][0] <= world.now_s - trusted_s:
            self._seen.popleft()
        (from_s, finished, waited_s), (_, all_finished, all_waited_s) = (
            self._seen[0],
            self._seen[-1],
        )
        seconds = max(world.now_s - from_s, scenario.every_s)
        is_settled = world.now_s - world.changed_s >= trusted_s
        return Observation(
            now_s=world.now_s,
            pools=tuple(self._pool(pool) for pool in world.pools.values()),
            needed_per_s=trajectories_per_s(need),
            finished_per_s=(all_finished - finished) / seconds if is_settled else None,
            trainer_wait_frac=min(1.0, (all_waited_s - waited_s) / seconds),
        )

    def _pool(self, pool: "Pool") -> PoolSeen:
        ready = [one for _, one in zip(range(LOOKED_AT), pool.ready(), strict=False)]
        loads = [one.served for one in ready]
        running = sum(load.running for load in loads)
        others = (one for one in self._world.pools.values() if one.model.view == pool.model.view)
        is_alone = not any(
            one is not pool and one.count(ReplicaState.READY) for one in others
        ) and any(one.num_sessions for one in pool.replicas.values())
        count = max(len(loads), 1)
        return PoolSeen(
            name=pool.name,
            accelerator=pool.model.accelerator,
            gpus=pool.model.gpus,
            usd_per_hour=pool.model.usd_per_hour,
            per_s=pool.table.best_turns_per_s / self._world.scenario.shape.turns,
            ready=pool.count(ReplicaState.READY),
            starting=pool.count(ReplicaState.STARTING),
            draining=pool.count(ReplicaState.DRAINING),
            cold_start_s=pool.model.cold_start_s,
            in_flight_floor=1 if is_alone else 0,
            kv_used_frac=sum(load.kv_used_frac for load in loads) / count,
            queued_frac=sum(load.queued for load in loads) / running if running else 0.0,
            reprefill_frac=sum(load.reprefill_frac for load in loads) / count,
        )

    def _begin(self, targets: dict[str, int], blocked_by: tuple[str, ...]) -> None:
        world = self._world
        added: dict[str, str] = {}
        removed: dict[str, str] = {}
        before: dict[str, int] = {}
        for name, target in targets.items():
            pool = world.pools[name]
            before[name] = pool.count(ReplicaState.READY) + pool.count(ReplicaState.STARTING)
            for _ in range(target - before[name]):
                replica = world.start_replica(name)
                added[replica.name] = name
                self._replicas[replica.name] = replica
            # Those with the fewest sessions go: they drain soonest.
            idle = sorted(pool.ready(), key=lambda one: (one.num_sessions, one.name))
            for replica in idle[: max(0, before[name] - target)]:
                removed[replica.name] = name
                self._replicas[replica.name] = replica
        self.operations += 1
        operation, tasks = begin(
            f"auto-{self.operations}",
            {name: before[name] + sum(p == name for p in added.values())
             - sum(p == name for p in removed.values()) for name in targets},
            replicas_from=before,
            added=added,
            removed=removed,
            drain_s=world.scenario.drain_s,
            now_s=world.now_s,
            known={},
        )  # fmt: skip
        world.say("scale", **operation.to_event(), blocked_by=list(blocked_by))
        self._acted((operation, tasks))

    def _acted(self, result: tuple[Operation, tuple[Task, ...]]) -> None:
        operation, tasks = result
        self._operation = operation
        if operation.status.is_final:
            self._world.say("scale", **operation.to_event())
            self._operation = None
        for task in tasks:
            self._do(task)

    def _do(self, task: Task) -> None:
        world, replica = self._world, self._replicas[task.replica]
        takes_s = 0.0
        match task.step:
            case Step.BOOTING | Step.CATCHING_UP | Step.VERIFYING:
                takes_s = COLD_START_SHARES[task.step] * replica.pool.model.cold_start_s
            case Step.ROTATING_IN | Step.REOPENING:
                world.open_replica(replica)
            case Step.CLOSING:
                replica.pool.close(replica)
            case Step.DRAINING:
                if replica.num_sessions:
                    return
            case Step.REHOMING:
                world.rehome(replica)
            case Step.STOPPING:
                world.drop_replica(replica)
        world.after(takes_s, lambda: self._done(task.replica, task.step))

    def _done(self, name: str, step: Step) -> None:
        self._tell(name, step, Outcome.DONE, "")

    def _tell(self, name: str, step: Step, outcome: Outcome, reason: str) -> None:
        if self._operation is not None:
            happened = Happened(replica=name, step=step, outcome=outcome, reason=reason)
            self._acted(advance(self._operation, happened, now_s=self._world.now_s))
