"""What the fleet says about a replica, and what the router has seen of it. Pure state machines.

Invariant: a replica that died becomes healthy only by way of restarting and stale, so that nothing
is sent to one that came back before it was seen to be ready and as new as the others.
"""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum


class ReplicaState(StrEnum):
    """What the fleet (or, stand-alone, the replica's own `/ready`) says about a replica."""

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


class Health(StrEnum):
    """What the router has seen of a replica."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """Several faults lately: it keeps its sessions, and gets new ones only when nobody else can."""
    DEAD = "dead"
    RESTARTING = "restarting"
    """It answers again and is not ready yet."""
    STALE = "stale"
    """Ready, with older weights than the others of its view: as SUSPECT."""
    RETIRED = "retired"
    """Died too often; only its operator brings it back."""

    @property
    def is_alive(self) -> bool:
        return self in (Health.HEALTHY, Health.SUSPECT, Health.STALE)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthRules:
    """When faults become a state."""

    window_s: float = 30.0
    """Faults older than this are forgotten."""
    suspect_faults: int = 3
    dead_faults: int = 10
    """That many in the window without one good answer among them are a death."""
    max_restarts: int = 5
    """Deaths within `restart_window_s` that are forgiven; one more retires the replica."""
    restart_window_s: float = 600.0


class HealthRecord:
    """One replica's health. Times come from the caller."""

    __slots__ = ("_deaths", "_faults", "_rules", "_unanswered", "reason", "state")

    def __init__(self, rules: HealthRules) -> None:
        self._rules = rules
        self._faults: deque[float] = deque()
        self._deaths: deque[float] = deque()
        self._unanswered = 0
        """Faults since the last good answer."""
        self.state = Health.HEALTHY
        self.reason = ""

    def fault(self, *, now_s: float, reason: str) -> Health:
        """An error answer, a timeout, or a connection that broke once. Refusals for lack of room
        (503) or of a version (409) are none."""
        if not self.state.is_alive:
            return self.state
        self._faults.append(now_s)
        self._unanswered += 1
        self._forget(now_s)
        if min(self._unanswered, len(self._faults)) >= self._rules.dead_faults:
            return self.died(now_s=now_s, reason=f"{len(self._faults)} faults, last: {reason}")
        if len(self._faults) >= self._rules.suspect_faults and self.state is Health.HEALTHY:
            self.state, self.reason = Health.SUSPECT, reason
        return self.state

    def success(self, *, now_s: float) -> Health:
        """A whole answer: old faults count less than what works now."""
        self._unanswered = 0
        if self._faults:
            self._faults.popleft()
            self._forget(now_s)
            if not self._faults and self.state is Health.SUSPECT:
                self.state, self.reason = Health.HEALTHY, ""
        return self.state

    def calm(self, *, now_s: float) -> Health:
        """Time has passed; a suspect without faults in the window is healthy again."""
        self._forget(now_s)
        if self.state is Health.SUSPECT and not self._faults:
            self.state, self.reason = Health.HEALTHY, ""
        return self.state

    def died(self, *, now_s: float, reason: str) -> Health:
        """Connections are refused or broke twice, or no token came for too long."""
        if self.state not in (Health.DEAD, Health.RETIRED):
            self._faults.clear()
            self._unanswered = 0
            self._deaths.append(now_s)
            while self._deaths[0] < now_s - self._rules.restart_window_s:
                self._deaths.popleft()
            is_over = len(self._deaths) > self._rules.max_restarts
            self.state = Health.RETIRED if is_over else Health.DEAD
            self.reason = reason
        return self.state

    def answered(self, *, is_ready: bool, is_behind: bool, now_s: float) -> Health:
        """A probe came back. One step a probe: dead, restarting, stale, healthy."""
        state = self.state
        if state is Health.DEAD:
            self.state = Health.RESTARTING
        elif state is Health.RESTARTING and is_ready:
            self.state = Health.STALE
        elif state is Health.STALE and is_ready and not is_behind:
            self.state, self.reason = Health.HEALTHY, ""
        elif state is Health.SUSPECT:
            self.calm(now_s=now_s)
        return self.state

    def _forget(self, now_s: float) -> None:
        while self._faults and self._faults[0] < now_s - self._rules.window_s:
            self._faults.popleft()


@dataclass(slots=True)
class ProgressWatch:
    """Liveness is tokens advancing, not HTTP 200."""

    moved_s: float
    """When something last moved, or nothing was asked of the replica."""
    progress: float | None = None

    def stalled_s(
        self, *, now_s: float, is_busy: bool, progress: float | None, turns_moved: bool
    ) -> float:
        """Seconds for which requests were there and nothing moved.

        Args:
            is_busy: requests of ours are under way, and the replica does not say it is paused.
            progress: a counter of its work; None when it reports none, or did not answer.
            turns_moved: a turn was answered since the last look.
        """
        moved = progress is not None and progress != self.progress
        if progress is not None:
            self.progress = progress
        if moved or turns_moved or not is_busy:
            self.moved_s = now_s
        return now_s - self.moved_s
