"""What outlives memory: sessions' homes, and the turns of trajectories. One SQLite file.

Invariant: what was written is there after this process was killed (not after the machine was):
writes reach the system before they return, and nothing waits for the disk. Sessions of which
nothing was written for long are removed as a whole, so the file is bounded by what was used lately.
"""

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

from rlmix.core.errors import ConfigError
from rlmix.router.sessions import SessionRow

_TABLES = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, home TEXT, view TEXT, moves INTEGER, seen_s REAL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS turns (id TEXT, number INTEGER, body BLOB, seen_s REAL,
    PRIMARY KEY (id, number));
CREATE INDEX IF NOT EXISTS by_age ON sessions (seen_s);
CREATE INDEX IF NOT EXISTS turns_by_age ON turns (seen_s);
CREATE INDEX IF NOT EXISTS turns_by_session ON turns (id, seen_s);
"""


class SessionStore:
    """One process's rows; use it from one thread."""

    def __init__(self, path: Path | None) -> None:
        """`path` is made when it is new; None keeps the rows in a file without a name, which ends
        with the process however that ends.

        Raises:
            ConfigError: the file cannot be made or is no store.
        """
        try:
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect("" if path is None else path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=OFF")
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                f"router: --state-dir: {path}: {error}; give a folder that can be written to, or "
                "remove the file"
            ) from None
        self._wall_less_monotonic_s = time.time() - time.monotonic()

    def close(self) -> None:
        self._db.close()

    @property
    def num_bytes(self) -> int:
        ((pages,), (size,)) = (
            self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
        )
        return int(pages) * int(size)

    def _now_s(self) -> float:
        """Wall time of the start and what has passed since: a clock that is set meanwhile must not
        make everything old."""
        return self._wall_less_monotonic_s + time.monotonic()

    # --- sessions

    def find(self, session_id: str) -> SessionRow | None:
        row = self._db.execute(
            "SELECT home, view, moves FROM sessions WHERE id = ?", (session_id,)
        ).fetchone()
        if row is None:
            return None
        return SessionRow(session_id=session_id, home=row[0], view=row[1], moves=row[2])

    def write(self, row: SessionRow) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?)",
            (row.session_id, row.home, row.view, row.moves, self._now_s()),
        )

    def erase(self, session_id: str) -> bool:
        """Remove the session and its turns; False when it was not there."""
        found = self._db.execute("DELETE FROM sessions WHERE id = ?", (session_id,)).rowcount
        found += self._db.execute("DELETE FROM turns WHERE id = ?", (session_id,)).rowcount
        return found > 0

    def expire(self, older_than_s: float) -> None:
        """Remove what nobody wrote for so long; sessions in memory write their rows again, and
        turns go when the last of their session is that old: a trajectory is whole or not there."""
        limit = self._now_s() - older_than_s
        self._db.execute("DELETE FROM sessions WHERE seen_s < ?", (limit,))
        self._db.execute(
            "DELETE FROM turns WHERE seen_s < ? AND NOT EXISTS "
            "(SELECT 1 FROM turns AS later WHERE later.id = turns.id AND later.seen_s >= ?)",
            (limit, limit),
        )

    # --- turns of trajectories

    def append_turn(self, session_id: str, number: int, body: bytes) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO turns VALUES (?, ?, ?, ?)",
            (session_id, number, body, self._now_s()),
        )

    def turns(self, session_id: str) -> Iterator[bytes]:
        """Bodies in their order."""
        rows = self._db.execute(
            "SELECT body FROM turns WHERE id = ? ORDER BY number", (session_id,)
        )
        return (row[0] for row in rows)
