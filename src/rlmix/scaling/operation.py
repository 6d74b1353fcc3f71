"""A scale operation as a pure state machine: a transaction with an id, progress, cancel, rollback.

A loop elsewhere starts and stops replicas. It tells this what happened (`Happened`), and does what
comes back (`Task`); every step is sent once. A replica that is added goes boot, catch up, verify,
rotate in; one that is removed goes close, drain, re-home, stop. One that moves, because its machine
leaves, goes like one that is removed, and its slot is filled again elsewhere: the pool's number
stays, and no rollback brings it back. Invariants: nothing is rotated in that was not verified;
nothing is stopped before its sessions are drained or re-homed, except where it is lost already; an
operation that failed or was cancelled ends with the replicas that it began with, as far as they
still live; the same id with the same targets is the same operation.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from rlmix.core.errors import ConfigError


class Step(StrEnum):
    """Where one replica of the operation is."""

    BOOTING = "booting"
    CATCHING_UP = "catching_up"
    VERIFYING = "verifying"
    ROTATING_IN = "rotating_in"
    SERVING = "serving"
    CLOSING = "closing"
    DRAINING = "draining"
    REHOMING = "rehoming"
    STOPPING = "stopping"
    REOPENING = "reopening"
    GONE = "gone"

    @property
    def is_final(self) -> bool:
        return self in (Step.SERVING, Step.GONE)


class Status(StrEnum):
    RUNNING = "running"
    ROLLING_BACK = "rolling_back"
    """It was cancelled or failed, and undoes what it did."""
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (Status.DONE, Status.CANCELLED, Status.FAILED)


class Outcome(StrEnum):
    """What a loop tells of a replica."""

    DONE = "done"
    """The task that was given last is done."""
    FAILED = "failed"
    """It cannot be done; the replica is to be stopped."""
    LOST = "lost"
    """The replica is gone without notice: a spot machine taken back, a death."""


NEXT = {
    Step.BOOTING: Step.CATCHING_UP,
    Step.CATCHING_UP: Step.VERIFYING,
    Step.VERIFYING: Step.ROTATING_IN,
    Step.ROTATING_IN: Step.SERVING,
    Step.CLOSING: Step.DRAINING,
    Step.DRAINING: Step.STOPPING,
    Step.REHOMING: Step.STOPPING,
    Step.STOPPING: Step.GONE,
    Step.REOPENING: Step.SERVING,
}
"""What follows when a step is done. Draining that meets its deadline goes to re-homing instead."""

GROWING = (Step.BOOTING, Step.CATCHING_UP, Step.VERIFYING, Step.ROTATING_IN)
STILL_WHOLE = (Step.CLOSING, Step.DRAINING, Step.REHOMING)
"""Steps of a removal that can be undone: the engine still runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Happened:
    replica: str
    step: Step
    """Which step it is about; news of a step that is over is ignored."""
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What the loop has to do for a replica now: the step of that name."""

    replica: str
    pool: str
    step: Step


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaProgress:
    pool: str
    step: Step
    is_growth: bool
    """The operation added it; else it removes it."""
    since_s: float
    """When the step began."""
    reason: str = ""
    """Of a failure or loss."""
    is_move: bool = False
    """It is drained and its slot is filled again."""
    drain_s: float | None = None
    """None: the operation's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    id: str
    targets: Mapping[str, int]
    """Pool -> replicas asked for."""
    replicas_from: Mapping[str, int]
    """Of the same pools, before."""
    began_s: float
    drain_s: float
    """After so long, sessions that still run on a closing replica are re-homed."""
    status: Status
    is_cancelled: bool
    replicas: Mapping[str, ReplicaProgress]
    reason: str = ""
    """Why it failed or was cancelled."""

    @property
    def progress_frac(self) -> float:
        if not self.replicas:
            return 1.0
        done = sum(one.step.is_final for one in self.replicas.values())
        return done / len(self.replicas)

    def to_event(self) -> dict[str, Any]:
        """For `events.jsonl`."""
        return {
            "operation": self.id,
            "status": self.status.value,
            "targets": dict(self.targets),
            "from": dict(self.replicas_from),
            "progress": round(self.progress_frac, 3),
            "replicas": {name: one.step.value for name, one in self.replicas.items()},
            "reason": self.reason,
        }


