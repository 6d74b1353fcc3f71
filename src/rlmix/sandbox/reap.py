"""Removes what a run's sandboxes left behind when their worker had no chance to.

Processes are found by an environment variable that launchers and bubblewrap carry; killing those
ends everything inside them, because sandboxes die with their parent.
"""

import contextlib
import os
import shutil
import signal
from pathlib import Path

from rlmix.sandbox.link import RUN_MARK


def marked_processes(name: str, value: str) -> list[int]:
    """Process ids whose starting environment holds name=value, the caller's own excepted."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            content = Path("/proc", entry, "environ").read_bytes()
            if wanted in content.split(b"\0"):
                found.append(int(entry))
    return found


def run_folder(scratch_dir: Path, run_id: str) -> Path:
    """Where all sandboxes of a run keep their files."""
    return scratch_dir / f"rlmix_sandboxes_{run_id}"


def reap(run_id: str, scratch_dir: Path) -> int:
    """Kill the run's sandbox processes and remove its folder; returns how many were killed.

    Call it when no worker of the run lives: before a resumed run starts, and at a run's end.
    """
    pids = marked_processes(RUN_MARK, run_id)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(run_folder(scratch_dir, run_id), ignore_errors=True)
    return len(pids)
