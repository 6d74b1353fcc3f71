"""Several router processes behind one port: starts them, and starts them again when they die.

Every shard listens on the public port (the kernel spreads connections) and on a port of its own, by
which the other shards reach it. Invariant: the public port stays the same; no shard outlives this
process.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from rlmix.core.errors import LaunchError
from rlmix.router.shards import write_json

log = logging.getLogger(__name__)

READY_LIMIT_S = 30.0
RESTART_DELAY_S = 0.2
MAX_RESTARTS = 10
RESTART_WINDOW_S = 300.0
POLL_S = 0.05
STOP_GRACE_S = 5.0


class Supervisor:
    """Keeps `count` shards alive until `run` is told to stop."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        count: int,
        host: str,
        port: int,
        state_dir: Path | None,
        ready_file: Path | None,
    ) -> None:
        """`argv`: arguments of `python -m rlmix.router` without those of address and shard."""
        self._argv = list(argv)
        self._count = count
        self._host = host
        self._ready_file = ready_file
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if state_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="rlmix-router-")
            state_dir = Path(self._temporary.name)
        self._folder = state_dir
        self._folder.mkdir(parents=True, exist_ok=True)
        # Bound and never listening: holds the port for the shards, and gets no connection.
        self._holder = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self._holder.bind((host, port))
        self._port = self._holder.getsockname()[1]
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set.

        Raises:
            LaunchError: a shard does not become ready, or dies too often.
        """
        try:
            for index in range(self._count):
                self._ready(index).unlink(missing_ok=True)
                await self._start(index)
            for index in range(self._count):
                await self._wait_ready(index)
            url = f"http://{self._host}:{self._port}"
            log.info("%d shards serve at %s", self._count, url)
            if self._ready_file is not None:
                write_json(self._ready_file, {"url": url, "pid": os.getpid()})
            keepers = [asyncio.create_task(self._keep(i)) for i in range(self._count)]
            stopping = asyncio.create_task(stop.wait())
            done, pending = await asyncio.wait(
                {stopping, *keepers}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            for task in done:
                task.result()
        finally:
            await self._end()

    async def _keep(self, index: int) -> None:
        deaths: deque[float] = deque()
        while True:
            code = await self._processes[index].wait()
            now_s = time.monotonic()
            deaths.append(now_s)
            while deaths[0] < now_s - RESTART_WINDOW_S:
                deaths.popleft()
            log.warning("shard %d ended with %s", index, code)
            if len(deaths) > MAX_RESTARTS:
                raise LaunchError(
                    f"router: shard {index} died {len(deaths)} times within {RESTART_WINDOW_S:g} s"
                )
            await asyncio.sleep(RESTART_DELAY_S)
            await self._start(index)

    async def _start(self, index: int) -> None:
        self._processes[index] = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rlmix.router", *self._argv,
            "--host", self._host, "--port", str(self._port),
            "--shards", str(self._count), "--shard-index", str(index),
            "--state-dir", str(self._folder), "--parent-pid", str(os.getpid()),
            "--ready-file", str(self._ready(index)),
            stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip

    async def _wait_ready(self, index: int) -> None:
        deadline_s = time.monotonic() + READY_LIMIT_S
        while not self._ready(index).exists():
            code = self._processes[index].returncode
            if code is not None:
                raise LaunchError(f"router: shard {index} ended with {code} before it was ready")
            if time.monotonic() > deadline_s:
                raise LaunchError(f"router: shard {index} was not ready in {READY_LIMIT_S:g} s")
            await asyncio.sleep(POLL_S)

    def _ready(self, index: int) -> Path:
        return self._folder / f"shard-{index}.ready"

    async def _end(self) -> None:
        alive = [p for p in self._processes.values() if p.returncode is None]
        for process in alive:
            process.send_signal(signal.SIGTERM)
        if alive:
            waits = [asyncio.create_task(process.wait()) for process in alive]
            await asyncio.wait(waits, timeout=STOP_GRACE_S)
            for process in alive:
                if process.returncode is None:
                    process.kill()
            await asyncio.gather(*waits)
        self._holder.close()
        if self._temporary is not None:
            self._temporary.cleanup()
