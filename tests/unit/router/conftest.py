"""A router process and scripted replicas, all real processes with ports from the system."""

import asyncio
import sys
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from rlmix.launch.process import ChildProcess
from rlmix.router.client import RouterAdmin

TOKEN_S = 0.05
"""What a sampled token takes; a request for n tokens takes (n - 1) of it."""

SCRIPTED = [
    sys.executable, "-m", "rlmix.engine.scripted", "--model-path", "-", "--accelerator", "none",
    "--weights", "bf16", "--kv", "bf16", "--attention", "none", "--max-running-requests", "1000",
    "--vocab-size", "8", "--token-s", str(TOKEN_S),
]  # fmt: skip


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
            *[self._start(name, [*SCRIPTED, "--replica", name], {}) for name in names]
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
        self, session_id: str, *, headers: dict[str, str] | None = None, takes_s: float = 0.0
    ) -> "Answer":
        body = {
            "input_ids": [1, 2, 3],
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": 1 + round(takes_s / TOKEN_S), "temperature": 1.0, "top_p": 1.0,
                "top_k": -1, "stop_token_ids": [],
            },
        }  # fmt: skip
        async with self.http.post(
            self.urls["router"] + "/generate",
            json=body,
            headers={"X-Session-Id": session_id, **(headers or {})},
        ) as response:
            return Answer(response.status, await response.json(), dict(response.headers))

    async def fail_next(self, name: str, fault: str, *, times: int = 1) -> None:
        body = {"fault": fault, "times": times}
        async with self.http.post(self.urls[name] + "/faults", json=body) as response:
            assert response.status == 200

    async def num_running(self, name: str) -> int:
        async with self.http.get(self.urls[name] + "/v1/loads") as response:
            return int((await response.json())["loads"][0]["num_running_reqs"])

    async def replica(self, name: str) -> dict[str, Any]:
        return next(r for r in await self.admin.replicas() if r["name"] == name)

    async def metric(self, name: str) -> float:
        async with self.http.get(self.urls["router"] + "/metrics") as response:
            text = await response.text()
        return float(next(li for li in text.splitlines() if li.startswith(name)).split()[-1])

    def kill(self, name: str) -> None:
        self.children[name].kill()

    async def _start(self, name: str, argv: list[str], env: dict[str, str]) -> None:
        child = ChildProcess.start(
            [*argv, "--ready-file", str(self._ready(name))],
            name=name,
            log_path=self.folder / f"{name}.log",
            env=env,
            ready_path=self._ready(name),
        )
        self.children[name] = child
        self.urls[name] = (await child.wait_ready(20))["url"]

    def _ready(self, name: str) -> Path:
        return self.folder / f"{name}.ready"


class Answer(NamedTuple):
    """What came back through the router."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def by(self) -> str:
        return self.headers["X-Rlmix-Replica"]

    @property
    def moves(self) -> int:
        return int(self.headers["X-Rlmix-Rehomed"])


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)
