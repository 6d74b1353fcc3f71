"""A router and eight replicas as processes, hundreds of sessions, and everything going wrong.

Replicas only take time (`rlmix.engine.timed`); the router is the real one, started as a stand-alone
user would. Faults are commanded when turns are under way on the replica, and the command's answer
says how many it hit.
"""

import asyncio
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rlmix.engine.timed.fleet import write_specs
from rlmix.engine.timed.player import OneUrl, Played, Player
from rlmix.engine.timed.replica import ReplicaSpec
from rlmix.engine.timed.steps import StepTimes
from rlmix.engine.timed.trace import Shape, Spread, make_trace
from rlmix.launch.process import ChildProcess

SPEEDS = {"fast-0": 4, "fast-1": 4, "fast-2": 4, "mid-0": 2, "mid-1": 2, "mid-2": 2, "slow-0": 1,
          "slow-1": 1}  # fmt: skip
SLOWEST_STEP_S = 0.008
TURNS = 4
SHAPE = Shape(
    turns=Spread(median=TURNS, sigma=0.0, least=TURNS, most=TURNS),
    prompt_tokens=Spread(median=200, sigma=0.3, least=50, most=400),
    output_tokens=Spread(median=60, sigma=0.5, least=20, most=200),
    observation_tokens=Spread(median=60, sigma=0.5, least=10, most=200),
    tool_s=Spread(median=0.5, sigma=0.5, least=0.1, most=2.0),
)
PROBE_S = 0.25
STALL_S = 2.0
MEMORY_GROWTH_BYTES = 160 << 20
TURN_TIMEOUT_S = 60.0
LIMIT_S = 150.0


