"""What state a run is in, from its lock and its manifest.

The lock decides whether somebody runs it; the manifest says how the last attempt ended. A run
without an owner and without an end was killed: it is `lost`, never shown as running.
"""

from enum import StrEnum
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.observe.lock import is_locked
from rlmix.observe.manifest import MANIFEST_FILE, read_manifest

SUMMARY_FILE = "summary.json"
"""The document of `rlmix train --json`; there once an attempt has ended in order."""


class RunState(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    LOST = "lost"


def is_run_dir(path: Path) -> bool:
    return (path / MANIFEST_FILE).is_file()


def read_run_state(run_path: Path) -> RunState:
    if is_locked(run_path):
        return RunState.RUNNING
    try:
        attempts = read_manifest(run_path).attempts
        return RunState(attempts[-1].exit_reason or RunState.LOST)
    except (DataError, IndexError, ValueError):
        return RunState.LOST
