"""How the driver talks to an object that lives in another process.

Two kinds: `rlmix.launch.ray.ActorHandle`, the real one, and `InProcessHandle`, the same calls on
an object in this process, for tests and for looking at one part without Ray.
"""

import asyncio
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rlmix.core.errors import LaunchError
from rlmix.core.machine import Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a process asks of its machine beside processor cores (`launch.needs`)."""

    kind: str
    """Accelerator, for messages."""
    gpus: float
    """As Ray counts and hands them out; 0: none."""
    resources: Mapping[str, float]
    """Custom resources of Ray."""
    labels: Mapping[str, str]
    """Labels that the node must have."""


class Handle(Protocol):
    """A remote object."""

    name: str

    @property
    def is_placed(self) -> bool:
        """False while the object waits for a machine: there is nobody to ask anything, and a call
        would wait as long. Whoever ends it then kills it, which takes its request back."""
        ...

    @property
    def machine(self) -> Machine | None:
        """Where it is; None before it is placed, and where there is the one machine only."""
        ...

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a method and return its result. Calls made at the same time may run in any order.

        Cancelling the caller cancels the call. What the method raises is raised here.

        Raises:
            LaunchError: the object's process is gone.
            TimeoutError: `timeout_s` passed; the call was cancelled.
        """
        ...

    async def placed(self) -> None:
        """Wait until the object's process has a machine.

        Raises:
            PlacementError: it found none within the limit that it was made with.
        """
        ...

    def kill(self) -> None:
        """End the object's process now, without asking it."""
        ...


class InProcessHandle:
    """Calls go straight to the object. `kill` calls the object's own `kill`, where it has one."""

    def __init__(self, target: object, *, name: str, machine: Machine | None = None) -> None:
        self._target: object | None = target
        self.name = name
        self.machine = machine

    @property
    def is_placed(self) -> bool:
        return True

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        if self._target is None:
            raise LaunchError(f"launch: {self.name} was killed")
        async with asyncio.timeout(timeout_s):
            result = getattr(self._target, method)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

    async def placed(self) -> None:
        """It is here."""

    def kill(self) -> None:
        target, self._target = self._target, None
        if hasattr(target, "kill"):
            target.kill()
