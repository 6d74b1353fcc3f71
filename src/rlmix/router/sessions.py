"""Which session lives where. Bounded: idle sessions expire, and beyond a number they are spilled.

Invariant: a session has at most one home; every replica's session count equals the number of
sessions in memory whose home it is. A session's home and view outlive the router where a ledger
is given: it is told every change, and asked about ids that are not in memory.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Home(Protocol):
    """A replica, as far as this file is concerned."""

    name: str
    num_sessions: int


H = TypeVar("H", bound=Home)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionRow:
    """What is remembered of a session outside of memory."""

    session_id: str
    home: str
    """Name of its replica; empty when it has none."""
    view: str
    moves: int


class Ledger(Protocol):
    """Where rows are kept; see `store.SessionStore`."""

    def find(self, session_id: str) -> SessionRow | None: ...
    def write(self, row: SessionRow) -> None: ...
    def erase(self, session_id: str) -> bool: ...


class Session(Generic[H]):
    """One open session. Plain and mutable: the router has thousands and touches one a request."""

    __slots__ = (
        "answered_s", "context_tokens", "home", "home_name", "in_flight", "moves", "recorded_s",
        "seen_s", "session_id", "turns", "view",
    )  # fmt: skip

    def __init__(self, session_id: str, now_s: float) -> None:
        self.session_id = session_id
        self.home: H | None = None
        self.home_name = ""
        """Of the home before a restart or a spill, until it has one again."""
        self.view = ""
        """Weight view of its first answer; it never changes then."""
        self.in_flight = 0
        self.turns = 0
        self.moves = 0
        """Moves to another replica so far."""
        self.context_tokens = 0
        """Of its last turn, answer included: what the home has cached."""
        self.seen_s = now_s
        self.recorded_s = now_s
        """When its row was written last, or it was opened."""
        self.answered_s: float | None = None
        """When the last turn was answered; None before the first."""


class SessionTable(Generic[H]):
    """All open sessions in memory, least recently used first."""

    def __init__(
        self, *, idle_expiry_s: float, max_sessions: int, ledger: Ledger | None = None
    ) -> None:
        self._sessions: OrderedDict[str, Session[H]] = OrderedDict()
        self._idle_expiry_s = idle_expiry_s
        self._max_sessions = max_sessions
        self._ledger = ledger
        self.num_expired = 0
        """Sessions that were forgotten without having been released."""
        self.num_spilled = 0
        """Sessions that left memory and can be found again."""

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session[H]]:
        return iter(self._sessions.values())

    def open(self, session_id: str, *, now_s: float) -> Session[H]:
        """The session with exactly this id, made when new; it becomes the most recent one."""
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = Session(session_id, now_s)
            row = None if self._ledger is None else self._ledger.find(session_id)
            if row is not None:
                session.home_name, session.view, session.moves = row.home, row.view, row.moves
            while len(self._sessions) > self._max_sessions and self._spill_oldest_idle():
                pass
        else:
            self.touch(session, now_s=now_s)
        return session

    def touch(self, session: Session[H], *, now_s: float) -> None:
        """The session was just used; the order of the table stays the order of `seen_s`."""
        session.seen_s = now_s
        if session.session_id in self._sessions:
            self._sessions.move_to_end(session.session_id)
        if now_s - session.recorded_s > self._idle_expiry_s:
            # Rows of the ledger age as well, and this one's session is in use.
            session.recorded_s = now_s
            self.record(session)

    def settle(self, session: Session[H], home: H | None) -> None:
        """Give the session a home, another home, or (None) take it away."""
        if session.home is not None:
            session.home.num_sessions -= 1
        session.home = home
        # A session that was released while its request waited must not count anywhere.
        if home is not None:
            if self._sessions.get(session.session_id) is session:
                home.num_sessions += 1
                session.home_name = ""
                self.record(session)
            else:
                session.home = None

    def record(self, session: Session[H]) -> None:
        """The session's home, view or moves changed."""
        if self._ledger is not None and self._sessions.get(session.session_id) is session:
            home = session.home_name if session.home is None else session.home.name
            self._ledger.write(
                SessionRow(
                    session_id=session.session_id, home=home, view=session.view, moves=session.moves
                )
            )

    def release(self, session_id: str) -> bool:
        """Forget the session everywhere; False when it is not known."""
        session = self._sessions.pop(session_id, None)
        was_kept = self._ledger is not None and self._ledger.erase(session_id)
        if session is None:
            return was_kept
        self.settle(session, None)
        return True

    def expire(self, *, now_s: float) -> int:
        """Forget what has been idle for too long; returns how many that were."""
        due = []
        for session in self._sessions.values():
            if now_s - session.seen_s < self._idle_expiry_s:
                break
            if session.in_flight == 0:
                due.append(session.session_id)
        for session_id in due:
            self.release(session_id)
        self.num_expired += len(due)
        return len(due)

    def _spill_oldest_idle(self) -> bool:
        """Take one out of memory; without a ledger it is forgotten."""
        for session_id, session in self._sessions.items():
            if session.in_flight == 0:
                if self._ledger is None:
                    self.release(session_id)
                    self.num_expired += 1
                    return True
                self.record(session)
                del self._sessions[session_id]
                if session.home is not None:
                    session.home.num_sessions -= 1
                self.num_spilled += 1
                return True
        return False
