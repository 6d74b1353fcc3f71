"""Which logs of a run belong to a pool or a replica, and following several of them at once.

All machines of a run write into the `logs/` of its folder, so one reader sees them all.
Invariant: whole lines only; a line that is still being written waits for its end.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rlmix.core.errors import ConfigError
from rlmix.observe.runs import LogFile, log_files

DRIVER_LOG = "driver.log"
"""In a run's `logs/`: what a run without a terminal prints."""
ROLES = ("engine", "replica")
"""The engine's own output, and that of the process that owns it."""
POLL_S = 0.25
READ_BYTES = 1 << 16
LONGEST_LINE_BYTES = 1 << 20
"""What grows beyond this without an end is shown as it is."""


def choose_logs(
    path: Path,
    *,
    process: str | None = None,
    pool: str | None = None,
    replica: str | None = None,
) -> list[LogFile]:
    """Logs of a run, by name.

    Args:
        process: start of a process's name.
        pool: only those of its replicas.
        replica: `h100-0`, or with `pool` just its number.
    Raises:
        ConfigError: there is none such; the message names those that are there.
    """
    logs = log_files(path, process)
    if pool is None and replica is None:
        return logs
    name = f"{pool}-{replica}" if pool is not None and (replica or "").isdecimal() else replica
    chosen = [
        log
        for log in logs
        if (pool is None or _pool_of(log.process) == pool)
        and (name is None or _replica_of(log.process) == name)
    ]
    if not chosen:
        known = sorted({one for log in logs if (one := _replica_of(log.process))})
        asked = ", ".join(
            f"{flag} {value}"
            for flag, value in (("--pool", pool), ("--replica", replica))
            if value is not None
        )
        raise ConfigError(
            f"{path.name}: no log of {asked}; there are those of {', '.join(known) or 'no replica'}"
        )
    return chosen


def _replica_of(process: str) -> str | None:
    """`engine-h100-0` and `replica-h100-0-2` (its second start) are of `h100-0`."""
    role, _, rest = process.partition("-")
    if role not in ROLES:
        return None
    if role == "replica":
        rest = rest.rpartition("-")[0]
    return rest or None


def _pool_of(process: str) -> str | None:
    replica = _replica_of(process)
    return None if replica is None else replica.rpartition("-")[0]


class Follower:
    """Gives new whole lines of the files that `choose` names, those that appear later too."""

    def __init__(self, choose: Callable[[], Sequence[LogFile]], *, from_end: bool = True) -> None:
        """`from_end`: skip what is there now; files that appear later are read whole."""
        self._choose = choose
        self._offsets: dict[Path, int] = {}
        self._parts: dict[Path, bytes] = {}
        if from_end:
            self._offsets = {log.path: log.size_bytes for log in choose()}

    def lines(self) -> Iterator[tuple[str, str]]:
        """(process, line) for everything new."""
        for log in self._choose():
            yield from ((log.process, line) for line in self._read(log.path))

    def _read(self, path: Path) -> Iterator[str]:
        offset = self._offsets.get(path, 0)
        try:
            with path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < offset:
                    offset = 0  # It was begun again.
                file.seek(offset)
                while chunk := file.read(READ_BYTES):
                    offset += len(chunk)
                    yield from self._split(path, chunk)
        except FileNotFoundError:
            return
        finally:
            self._offsets[path] = offset

    def _split(self, path: Path, chunk: bytes) -> Iterator[str]:
        *whole, rest = (self._parts.pop(path, b"") + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE_BYTES:
            whole, rest = [*whole, rest], b""
        if rest:
            self._parts[path] = rest
        yield from (line.decode("utf-8", "replace") for line in whole)


def follow(
    follower: Follower,
    *,
    is_over: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[tuple[str, str]]:
    """Lines as they come, until `is_over` and everything that was written before it was given."""
    while True:
        over = is_over()
        yield from follower.lines()
        if over:
            return
        sleep(POLL_S)
