"""Whether anything listens at the address of a cluster, asked before Ray is.

Ray itself waits for minutes at an address where nobody is. Invariant: only what can be known
without Ray is judged; for `auto` it looks for a cluster of this machine by itself, at once.
"""

import socket
from collections.abc import Mapping

LIMIT_S = 10.0
"""For one connection; a name that must be looked up and a far head included."""


def unreachable(address: str, environ: Mapping[str, str], *, limit_s: float = LIMIT_S) -> str:
    """Why no cluster can be joined there, in one sentence; empty when it may be tried.

    Args:
        address: `launch.address`: `auto`, or `HOST:PORT` of a head.
        environ: of this process; `RAY_ADDRESS` says what `auto` means.
    """
    named = address
    where = f"launch.address={address}"
    if address == "auto":
        named = environ.get("RAY_ADDRESS", "")
        where = f"launch.address=auto: RAY_ADDRESS={named}"
    host, colon, port = named.rpartition(":")
    if not colon or not port.isdecimal() or "/" in host:
        return ""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s):
            return ""
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error)
        return (
            f"{where}: nothing answers there ({why}); start Ray's head there, name HOST:PORT of "
            "the one that runs, or set launch.address=null for a Ray of the run's own"
        )