def begin(
    operation_id: str,
    targets: Mapping[str, int],
    *,
    replicas_from: Mapping[str, int],
    added: Mapping[str, str],
    removed: Mapping[str, str],
    moved: Mapping[str, str] | None = None,
    drain_s: float,
    now_s: float,
    known: Mapping[str, Operation],
) -> tuple[Operation, tuple[Task, ...]]:
    """A new operation and its first tasks, or the known one of that id without tasks.

    Args:
        added, removed: replica -> pool, chosen by the caller: free slots to boot; replicas to
            drain, best those with the fewest sessions.
        moved: replica -> pool, of those whose machine leaves.
        known: operations by id, finished ones too.
    Raises:
        ConfigError: the id belongs to another request, another operation is under way, or the
            chosen replicas do not lead from `replicas_from` to `targets`.
    """
    if (same := known.get(operation_id)) is not None:
        if dict(same.targets) == dict(targets):
            return same, ()
        raise ConfigError(
            f"scale operation {operation_id}: its targets are {_text(same.targets)}, got "
            f"{_text(targets)}; an id stands for one request, use a new one"
        )
    if busy := next((one for one in known.values() if not one.status.is_final), None):
        raise ConfigError(
            f"scale operation {operation_id}: {busy.id} is under way "
            f"({busy.progress_frac:.0%} done); wait for it or cancel it"
        )
    for pool, target in targets.items():
        change = sum(p == pool for p in added.values()) - sum(p == pool for p in removed.values())
        if target < 0 or replicas_from.get(pool, 0) + change != target:
            raise ConfigError(
                f"scale operation {operation_id}: pool {pool} has {replicas_from.get(pool, 0)} "
                f"replicas, and {change:+d} do not make {target}"
            )
    replicas = {
        name: ReplicaProgress(pool=pool, step=step, is_growth=is_growth, since_s=now_s)
        for chosen, step, is_growth in (
            (added, Step.BOOTING, True),
            (removed, Step.CLOSING, False),
        )
        for name, pool in chosen.items()
    } | _moves(moved or {}, drain_s=drain_s, now_s=now_s)
    operation = Operation(
        id=operation_id,
        targets=dict(targets),
        replicas_from={pool: replicas_from.get(pool, 0) for pool in targets},
        began_s=now_s,
        drain_s=drain_s,
        status=Status.RUNNING if replicas else Status.DONE,
        is_cancelled=False,
        replicas=replicas,
    )
    return operation, tuple(
        Task(replica=name, pool=one.pool, step=one.step) for name, one in replicas.items()
    )


def join(
    operation: Operation, moved: Mapping[str, str], *, drain_s: float, now_s: float
) -> tuple[Operation, tuple[Task, ...]]:
    """Replicas whose machine leaves, added to what is under way: a machine does not wait. Those
    that the operation still works on are left to it."""
    free = {
        name: pool
        for name, pool in moved.items()
        if name not in operation.replicas or operation.replicas[name].step.is_final
    }
    moves = _moves(free, drain_s=drain_s, now_s=now_s)
    operation = replace(operation, replicas={**operation.replicas, **moves})
    return operation, tuple(
        Task(replica=name, pool=one.pool, step=one.step) for name, one in moves.items()
    )


def stay(
    operation: Operation, names: Collection[str], *, reason: str, now_s: float
) -> tuple[Operation, tuple[Task, ...]]:
    """Moves that are not over are taken back: their machine does not leave after all."""
    tasks = []
    for name in names:
        one = operation.replicas.get(name)
        if one is not None and one.is_move and one.step in STILL_WHOLE:
            operation = _put(operation, name, Step.REOPENING, now_s, reason)
            tasks.append(Task(replica=name, pool=one.pool, step=Step.REOPENING))
    return operation, tuple(tasks)


def _moves(moved: Mapping[str, str], *, drain_s: float, now_s: float) -> dict[str, ReplicaProgress]:
    return {
        name: ReplicaProgress(
            pool=pool,
            step=Step.CLOSING,
            is_growth=False,
            since_s=now_s,
            is_move=True,
            drain_s=drain_s,
        )
        for name, pool in moved.items()
    }


