"""Asking a run to end from wherever its folder can be seen.

A file in the run's folder, because that is what all machines of a run share; the owner looks for it
and takes it away. Invariant: a request is for the attempt that runs now, never for a later one.
"""

import contextlib
import os
import socket
import time
from pathlib import Path

from rlmix.observe.jsonl import write_atomically

STOP_FILE = "stop.request"
LOOK_EVERY_S = 1.0
"""How often the owner looks; a stat of one name, also on a network file system."""


def request_stop(run_path: Path) -> None:
    """Ask; a second request before the first was seen changes nothing."""
    said = f"{socket.gethostname()} {os.getpid()} {time.time():.3f}\n"
    write_atomically(run_path / STOP_FILE, said.encode())


def take_stop_request(run_path: Path) -> bool:
    """True when somebody asked; the request is gone afterwards."""
    try:
        (run_path / STOP_FILE).unlink()
    except OSError:
        return False
    return True


def forget_stop_requests(run_path: Path) -> None:
    """What was asked of an attempt that is over."""
    with contextlib.suppress(OSError):
        (run_path / STOP_FILE).unlink(missing_ok=True)
