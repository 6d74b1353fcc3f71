"""What a run remembers of its scale operations: `scaling.json`, so that the next attempt goes on.

Invariant: the file says at any time how many replicas each pool should have, and which operation is
under way; it is written before anything is done, so a controller that died has left no replica that
the next one does not account for (its processes ended with it).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson

from rlmix.core.errors import DataError
from rlmix.observe.jsonl import write_atomically
from rlmix.scaling.operation import Operation, ReplicaProgress, Status, Step

STATE_FILE = "scaling.json"
KEPT_OPERATIONS = 200
"""The oldest that are over leave the file; `events.jsonl` has them all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleState:
    """Pools as they should be, operations by id, and settings that were changed meanwhile."""

    configured: Mapping[str, int] = field(default_factory=dict)
    """Pool -> replicas of the configuration that the targets started from."""
    targets: Mapping[str, int] = field(default_factory=dict)
    """Pool -> replicas that it should have once no operation is under way."""
    operations: Mapping[str, Operation] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Key of the configuration -> value that it was given while the run went on."""
    leaving: Mapping[str, str] = field(default_factory=dict)
    """Id of a machine that was told to leave -> the operation that drained it."""

    @property
    def running(self) -> Operation | None:
        return next((one for one in self.operations.values() if not one.status.is_final), None)

    def with_operation(self, operation: Operation) -> "ScaleState":
        """With this operation as it is now; finished ones move the targets."""
        operations = {**self.operations, operation.id: operation}
        spare = len(operations) - KEPT_OPERATIONS
        for one in [one for one in operations.values() if one.status.is_final][: max(0, spare)]:
            del operations[one.id]
        targets = dict(self.targets)
        if operation.status is Status.DONE:
            targets |= operation.targets
        elif operation.status.is_final:
            for pool in operation.targets:
                kept = operation.replicas_from[pool] - _lost(operation, pool)
                targets[pool] = max(kept, 0)
        return replace(self, operations=operations, targets=targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """How an attempt starts after one that ended."""

    state: ScaleState
    replicas: Mapping[str, int]
    """Pool -> replicas to start with."""
    again: Mapping[str, int]
    """Targets of the unfinished operation that is begun again once these serve; empty: none."""
    operation_id: str = ""
    """Of the unfinished one, continued or rolled back."""
    reason: str = ""
    unfinished: Operation | None = None
    """The one that is begun again."""

    def to_keep(self) -> ScaleState:
        """What the file says until it is begun again: a controller that dies before that has not
        forgotten it."""
        if self.unfinished is None:
            return self.state
        operations = {**self.state.operations, self.unfinished.id: self.unfinished}
        return replace(self.state, operations=operations)


def restart(state: ScaleState, configured: Mapping[str, int]) -> Restart:
    """Where a new attempt takes over.

    Every replica ended with the controller, so removals are over, and what had been added boots
    like all others if its operation was finished. An operation that was under way is continued:
    its removals hold from the start, its additions are begun again under the same id. One that was
    being rolled back is rolled back.

    Args:
        configured: pool -> replicas of this attempt's configuration; a pool whose number differs
            from the one that the former attempt was given was changed by hand, which wins.
    """
    by_hand = {
        pool for pool, number in configured.items() if state.configured.get(pool, number) != number
    }
    held = {
        pool: number if pool in by_hand else state.targets.get(pool, number)
        for pool, number in configured.items()
    }
    base = replace(state, configured=dict(configured), targets=dict(held))
    operation = state.running
    if operation is None:
        return Restart(state=base, replicas=held, again={})
    operations = {name: one for name, one in state.operations.items() if name != operation.id}
    if operation.status is Status.ROLLING_BACK:
        status = Status.CANCELLED if operation.is_cancelled else Status.FAILED
        ended = replace(operation, status=status, replicas={})
        return Restart(
            state=replace(base, operations={**operations, operation.id: ended}),
            replicas=held,
            again={},
            operation_id=operation.id,
            reason="the controller ended while it was rolled back, and so did every new replica",
        )
    asked = {
        pool: number
        for pool, number in operation.targets.items()
        if pool in held and pool not in by_hand
    }
    if not asked:
        reason = "the controller ended while it was under way; its pools have other numbers now"
        ended = replace(
            operation, status=Status.CANCELLED, is_cancelled=True, replicas={}, reason=reason
        )
        return Restart(
            state=replace(base, operations={**operations, operation.id: ended}),
            replicas=held,
            again={},
            operation_id=operation.id,
            reason=reason,
        )
    start = held | {pool: min(held[pool], number) for pool, number in asked.items()}
    if not any(start.values()):
        start = held  # Somebody must serve until the additions do.
    return Restart(
        state=replace(base, operations=operations, targets=dict(start)),
        replicas=start,
        again=asked,
        operation_id=operation.id,
        reason="the controller ended while it was under way; it is continued",
        unfinished=replace(operation, targets=asked),
    )


def read_state(folder: Path) -> ScaleState:
    """The state of a run; an empty one where it has never scaled.

    Raises:
        DataError: the file is not what `write_state` writes.
    """
    path = folder / STATE_FILE
    try:
        document = orjson.loads(path.read_bytes())
        operations = {one["id"]: operation_from_dict(one) for one in document["operations"]}
        return ScaleState(
            configured=document["configured"],
            targets=document["targets"],
            operations=operations,
            settings=document["settings"],
            leaving=document.get("leaving", {}),
        )
    except FileNotFoundError:
        return ScaleState()
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: not a record of scale operations ({error!r}); delete it to start with the "
            "pools of the configuration"
        ) from None


def write_state(folder: Path, state: ScaleState) -> None:
    document = {
        "configured": dict(state.configured),
        "targets": dict(state.targets),
        "operations": [operation_to_dict(one) for one in state.operations.values()],
        "settings": dict(state.settings),
        "leaving": dict(state.leaving),
    }
    write_atomically(folder / STATE_FILE, orjson.dumps(document, option=orjson.OPT_INDENT_2))


def operation_to_dict(operation: Operation) -> dict[str, Any]:
    return {**asdict(operation), "progress": round(operation.progress_frac, 3)}


def operation_from_dict(document: Mapping[str, Any]) -> Operation:
    fields = {key: value for key, value in document.items() if key != "progress"}
    replicas = {
        name: ReplicaProgress(**{**one, "step": Step(one["step"])})
        for name, one in fields["replicas"].items()
    }
    return Operation(**{**fields, "status": Status(fields["status"]), "replicas": replicas})


def _lost(operation: Operation, pool: str) -> int:
    """Replicas that were there before and are gone although it was undone."""
    return sum(
        one.pool == pool and not (one.is_growth or one.is_move) and one.step is Step.GONE
        for one in operation.replicas.values()
    )
