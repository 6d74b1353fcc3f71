"""Removes what a run left behind, when the run could not do it itself.

The driver starts this file as a small process of its own (standard library only) and holds the
other end of its stdin. When that closes, for whatever reason, SIGKILL included, every process of
the run has `GRACE_S` to end by itself; what is left is killed, and the run's temporary folder is
removed. Ray needs this: its node agents stay for good when the driver is killed. When the driver
did not say before that it ends, the command it left for this case is run last.

Invariant: a process is touched only when its environment holds `RLMIX_RUN_TAG=<this run's tag>`,
or when it calls itself `ray::...` and holds a file open in this run's temporary folder. (Ray's
processes rename themselves, which can overwrite the environment that the kernel shows, hence the
second sign.) Tag and folder name hold random bits, so no other run's process can match.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

TAG_VARIABLE = "RLMIX_RUN_TAG"

GRACE_S = 1.0
"""For what ends by itself: children that the kernel kills with their parent, and their parents."""

GOODBYE = b"q"
"""What a driver that ends by itself says first."""

KILL_ROUNDS_S = 3.0
"""How long to look again for processes that were being forked while we killed."""


def run_processes(tag: str, folder: str) -> list[int]:
    """Pids of the run's live processes (no zombies), the driver and this process left out."""
    wanted = f"{TAG_VARIABLE}={tag}".encode()
    spared = (os.getpid(), os.getppid())  # The driver while it lives; init once it does not.
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) in spared:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                is_ours = wanted in file.read().split(b"\0")
            if is_ours or _is_ray_process_of(entry, folder + os.sep):
                found.append(int(entry))
        except OSError:
            continue  # Ended meanwhile, or not ours to read.
    return found


def _is_ray_process_of(pid: str, prefix: str) -> bool:
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        if not file.read(5).startswith(b"ray::"):
            return False
    for fd in os.listdir(f"/proc/{pid}/fd"):
        try:
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(prefix):
                return True
        except OSError:
            continue  # Closed meanwhile.
    return False


def reap(tag: str, folder: str, *, grace_s: float = GRACE_S) -> int:
    """Wait, kill, remove. Returns how many processes had to be killed."""
    deadline_s = time.monotonic() + grace_s
    while (left := run_processes(tag, folder)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    killed: set[int] = set()
    deadline_s = time.monotonic() + KILL_ROUNDS_S
    while left and time.monotonic() < deadline_s:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except OSError:
                pass
        time.sleep(0.05)
        left = run_processes(tag, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return len(killed)


class Reaper:
    """The driver's end."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @classmethod
    def start(cls, tag: str, folder: Path, on_lost: Sequence[str] = ()) -> "Reaper":
        """Call before the first tagged process is started. Its own session: Ctrl-C passes it by.

        Args:
            on_lost: command to run, after all else, when `finish` was never called.
        """
        environment = {k: v for k, v in os.environ.items() if k != TAG_VARIABLE}
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, tag, str(folder), *on_lost],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    def finish(self, *, timeout_s: float = GRACE_S + KILL_ROUNDS_S + 5.0) -> int:
        """Let it clean up and wait for it. Returns how many processes it had to kill."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It was killed; there is nobody to tell.
            self._process.stdin.write(GOODBYE)
            self._process.stdin.close()
        return self._process.wait(timeout_s)


def main() -> None:
    tag, folder, *on_lost = sys.argv[1:]
    is_lost = True
    while said := os.read(0, 4096):
        is_lost = is_lost and GOODBYE not in said
    killed = reap(tag, folder)
    if is_lost and on_lost:
        subprocess.run(on_lost, check=False)
    sys.exit(min(killed, 100))


if __name__ == "__main__":
    main()
