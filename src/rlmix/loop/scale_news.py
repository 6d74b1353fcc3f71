"""What the state of a slot and of the router means for a step of a scale operation. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rlmix.pools.spec import BringUp, ReplicaStatus, SlotState
from rlmix.scaling.operation import GROWING, Happened, Operation, Outcome, ReplicaProgress, Step

REACHED = {
    BringUp.BOOTING: Step.BOOTING,
    BringUp.CATCHING_UP: Step.CATCHING_UP,
    BringUp.VERIFYING: Step.VERIFYING,
    BringUp.ROTATING_IN: Step.ROTATING_IN,
}
ENDED = (SlotState.DEAD, SlotState.QUARANTINED, SlotState.RETIRED, SlotState.STOPPED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sessions:
    """Of one replica, as the router counts them."""

    open: int = 0
    in_flight: int = 0


def news_of(
    name: str,
    progress: ReplicaProgress,
    status: ReplicaStatus | None,
    *,
    sessions: Sessions | None,
) -> Happened | None:
    """What to tell the operation of a replica now; None: nothing has changed.

    Args:
        status: of its slot; None: there is no slot of that name.
        sessions: None while the router cannot be asked.
    """
    if progress.step in GROWING:
        return _of_growth(name, progress.step, status)
    if progress.step not in (Step.CLOSING, Step.DRAINING):
        return None
    if status is None or (status.is_leaving and status.state in ENDED):
        reason = "its slot is gone" if status is None else status.reason
        return Happened(replica=name, step=progress.step, outcome=Outcome.LOST, reason=reason)
    if progress.step is Step.DRAINING and sessions == Sessions():
        return Happened(replica=name, step=Step.DRAINING, outcome=Outcome.DONE)
    return None


def _of_growth(name: str, step: Step, status: ReplicaStatus | None) -> Happened | None:
    """A start that failed is tried again by its slot; one that the slot gives up has failed."""
    if status is None:
        return None
    if status.state.is_final or status.is_held:
        return Happened(replica=name, step=step, outcome=Outcome.FAILED, reason=status.reason)
    if status.state in ENDED or status.state is SlotState.RESTARTING:
        return None
    is_past = status.is_routed or GROWING.index(REACHED[status.bring_up]) > GROWING.index(step)
    return Happened(replica=name, step=step, outcome=Outcome.DONE) if is_past else None


def counts(status: ReplicaStatus) -> bool:
    """It is one of the replicas that its pool has."""
    return not (status.state.is_final or status.is_leaving)


def held_replicas(statuses: Iterable[ReplicaStatus]) -> dict[str, int]:
    """Pool -> replicas that are paid for: all that were ordered and are not given back."""
    return dict(Counter(s.pool for s in statuses if not s.state.is_final))


def facts_of(operation: Operation) -> dict[str, Any]:
    """For an event, whose reason is told apart."""
    facts = operation.to_event()
    del facts["reason"]
    return facts