def advance(
    operation: Operation, happened: Happened, *, now_s: float
) -> tuple[Operation, tuple[Task, ...]]:
    """The operation after one piece of news, and what to do now."""
    one = operation.replicas.get(happened.replica)
    if one is None or one.step.is_final or operation.status.is_final:
        return operation, ()
    if happened.outcome is Outcome.LOST:
        # It is gone whatever was asked of it. A removal has what it wanted; a growth has failed.
        gone = _put(operation, happened.replica, Step.GONE, now_s, happened.reason)
        return _fail(gone, happened.reason, now_s) if one.is_growth else _settled(gone, ())
    if happened.step is not one.step:
        return operation, ()
    if happened.outcome is Outcome.FAILED:
        if one.step is Step.STOPPING:
            # What does not stop is not ours to keep: the launcher reaps it, and it serves nobody.
            gone = _put(operation, happened.replica, Step.GONE, now_s, happened.reason)
            return _settled(gone, ())
        stopped = _put(operation, happened.replica, Step.STOPPING, now_s, happened.reason)
        task = Task(replica=happened.replica, pool=one.pool, step=Step.STOPPING)
        failed, tasks = _fail(stopped, happened.reason, now_s)
        return failed, (task, *tasks)
    return _step(operation, happened.replica, NEXT[one.step], now_s)


def check_deadlines(
    operation: Operation, *, now_s: float, kept: Collection[str] = ()
) -> tuple[Operation, tuple[Task, ...]]:
    """Sessions that still run on a closing replica after `drain_s` are re-homed.

    Args:
        kept: replicas whose sessions have nowhere to go; they drain until these end.
    """
    tasks: list[Task] = []
    for name, one in list(operation.replicas.items()):
        drain_s = operation.drain_s if one.drain_s is None else one.drain_s
        is_due = now_s - one.since_s >= drain_s and name not in kept
        if one.step is Step.DRAINING and is_due:
            operation, more = _step(operation, name, Step.REHOMING, now_s)
            tasks += more
    return operation, tuple(tasks)


def cancel(
    operation: Operation, *, reason: str, now_s: float
) -> tuple[Operation, tuple[Task, ...]]:
    """Undo what can be undone: replicas that do not serve yet are stopped, closing ones opened
    again, finished steps stay. Cancelling what is over changes nothing."""
    if operation.status is not Status.RUNNING:
        return operation, ()
    return _roll_back(replace(operation, is_cancelled=True), reason, now_s)


def _fail(operation: Operation, reason: str, now_s: float) -> tuple[Operation, tuple[Task, ...]]:
    if operation.status is Status.RUNNING:
        return _roll_back(operation, reason, now_s)
    return _settled(operation, ())


def _roll_back(
    operation: Operation, reason: str, now_s: float
) -> tuple[Operation, tuple[Task, ...]]:
    operation = replace(operation, status=Status.ROLLING_BACK, reason=reason)
    tasks: list[Task] = []
    for name, one in list(operation.replicas.items()):
        back: Step | None = None
        if one.is_growth and one.step in GROWING:
            back = Step.STOPPING
        elif one.is_growth and one.step is Step.SERVING:
            # It serves by now: it goes as every serving replica goes, sessions first.
            back = Step.CLOSING
        elif not (one.is_growth or one.is_move) and one.step in STILL_WHOLE:
            back = Step.REOPENING
        if back is not None:
            operation = _put(operation, name, back, now_s, one.reason)
            tasks.append(Task(replica=name, pool=one.pool, step=back))
    return _settled(operation, tuple(tasks))


def _step(
    operation: Operation, name: str, step: Step, now_s: float
) -> tuple[Operation, tuple[Task, ...]]:
    operation = _put(operation, name, step, now_s, "")
    pool = operation.replicas[name].pool
    tasks = () if step.is_final else (Task(replica=name, pool=pool, step=step),)
    return _settled(operation, tasks)


def _put(operation: Operation, name: str, step: Step, now_s: float, reason: str) -> Operation:
    one = operation.replicas[name]
    moved = replace(one, step=step, since_s=now_s, reason=reason or one.reason)
    return replace(operation, replicas={**operation.replicas, name: moved})


def _settled(operation: Operation, tasks: tuple[Task, ...]) -> tuple[Operation, tuple[Task, ...]]:
    """The final status once every replica has arrived."""
    if all(one.step.is_final for one in operation.replicas.values()):
        status = Status.DONE
        if operation.status is Status.ROLLING_BACK:
            status = Status.CANCELLED if operation.is_cancelled else Status.FAILED
        operation = replace(operation, status=status)
    return operation, tasks


def _text(targets: Mapping[str, int]) -> str:
    return " ".join(f"{pool}={number}" for pool, number in sorted(targets.items()))
