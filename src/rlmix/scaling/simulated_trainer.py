"""Groups and the trainer of a simulated run: which sessions train, and when versions appear.

Invariant: every session that was started ends exactly once: trained, too old, lost, or still
somewhere when the simulation stops (`Ledger.is_balanced`).
"""

from collections import deque
from dataclasses import dataclass, field


class Group:
    """Sessions of one task; it trains when the last of them has ended."""

    __slots__ = ("left", "started_s", "valid", "version")

    def __init__(self, *, size: int, version: int, started_s: float) -> None:
        self.left = size
        self.valid = 0
        self.version = version
        self.started_s = started_s


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Where all sessions went."""

    started: int = 0
    trained: int = 0
    stale: int = 0
    """Finished, and dropped because they were too old."""
    lost: int = 0
    """Their replica died and no other could take them."""
    rehomed: int = 0
    """Moves to another replica; a session may move several times."""

    def is_balanced(self, *, open_sessions: int, buffered: int) -> bool:
        return self.started == self.trained + self.stale + self.lost + open_sessions + buffered


@dataclass(slots=True, kw_only=True)
class Trainer:
    """Takes groups in the order in which they are complete."""

    sessions_per_step: int
    max_staleness: int
    ledger: Ledger
    version: int = 0
    is_busy: bool = False
    waiting_since_s: float = 0.0
    waited_s: float = 0.0
    staleness_sum: float = 0.0
    """Of trained sessions, versions."""
    buffered: int = 0
    """Finished sessions that neither trained nor were dropped, those of open groups included."""
    _ready: deque[Group] = field(default_factory=deque)
    _ready_sessions: int = 0

    def ended(self, group: Group, *, is_valid: bool) -> bool:
        """A session of the group is over.

        Returns:
            True when the group is complete.
        """
        group.left -= 1
        if is_valid:
            group.valid += 1
            self.buffered += 1
        if group.left:
            return False
        self.completed(group)
        return True

    def completed(self, group: Group) -> None:
        """All sessions of the group are over, and its valid ones are counted in `buffered`."""
        self._ready.append(group)
        self._ready_sessions += group.valid
        if self._is_stale(group):
            self._drop(self._ready.pop())

    def begin_step(self, *, now_s: float) -> bool:
        """Start a step if enough is there."""
        if self.is_busy:
            return False
        if self._ready_sessions < self.sessions_per_step:
            return False
        taken = 0
        while taken < self.sessions_per_step:
            group = self._ready.popleft()
            taken += group.valid
            self.staleness_sum += group.valid * (self.version - group.version)
        self._ready_sessions -= taken
        self.buffered -= taken
        self.ledger.trained += taken
        self.is_busy = True
        self.waited_s += now_s - self.waiting_since_s
        return True

    def end_step(self, *, now_s: float) -> None:
        self.version += 1
        self.is_busy = False
        self.waiting_since_s = now_s
        # Ages change with the version only.
        stale = [group for group in self._ready if self._is_stale(group)]
        if stale:
            self._ready = deque(group for group in self._ready if not self._is_stale(group))
            for group in stale:
                self._drop(group)

    def waited_until(self, now_s: float) -> float:
        """Seconds waited since the start, the wait that goes on included."""
        return self.waited_s + (0.0 if self.is_busy else now_s - self.waiting_since_s)

    def _is_stale(self, group: Group) -> bool:
        return self.version - group.version > self.max_staleness

    def _drop(self, group: Group) -> None:
        self._ready_sessions -= group.valid
        self.buffered -= group.valid
        self.ledger.stale += group.valid
