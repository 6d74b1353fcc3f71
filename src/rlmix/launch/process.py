"""A child process that cannot outlive its parent, and whose fate its owner always knows.

Invariant: a started child leads its own session and process group, reads nothing, writes only to
its log file, and is killed by the kernel (PR_SET_PDEATHSIG) when the thread that started it ends,
whatever ended it. Start children from a thread that lives as long as the owner does: the main
thread or an event loop's, never a short-lived one.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmix.core.errors import LaunchError

# Runs between fork and the real program. A preexec_fn would do the same with less, but it runs
# Python in a forked copy of a threaded process, which can deadlock; this costs 5 ms and cannot.
# The parent check closes the race of a parent that died before prctl was reached.
_DIE_WITH_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"cannot run {sys.argv[2]}: {error}", file=sys.stderr)
    os._exit(127)
"""

_POLL_S = 0.02
"""How often a wait looks again while somebody waits for a start or a stop."""

_WATCH_POLL_S = 0.1
"""How often a running child is looked at; 5 us a look, and a death is known within this time."""


def log_tail(path: Path, *, lines: int = 15, max_bytes: int = 8192) -> str:
    """The last lines of a log file, for an error message; a placeholder when there are none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - max_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return "(no log file)"
    kept = text.strip().splitlines()[-lines:]
    return "\n".join(f"  | {line}" for line in kept) if kept else "(the log is empty)"


class ChildProcess:
    """One child and everything its owner may do to it."""

    def __init__(
        self,
        popen: "subprocess.Popen[bytes]",
        *,
        name: str,
        log_path: Path,
        ready_path: Path | None,
    ) -> None:
        self._popen = popen
        self._ready_path = ready_path
        self._returncode: int | None = None
        self.name = name
        self.log_path = log_path

    @classmethod
    def start(
        cls,
        argv: Sequence[str],
        *,
        name: str,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        ready_path: Path | None = None,
    ) -> "ChildProcess":
        """Start `argv`; returns at once.

        Args:
            name: how messages call the process.
            log_path: stdout and stderr are appended here; parent folders are made.
            env: added to this process's environment.
            ready_path: the file that the program writes (JSON, by rename) once it can serve; an
                old one is removed first.
        Raises:
            LaunchError: the log file or the process could not be made.
        """
        try:
            log_path.parent.mkdir(parents=True, exist_ok=True)
            if ready_path is not None:
                ready_path.parent.mkdir(parents=True, exist_ok=True)
                ready_path.unlink(missing_ok=True)
            guard = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
            with log_path.open("ab") as log:
                popen = subprocess.Popen(
                    [*guard, *argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **(env or {})},
                    cwd=cwd,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"launch: cannot start {name}: {error}") from error
        return cls(popen, name=name, log_path=log_path, ready_path=ready_path)

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while running; minus the signal's number when a signal ended it."""
        self.poll()
        return self._returncode

    def poll(self) -> bool:
        """True when the child has ended. Then its whole group has been killed as well."""
        if self._returncode is None:
            # Look without reaping: while the dead leader keeps its pid, the group id cannot be
            # given to a stranger, so killing the group here can only hit our own processes.
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._signal_group(signal.SIGKILL)
            self._returncode = self._popen.wait()
        return True

    async def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Wait for the ready file and return its content.

        Raises:
            LaunchError: the child ended, or `timeout_s` passed; the message carries the last
                lines of its log. The child is not stopped.
        """
        assert self._ready_path is not None, "started without ready_path"
        deadline_s = time.monotonic() + timeout_s
        while True:
            ended = self.poll()
            try:
                return dict(json.loads(self._ready_path.read_bytes()))
            except FileNotFoundError:
                pass
            except ValueError as error:
                raise LaunchError(
                    f"launch: {self.name} wrote a ready file that is not JSON: {self._ready_path}"
                ) from error
            if ended:
                why = f"ended with {describe_exit(self._returncode)} before it was ready"
            elif time.monotonic() >= deadline_s:
                why = f"was not ready after {timeout_s:g} s"
            else:
                await asyncio.sleep(_POLL_S)
                continue
            raise LaunchError(
                f"launch: {self.name} {why}; log {self.log_path}:\n{log_tail(self.log_path)}"
            )

    async def wait_exit(self, timeout_s: float | None = None) -> int | None:
        """Wait until the child has ended; None when `timeout_s` passed first."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.poll():
            if deadline_s is not None and time.monotonic() >= deadline_s:
                return None
            await asyncio.sleep(_WATCH_POLL_S if deadline_s is None else _POLL_S)
        return self._returncode

    async def stop(self, *, grace_s: float = 5.0) -> int:
        """TERM to the group, wait up to `grace_s`, then KILL. Idempotent; returns the exit code."""
        if not self.poll():
            self._signal_group(signal.SIGTERM)
            if await self.wait_exit(grace_s) is None:
                self.kill()
        returncode = self._returncode
        assert returncode is not None
        return returncode

    def kill(self) -> None:
        """KILL the group and reap the child, without waiting for an event loop."""
        if not self.poll():
            self._signal_group(signal.SIGKILL)
            self._returncode = self._popen.wait()

    def _signal_group(self, signum: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # The group is empty already.
            os.killpg(self.pid, signum)


def describe_exit(returncode: int | None) -> str:
    """`exit code 3` or `signal SIGKILL`."""
    if returncode is not None and returncode < 0:
        try:
            return f"signal {signal.Signals(-returncode).name}"
        except ValueError:
            return f"signal {-returncode}"
    return f"exit code {returncode}"
