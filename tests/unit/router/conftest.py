"""A router process and fake replicas, all real processes with ports from the system."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlmix.launch.process import ChildProcess
from rlmix.router.client import RouterAdmin

FAKE = str(Path(__file__).with_name("fake_replica.py"))


class Stage:
    """Everything a router test needs; use as an async context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: dict[str, ChildProcess] = {}
        self.urls: dict[str, str] = {}

    async def __aenter__(self) -> "Stage":
        self.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.http.close()
        if hasattr(self, "admin"):
            await self.admin.close()
        for child in self.children.values():
            child.kill()

    async def start_router(self, *arguments: str, token: str | None = None) -> None:
        argv = [sys.executable, "-m", "rlmix.router", *arguments]
        argv += ["--token-env", "RLMIX_TOKEN"] if token else []
        await self._start("router", argv, {"RLMIX_TOKEN": token} if token else {})
        self.admin = RouterAdmin(self.urls["router"], token=token)

    async def start_replicas(self, *names: str, **fields: Any) -> None:
        await asyncio.gather(
            *[
                self._start(name, [sys.executable, FAKE, name, str(self._ready(name))], {})
                for name in names
            ]
        )
        for name in names:
            await self.register(name, **fields)

    async def register(self, name: str, **fields: Any) -> None:
        facts = {
            "pool": f"pool_{name}", "url": self.urls[name], "numerics_key": f"key_{name}",
            "speed": 1.0, "max_running": 64, "version": 0, "state": "ready", **fields,
        }  # fmt: skip
        await self.admin.put_replica(name, **facts)

    async def generate(
        self, session_id: str, *, headers: dict[str, str] | None = None, **body: Any
    ) -> tuple[int, dict[str, Any], dict[str, str]]:
        async with self.http.post(
            self.urls["router"] + "/generate",
            json=body,
            headers={"X-Session-Id": session_id, **(headers or {})},
        ) as response:
            return response.status, await response.json(), dict(response.headers)

    async def replica(self, name: str) -> dict[str, Any]:
        return next(r for r in await self.admin.replicas() if r["name"] == name)

    async def metric(self, name: str) -> float:
        async with self.http.get(self.urls["router"] + "/metrics") as response:
            text = await response.text()
        return float(next(li for li in text.splitlines() if li.startswith(name)).split()[-1])

    def kill(self, name: str) -> None:
        self.children[name].kill()

    async def _start(self, name: str, argv: list[str], env: dict[str, str]) -> None:
        if name == "router":
            argv = [*argv, "--ready-file", str(self._ready(name))]
        child = ChildProcess.start(
            argv, name=name, log_path=self.folder / f"{name}.log", env=env,
            ready_path=self._ready(name),
        )  # fmt: skip
        self.children[name] = child
        self.urls[name] = (await child.wait_ready(20))["url"]

    def _ready(self, name: str) -> Path:
        return self.folder / f"{name}.ready"


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)
