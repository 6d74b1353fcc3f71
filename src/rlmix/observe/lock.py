"""Who owns a run directory.

Invariant: at most one live process holds a run. The lock is the kernel's (`flock`), so it is gone
the moment its owner is, however it died; nothing has to be cleaned up and nothing can be stale.
The owner's pid and start time beside it say whom to ask, not whether somebody is there.
"""

import fcntl
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from rlmix.core.errors import ConfigError

LOCK_FILE = ".lock"
ACQUIRE_LIMIT_S = 0.5
"""A listing holds the lock for microseconds while it looks; an owner outwaits that."""
START_TOLERANCE_S = 2.0
"""Start times are derived from the boot time, which clock corrections move a little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A process, told apart from a later one that got the same pid."""

    pid: int
    started_s: float
    """Unix time of the process's start."""
    host: str

    @staticmethod
    def current() -> "Owner":
        import psutil

        return Owner(
            pid=os.getpid(),
            started_s=round(psutil.Process().create_time(), 2),
            host=socket.gethostname(),
        )

    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """True when this very process still runs on this machine."""
        import psutil

        if not self.is_here():
            return False
        try:
            process = psutil.Process(self.pid)
            is_same = abs(process.create_time() - self.started_s) <= START_TOLERANCE_S
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


class RunLock:
    """Held by the owner of a run until `release` or death."""

    def __init__(self, file: int, owner: Owner) -> None:
        self._file = file
        self.owner = owner

    @classmethod
    def acquire(cls, run_path: Path) -> "RunLock":
        """Own a run directory.

        Raises:
            ConfigError: another live process owns it.
        """
        file = os.open(run_path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline_s = time.monotonic() + ACQUIRE_LIMIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    holder = read_owner(run_path)
                    os.close(file)
                    who = f"process {holder.pid} on {holder.host}" if holder else "another process"
                    raise ConfigError(
                        f"{run_path}: {who} is running this run; stop it with "
                        f"`rlmix runs stop {run_path.name}` or choose another run.name"
                    ) from None
                time.sleep(0.02)
        owner = Owner.current()
        os.ftruncate(file, 0)
        os.pwrite(file, orjson.dumps(asdict(owner)), 0)
        return cls(file, owner)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def is_locked(run_path: Path) -> bool:
    """True while a live process owns the run. Never waits."""
    try:
        file = os.open(run_path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


def read_owner(run_path: Path) -> Owner | None:
    """Who holds, or last held, the run; None when nobody ever did."""
    try:
        fields = orjson.loads((run_path / LOCK_FILE).read_bytes())
        return Owner(**fields)
    except (FileNotFoundError, orjson.JSONDecodeError, TypeError):
        return None
