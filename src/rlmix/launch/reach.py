"""Whether anything listens at the address of a cluster, asked before Ray is.

Ray itself waits for minutes at an address where nobody is. Invariant: only what can be known
without Ray is judged.
"""

import contextlib
import socket
from collections.abc import Mapping
from pathlib import Path

from rlmix.core.addresses import LAST_PORT, is_port

LIMIT_S = 10.0
"""For one connection; a name that must be looked up and a far head included."""
NODE_PROCESS = "raylet"
"""Runs on every machine that belongs to a cluster."""


def unreachable(
    address: str,
    environ: Mapping[str, str],
    *,
    limit_s: float = LIMIT_S,
    processes: Path = Path("/proc"),
) -> str:
    """Why no cluster can be joined there, in one sentence; empty when it may be tried.

    Args:
        address: `launch.address`: `auto`, or `HOST:PORT` of a head.
        environ: of this process; `RAY_ADDRESS` says what `auto` means.
        processes: a folder like Linux's own, with a `comm` for each process.
    """
    named = address
    where = f"launch.address={address}"
    if address == "auto":
        named = environ.get("RAY_ADDRESS", "")
        where = f"launch.address=auto: RAY_ADDRESS={named}"
        if not named and not _is_node(processes):
            return (
                "launch.address=auto: this machine belongs to no Ray (no raylet runs here, and "
                "RAY_ADDRESS is not set); start Ray on it, name HOST:PORT of a head, or set "
                "launch.address=null for a Ray of the run's own"
            )
    host, colon, port = named.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return ""
    if not is_port(port):
        return (
            f"{where}: no port; a port is 1 to {LAST_PORT}: name HOST:PORT of a head that runs, or "
            "set launch.address=null for a Ray of the run's own"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s):
            return ""
    except OSError as error:
        why = str(getattr(error, "strerror", None) or error)
        return (
            f"{where}: nothing answers there ({why}); start Ray's head there, name HOST:PORT of "
            "the one that runs, or set launch.address=null for a Ray of the run's own"
        )


def _is_node(processes: Path) -> bool:
    """Whether a node of a cluster runs on this machine; True where that cannot be seen."""
    if not processes.is_dir():
        return True
    for file in processes.glob("[0-9]*/comm"):
        with contextlib.suppress(OSError):  # Ended meanwhile.
            if file.read_text().strip() == NODE_PROCESS:
                return True
    return False
