"""What a router adds to a request's time: the same requests with it and without it, interleaved."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from bench_router_contestants import (
    Contestant,
    Fleet,
    start_contestant,
)

from rlmix.engine.protocol import SESSION_HEADER
from rlmix.engine.timed.player import ROUTING_KEY_HEADER, request_body
from rlmix.engine.timed.prompts import ID_BYTES, STREAM
from rlmix.engine.timed.replica import ReplicaSpec
from rlmix.engine.timed.steps import StepTimes

SESSIONS = 500
REQUESTS_PER_S = 150
STEP_S = 0.02
OUTPUT_TOKENS = 120
"""2.4 s a request at 150 requests a second: about 360 are under way at any time."""
SIZES_TOKENS = (8_192, 131_072)


def replicas() -> list[tuple[ReplicaSpec, float]]:
    """Four replicas with room for everything, so that nothing waits."""
    steps = StepTimes(fixed_s=STEP_S)
    return [
        (
            ReplicaSpec(
                name=f"r{index}", accelerator="none", steps=steps, max_running=4096,
                kv_tokens=1 << 30,
            ),
            0.0,
        )
        for index in range(4)
    ]  # fmt: skip


async def measure_latency(
    contestants: list[Contestant], folder: Path, *, quick: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Per contestant and body size: milliseconds besides the replica's own time."""
    found: dict[str, Any] = {}
    for contestant in contestants:
        if contestant.argv is None or (quick and contestant.name != "ours"):
            continue
        rows = {}
        for tokens in SIZES_TOKENS:
            rate = REQUESTS_PER_S if tokens == SIZES_TOKENS[0] else REQUESTS_PER_S / 10
            async with Fleet(replicas(), folder / contestant.name / str(tokens)) as fleet:
                rows[str(tokens)] = await _one(
                    contestant, fleet, tokens=tokens, rate=rate, seconds=2.2 if quick else 15.0
                )
            say(f"latency {contestant.name} {tokens} ids: {rows[str(tokens)]}")
        found[contestant.name] = rows
    return found


async def _one(
    contestant: Contestant, fleet: Fleet, *, tokens: int, rate: float, seconds: float
) -> dict[str, Any]:
    """Requests at fixed times, every second one without the router."""
    rng = random.Random(0)
    longest = STREAM * (1 + tokens * ID_BYTES // len(STREAM))
    bodies = [
        request_body(longest[start * ID_BYTES : (start + tokens) * ID_BYTES - 1], OUTPUT_TOKENS)
        for start in (rng.randrange(16) for _ in range(4))
    ]
    direct = list(fleet.urls.values())
    beside: dict[bool, list[float]] = {True: [], False: []}
    failed = 0
    under_way = most_under_way = 0

    async with start_contestant(contestant, fleet) as running:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:

            async def ask(number: int, is_routed: bool, is_counted: bool) -> None:
                nonlocal failed, under_way, most_under_way
                session_id = f"s{number % SESSIONS}"
                url = running.target.url_of(session_id) if is_routed else direct[number % 4]
                headers = {SESSION_HEADER: session_id, ROUTING_KEY_HEADER: session_id,
                           "Content-Type": "application/json"}  # fmt: skip
                under_way += 1
                most_under_way = max(most_under_way, under_way)
                started_s = time.monotonic()
                async with http.post(
                    url + "/generate", data=bodies[number % 4], headers=headers
                ) as response:
                    content = await response.read()
                taken_s = time.monotonic() - started_s
                under_way -= 1
                if response.status != 200:
                    failed += 1
                elif is_counted:
                    engine_s = orjson.loads(content)["meta_info"]["e2e_latency"]
                    beside[is_routed].append(taken_s - engine_s)

            cpu_s, tasks = running.cpu_s(), []
            begin_s = time.monotonic()
            warm_s = 0.8
            # The router gets the full rate; the direct ones come on top, a tenth of it.
            for number in range(int(rate * (seconds + warm_s))):
                await asyncio.sleep(max(0.0, begin_s + number / rate - time.monotonic()))
                is_counted = number > rate * warm_s
                tasks.append(asyncio.create_task(ask(number, True, is_counted)))
                if number % 4 == 0:
                    await asyncio.sleep(0.5 / rate)
                    tasks.append(asyncio.create_task(ask(number, False, is_counted)))
            await asyncio.gather(*tasks)
            cpu_s = running.cpu_s() - cpu_s
    routed, plain = sorted(beside[True]), sorted(beside[False])
    milliseconds = {
        f"{name}_{label}_ms": round(1e3 * values[min(len(values) - 1, int(q * len(values)))], 3)
        for name, values in (("routed", routed), ("direct", plain))
        for label, q in (("p50", 0.5), ("p99", 0.99))
    }
    return {
        **milliseconds,
        "added_p50_ms": round(milliseconds["routed_p50_ms"] - milliseconds["direct_p50_ms"], 3),
        "added_p99_ms": round(milliseconds["routed_p99_ms"] - milliseconds["direct_p99_ms"], 3),
        "requests_per_s": rate,
        "requests": len(routed),
        "failed": failed,
        "most_under_way": most_under_way,
        "cpu_ms_per_request": round(1e3 * cpu_s / (int(rate * (seconds + warm_s))), 3),
    }