class Scene:
    """The processes, and the player at work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[ChildProcess] = []
        self.hits: dict[str, int] = {}

    async def __aenter__(self) -> "Scene":
        self.http = aiohttp.ClientSession()
        specs = [
            ReplicaSpec(
                name=name,
                accelerator=name.split("-")[0],
                steps=StepTimes(
                    fixed_s=SLOWEST_STEP_S / speed,
                    request_s=SLOWEST_STEP_S / speed / 32,
                    prefill_token_s=2e-5 / speed,
                ),
                max_running=48 * speed,
                kv_tokens=400_000,
            )
            for name, speed in SPEEDS.items()
        ]
        path = self.folder / "fleet.json"
        path.write_text(json.dumps(write_specs(specs)))
        fleet = await self._start("rlmix.engine.timed", "--fleet", str(path))
        self.control, self.urls = fleet["control"], fleet["replicas"]
        arguments = []
        for name, url in self.urls.items():
            arguments += ["--replica", f"{name}={url}", "--speed", f"{name}={SPEEDS[name]}"]
        router = await self._start(
            "rlmix.router", *arguments, "--probe-every-s", str(PROBE_S),
            "--stall-timeout-s", str(STALL_S), "--queue-timeout-s", str(TURN_TIMEOUT_S),
        )  # fmt: skip
        self.router, self.router_pid = router["url"], router["pid"]
        await self.until(lambda seen: len(seen) == len(SPEEDS) and all(
            replica["state"] == "ready" for replica in seen.values()), "all replicas ready"
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.close()
        for child in self.children:
            child.kill()

    async def _start(self, module: str, *arguments: str) -> dict[str, Any]:
        ready = self.folder / f"{module}.ready"
        child = ChildProcess.start(
            [sys.executable, "-m", module, *arguments, "--ready-file", str(ready),
             "--parent-pid", str(os.getpid())],
            name=module,
            log_path=self.folder / f"{module}.log",
            env={},
            ready_path=ready,
        )  # fmt: skip
        self.children.append(child)
        return await child.wait_ready(60)

    async def get(self, url: str) -> Any:
        async with self.http.get(url) as response:
            return await response.json(content_type=None)

    async def replicas(self) -> dict[str, dict[str, Any]]:
        found = (await self.get(self.router + "/replicas"))["replicas"]
        return {replica["name"]: replica for replica in found}

    async def until(self, is_so: Callable[[dict[str, dict[str, Any]]], bool], what: str) -> None:
        """Wait until what the router says of its replicas is so."""
        async with asyncio.timeout(LIMIT_S):
            while not is_so(seen := await self.replicas()):
                await asyncio.sleep(PROBE_S)
        assert seen, what

    async def metric(self, name: str) -> float:
        async with self.http.get(self.router + "/metrics") as response:
            text = await response.text()
        lines = [line for line in text.splitlines() if line.startswith(f"rlmix_router_{name}")]
        return sum(float(line.split()[-1]) for line in lines)

    def memory_bytes(self) -> int:
        return psutil.Process(self.router_pid).memory_info().rss

    async def strike(self, name: str, label: str, **fault: Any) -> None:
        """Break a replica while turns are under way on it."""
        async with asyncio.timeout(LIMIT_S):
            while not (await self.get(self.control + "/fleet"))[name]["in_flight"]:
                await asyncio.sleep(0.01)
        self.hits[label] = await self.order(name, **fault)

    async def order(self, name: str, **fault: Any) -> int:
        """Command a fault; how many turns under way it hit."""
        async with self.http.post(f"{self.control}/fleet/{name}", json=fault) as response:
            answer = await response.json(content_type=None)
            assert response.status == 200, answer
        return int(answer["in_flight"])

    async def set_version(self, player: Player, version: int) -> None:
        """New weights everywhere while turns are under way; new turns ask for them."""
        for name, seen in (await self.get(self.control + "/fleet")).items():
            if seen["is_up"] and not seen["is_hung"]:
                hit = await self.order(name, fault="version", version=version)
                label = f"version {version}"
                self.hits[label] = self.hits.get(label, 0) + hit
        player.min_version = version


async def play_through_faults(scene: Scene, num_sessions: int) -> tuple[Played, int]:
    """What the sessions met, and the most that were open in the router at a time."""
    player = Player(
        OneUrl(scene.router, releases=True),
        concurrency=num_sessions,
        time_scale=1.0,
        turn_timeout_s=TURN_TIMEOUT_S,
    )
    total = num_sessions * TURNS
    playing = asyncio.create_task(player.play(make_trace(num_sessions, seed=3, shape=SHAPE)))
    most_open = 0

    async def answered(frac: float) -> None:
        nonlocal most_open
        async with asyncio.timeout(LIMIT_S):
            while len(player.played.turns) < frac * total:
                assert not playing.done(), "the sessions ended before the faults"
                most_open = max(most_open, int(await scene.metric("sessions ")))
                await asyncio.sleep(0.05)

    await answered(0.05)
    await scene.strike("fast-0", "kill", fault="kill")
    await answered(0.15)
    await scene.set_version(player, 1)
    await answered(0.25)
    await scene.strike("fast-1", "hang", fault="hang")
    await answered(0.35)
    await scene.strike("mid-0", "flap", fault="flap", times=3, down_s=0.4, up_s=1.0)
    await answered(0.5)
    await scene.strike("slow-0", "kill again", fault="kill")
    await answered(0.6)
    await scene.set_version(player, 2)
    async with asyncio.timeout(LIMIT_S):
        return await playing, most_open


async def check_no_session_is_lost(tmp_path: Path, num_sessions: int) -> None:
    async with Scene(tmp_path) as scene:
        memory_before = scene.memory_bytes()
        played, most_open = await play_through_faults(scene, num_sessions)

        assert played.sessions_lost == 0
        assert played.sessions_done == num_sessions
        assert (played.errors, played.timeouts) == ({}, 0)
        assert len(played.turns) == num_sessions * TURNS
        assert most_open > 0.9 * num_sessions

        # Every fault took turns down with it, and the router counted at least as many.
        assert min(scene.hits.values()) > 0, scene.hits
        lost = (
            scene.hits["kill"] + scene.hits["hang"] + scene.hits["flap"] + scene.hits["kill again"]
        )
        assert await scene.metric("lost_requests_total") >= lost
        assert await scene.metric("rehomed_total") > 0

        # No turn was sampled by weights older than it asked for; some saw them change.
        assert all(min(turn.versions) >= (turn.min_version or 0) for turn in played.turns)
        asked = Counter(turn.min_version for turn in played.turns)
        assert min(asked[None], asked[1], asked[2]) > 0
        crossed = {turn.versions for turn in played.turns if len(turn.versions) > 1}
        assert {(0, 1), (1, 2)} <= crossed, crossed

        # Sessions kept their replica otherwise: most turns found their prefix there.
        fleet = await scene.get(scene.control + "/fleet")
        survivors = [name for name in SPEEDS if fleet[name]["is_up"] and not fleet[name]["is_hung"]]
        assert sorted(survivors) == ["fast-2", "mid-0", "mid-1", "mid-2", "slow-1"]
        # The one that flapped may have missed the last weights; it is back as soon as it has them.
        await scene.order("mid-0", fault="version", version=2)
        await scene.until(lambda seen: seen["mid-0"]["health"] == "healthy", "mid-0 is back")
        seen = await scene.replicas()
        assert [seen[name]["health"] for name in ("fast-0", "fast-1", "slow-0")] == ["dead"] * 3

        # Nothing is left behind.
        assert await scene.metric("sessions ") == 0
        assert await scene.metric("waiting ") == 0
        assert sum(replica["in_flight"] for replica in seen.values()) == 0
        assert scene.memory_bytes() - memory_before < MEMORY_GROWTH_BYTES


@pytest.mark.parametrize("num_sessions", [300, pytest.param(1500, marks=pytest.mark.slow)])
def test_no_session_is_lost_while_replicas_die_hang_flap_and_change_their_weights(
    tmp_path: Path, num_sessions: int
) -> None:
    asyncio.run(check_no_session_is_lost(tmp_path, num_sessions))
