"""The inside of an actor's process: its output, its environment, the object that it owns.

Invariant: output has its home and the environment its values before anything heavy is imported.
"""

import asyncio
import inspect
import logging
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlmix.core.addresses import NODE_VARIABLE
from rlmix.core.machine import Machine


class Host:
    """Runs inside the actor's process: owns one object and runs its methods.

    Coroutine methods run on the actor's event loop, all at once. Plain methods run one at a time
    on one thread that never changes (torch keeps thread pools per thread), so that the actor
    still answers while a training step runs.
    """

    def __init__(self, payload: bytes, log_path: str, environment: dict[str, str]) -> None:
        # First of all, before anything heavy is imported: output and environment.
        fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        os.environ.update(environment)
        os.environ[NODE_VARIABLE] = node_address()
        _show_own_accelerators()
        _log_to_stderr()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="actor")
        self._payload = payload
        self._target: Any = None
        self._made: asyncio.Task[None] | None = None

    async def here(self) -> Machine:
        """Answered as soon as the actor has a machine."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        return Machine(id=node, address=node_address(), host=socket.gethostname())

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._made is None:
            self._made = asyncio.ensure_future(self._make())
        await asyncio.shield(self._made)
        function = getattr(self._target, method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, lambda: function(*args, **kwargs))

    async def _make(self) -> None:
        from ray import cloudpickle

        def make() -> Any:
            cls, args, kwargs = cloudpickle.loads(self._payload)
            return cls(*args, **kwargs)

        loop = asyncio.get_running_loop()
        self._target = await loop.run_in_executor(self._thread, make)


def _show_own_accelerators() -> None:
    """Ray may be told not to set this; an engine must see those that were given to its actor."""
    import ray

    if given := ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(given)


def node_address() -> str:
    """Of this machine, as Ray's others reach it."""
    import ray

    return str(ray.util.get_node_ip_address())


def _log_to_stderr() -> None:
    logging.basicConfig(
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
        force=True,
    )
