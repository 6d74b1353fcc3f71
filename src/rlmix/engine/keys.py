"""The key that an engine server of ours asks for.

It comes in the environment, under the name that real servers get theirs by, and is taken out of it
at once, so that no child process has it. Invariant: a server that another machine can reach has a
key; without one it listens on loopback only.
"""

from collections.abc import Mapping, MutableMapping

from rlmix.core.addresses import is_loopback
from rlmix.core.bearer import is_bearer
from rlmix.core.errors import ConfigError
from rlmix.engine.sglang.serve import API_KEY_VARIABLE as KEY_VARIABLE

OPEN_PATHS = ("/ping", "/health")
"""Say that the process lives and nothing else; open in real servers and in the router, too."""


def take_key(environ: MutableMapping[str, str], *, host: str) -> str | None:
    """The key, removed from `environ`; None: nobody is asked for one.

    Raises:
        ConfigError: there is none, and other machines could reach `host`.
    """
    key = environ.pop(KEY_VARIABLE, None)
    if not key and not is_loopback(host):
        raise ConfigError(
            f"--host {host}: other machines can reach it, and no key is set; put one into "
            f"{KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    return key or None


def is_let_in(path: str, headers: Mapping[str, str], key: str | None) -> bool:
    """Whether a request may be answered."""
    return key is None or path in OPEN_PATHS or is_bearer(headers, key)
