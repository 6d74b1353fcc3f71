"""The router's process, kept alive: when it dies it comes back at the same address.

Sessions that were waiting for an answer end void and are sampled again; those that ask meanwhile
try again for some seconds, and go on where they were. The fleet notices that the new router knows
no replica and registers them all.
"""

import asyncio
import os
from urllib.parse import urlsplit

from rlmix.core.addresses import reachable, with_host
from rlmix.core.errors import LaunchError
from rlmix.launch.process import ChildProcess, describe_exit
from rlmix.observe.run_dir import RunDir
from rlmix.plan.runplan import RouterPlan

READY_FOLDER = "ready"
"""Folder of the run in which servers say that they serve, and where."""

READY_LIMIT_S = 30.0
RESTART_DELAY_S = 0.5
MAX_RESTARTS = 5
"""In one run; a router that dies more often is broken, and its log says how."""


class RouterProcess:
    """Started on creation; `stop` ends it and its keeper."""

    def __init__(self, plan: RouterPlan, run: RunDir, *, name: str = "router") -> None:
        """
        Args:
            name: of its files in the run, and of the folder in which it keeps sessions' homes; a
                run may have two routers.
        """
        self._plan = plan
        self._run = run
        self._name = name
        self._port = "0"
        self._process = self._start()
        self._keeper: asyncio.Task[None] | None = None
        self.is_retired = False
        """True when it died too often and was given up."""

    async def wait_ready(self) -> str:
        """The router's URL, which stays the same over restarts."""
        ready = await self._process.wait_ready(READY_LIMIT_S)
        url = reachable(str(ready["url"]), os.environ)
        self._port = str(urlsplit(url).port)
        self._keeper = asyncio.create_task(self._keep(), name="router keeper")
        return url

    async def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        await self._process.stop()

    async def _keep(self) -> None:
        for restart in range(1, MAX_RESTARTS + 1):
            code = await self._process.wait_exit()
            self._run.events.append(
                "router_lost", f"ended with {describe_exit(code)}", restart=restart
            )
            await asyncio.sleep(RESTART_DELAY_S)
            self._process = self._start()
            try:
                await self._process.wait_ready(READY_LIMIT_S)
            except LaunchError as error:
                self._run.events.append("router_failed", str(error))
        await self._process.wait_exit()
        self.is_retired = True
        self._run.events.append("router_retired", f"died more than {MAX_RESTARTS} times")

    def _start(self) -> ChildProcess:
        ready_path = self._run.path / READY_FOLDER / f"{self._name}.json"
        argv = [
            word.replace("{ready_file}", str(ready_path))
            for word in with_host(self._plan.argv, os.environ)
        ]
        argv[argv.index("--port") + 1] = self._port
        # So that sessions find their replica and keep their weight view over a restart.
        argv += ["--state-dir", str(self._run.path / self._name)]
        return ChildProcess.start(
            argv,
            name=self._name,
            log_path=self._run.logs / f"{self._name}.log",
            env=self._plan.env,
            ready_path=ready_path,
        )
