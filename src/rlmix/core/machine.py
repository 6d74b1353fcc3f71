"""A machine of a cluster, and how people name one. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlmix.core.errors import ConfigError

LEAST_ID_CHARS = 8
"""Of the start of an id, where it stands for the whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """As the cluster knows it."""

    id: str
    """A machine that leaves and comes back has a new one."""
    address: str
    host: str
    """What it calls itself."""

    def is_called(self, name: str) -> bool:
        """By its host name, its address, or its id or the start of it."""
        is_id = len(name) >= LEAST_ID_CHARS and self.id.startswith(name)
        return is_id or name in (self.address, self.host)

    def __str__(self) -> str:
        return f"{self.host} ({self.address}, {self.id[:LEAST_ID_CHARS]})"


def find_machine(name: str, machines: Sequence[Machine]) -> Machine:
    """The one of that name.

    Raises:
        ConfigError: there is none, or the name fits several; lists them.
    """
    found = [machine for machine in machines if machine.is_called(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(
            f"machine {name!r}: {len(found)} machines of the cluster are called so: "
            f"{_named(found)}; name one by its address, or by its id"
        )
    raise ConfigError(
        f"machine {name!r}: the cluster has none of that name; there are {_named(machines)}; name "
        f"one by host, address, or id (its first {LEAST_ID_CHARS} characters are enough)"
    )


def _named(machines: Sequence[Machine]) -> str:
    return ", ".join(sorted(str(machine) for machine in machines)) or "no machines"
