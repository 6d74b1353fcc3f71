"""A fleet of scripted engines behind a real router: real processes, no model, no Ray."""

import asyncio
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rlmix.launch.handle import InProcessHandle
from rlmix.launch.process import ChildProcess
from rlmix.pools.fleet import Fleet
from rlmix.pools.replica import Replica
from rlmix.pools.spec import FleetSpec, ReplicaSpec, ReplicaStatus
from rlmix.router.client import RouterAdmin
from rlmix.weights.manifest import FileEntry, Manifest, hash_file, write_manifest
from rlmix.weights.store import version_dir


def make_version(store: Path, version: int, *, view: str = "bf16", damaged: bool = False) -> Path:
    """A complete version folder with one file in it."""
    folder = version_dir(store, view, version)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(f'{{"version": {version}}}')
    entry = hash_file(folder / "config.json")
    if damaged:
        entry = FileEntry(size_bytes=entry.size_bytes, xxh3_128="0" * 32)
    manifest = Manifest(kind="weights", version=version, view=view, files={"config.json": entry})
    write_manifest(folder, manifest)
    return folder


def make_replica_spec(name: str, folder: Path, **changes: Any) -> ReplicaSpec:
    argv = (
        sys.executable, "-m", "rlmix.engine.scripted",
        "--model-path", "{model_path}", "--weight-version", "{weight_version}",
        "--ready-file", "{ready_file}",
        "--accelerator", "h100", "--weights", "bf16", "--kv", "fp8", "--attention", "fa3",
        "--max-running-requests", "8", "--pool", "h100", "--replica", name,
    )  # fmt: skip
    spec = ReplicaSpec(
        name=name,
        pool="h100",
        view="bf16",
        argv=argv,
        log_path=folder / f"{name}.log",
        ready_path=folder / f"{name}.ready",
        expected={"accelerator": "h100", "weights": "bf16", "kv": "fp8", "attention": "fa3"},
        speed=1.0,
        max_running=8,
        boot_timeout_s=20.0,
        update_timeout_s=10.0,
        canary_tolerance_nats=0.1,
    )
    return replace(spec, **changes)


class Stage:
    """A fleet and its router; use as an async context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = folder / "weights"
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.replicas: dict[str, Replica] = {}
        self.handles: dict[str, InProcessHandle] = {}
        make_version(self.store, 0)

    async def __aenter__(self) -> "Stage":
        self.http = aiohttp.ClientSession()
        self.router_child = ChildProcess.start(
            [sys.executable, "-m", "rlmix.router", "--ready-file", str(self.folder / "r.ready"),
             "--queue-timeout-s", "10"],
            name="router", log_path=self.folder / "router.log",
            ready_path=self.folder / "r.ready",
        )  # fmt: skip
        self.router_url = (await self.router_child.wait_ready(20))["url"]
        self.router = RouterAdmin(self.router_url)
        self.fleet: Fleet | None = None
        return self

    async def __aexit__(self, *error: object) -> None:
        if self.fleet is not None:
            await self.fleet.stop()
        await self.http.close()
        await self.router.close()
        self.router_child.kill()

    def publish(self, version: int, *, damaged: bool = False) -> None:
        make_version(self.store, version, damaged=damaged)

    def spec(self, name: str, **changes: Any) -> ReplicaSpec:
        return make_replica_spec(name, self.folder, **changes)

    def make_fleet(self, *specs: ReplicaSpec, references: Any = None, **changes: Any) -> Fleet:
        spec = FleetSpec(
            replicas=specs,
            store=self.store,
            pause_mode="retract",
            max_parallel_boots=2,
            max_restarts=2,
            restart_window_s=60.0,
            restart_delay_s=0.1,
            loads_every_s=0.2,
            stall_timeout_s=5.0,
        )
        self.fleet = Fleet(
            replace(spec, **changes),
            spawn=self._spawn,
            router=self.router,
            on_event=lambda kind, reason, **fields: self.events.append(
                (kind, {"reason": reason, **fields})
            ),
            references=references,
        )
        return self.fleet

    def _spawn(self, spec: ReplicaSpec, incarnation: int) -> InProcessHandle:
        self.replicas[spec.name] = Replica(spec)
        handle = InProcessHandle(self.replicas[spec.name], name=f"{spec.name}.{incarnation}")
        self.handles[spec.name] = handle
        return handle

    def status(self, name: str) -> ReplicaStatus:
        assert self.fleet is not None
        return next(status for status in self.fleet.status() if status.name == name)

    def kinds(self, name: str) -> list[str]:
        return [kind for kind, fields in self.events if fields.get("replica") == name]

    async def routed(self, name: str) -> dict[str, Any] | None:
        return next((r for r in await self.router.replicas() if r["name"] == name), None)

    async def post(self, url: str, **body: Any) -> dict[str, Any]:
        async with self.http.post(url, json=body) as response:
            return dict(await response.json())

    async def generate(self, session_id: str, *, tokens: int = 2) -> tuple[int, dict[str, str]]:
        body = {
            "rid": session_id, "input_ids": [1, 2], "return_logprob": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "top_p": 1.0,
                                "top_k": -1, "stop_token_ids": []},
        }  # fmt: skip
        async with self.http.post(
            self.router_url + "/generate", json=body, headers={"X-Session-Id": session_id}
        ) as response:
            await response.read()
            return response.status, dict(response.headers)

    async def until(self, condition: Any, *, timeout_s: float = 10.0) -> float:
        """Wait for a condition (plain or a coroutine function); returns how long it took."""
        started_s = time.monotonic()
        while True:
            result = condition()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return time.monotonic() - started_s
            assert time.monotonic() - started_s < timeout_s, self.events[-6:]
            await asyncio.sleep(0.01)


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path)
