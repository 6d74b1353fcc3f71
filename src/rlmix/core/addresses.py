"""Which address a server listens on, which one others reach it by, and who the others are.

`net.bind` is an address, or `node`: the one by which the machine is known in its Ray cluster. Pure:
no name is looked up; the machine's address comes with the environment of processes in a cluster.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit, urlunsplit

LOCAL_NAMES = ("localhost",)
LOOPBACK = "127.0.0.1"
NODE = "node"
NODE_VARIABLE = "RLMIX_NODE_ADDRESS"
"""Address of the machine that a process is on; unset outside a cluster."""
ANY = ("0.0.0.0", "::")
LAST_PORT = 65_535


def is_port(text: str) -> bool:
    """Whether a server can be reached at it. A resolver may take a larger number modulo 65,536, and
    that is the port of somebody else."""
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(LAST_PORT))
    return is_number and 0 < int(text) <= LAST_PORT


def is_server(url: str) -> bool:
    """http(s)://HOST[:PORT][/PATH], with a port that can be one."""
    try:
        parts = urlsplit(url)
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not any(character.isspace() for character in url)
        )
    except ValueError:  # Of brackets that do not close, and of ports.
        return False


def is_loopback(host: str) -> bool:
    """True when only processes of this machine can connect; False for every other name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host in LOCAL_NAMES


def own_address(environ: Mapping[str, str]) -> str:
    """By which other machines reach this one; loopback outside a cluster."""
    return environ.get(NODE_VARIABLE) or LOOPBACK


def bind_address(asked: str, environ: Mapping[str, str]) -> str:
    """What a server listens on here."""
    return own_address(environ) if asked == NODE else asked


def meeting_address(asked: str, environ: Mapping[str, str]) -> str:
    """The same for servers that must be named to others by one address."""
    return own_address(environ) if asked in (NODE, *ANY) else asked


def with_host(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """A server's arguments with the address of this machine for `--host node`."""
    return tuple(
        bind_address(word, environ) if before == "--host" else word
        for before, word in zip(["", *argv], argv, strict=False)
    )


def reachable(url: str, environ: Mapping[str, str]) -> str:
    """A server's own URL as others can use it: not that of every address at once."""
    parts = urlsplit(url)
    if parts.hostname not in ANY:
        return url
    host = own_address(environ)
    host = f"[{host}]" if ":" in host else host
    return urlunsplit(parts._replace(netloc=f"{host}:{parts.port}"))
