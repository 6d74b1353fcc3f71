"""What an engine says of itself: loads, settings, metrics; and that nothing asks `/health`."""

import asyncio
from pathlib import Path

import pytest

import rlmix
from rlmix.pools.engine_admin import read_loads
from tests.contract.differences import DOCUMENT_EXTRAS, SGLANG_KEYS
from tests.contract.servers import MAX_RUNNING
from tests.contract.talking import (
    ask,
    client_of,
    prompt,
    request,
    run,
    turn_under_way,
    wait_until,
)

LOADS_TOP = {"timestamp", "version", "accelerator", "num_accelerators", "loads"}
LOAD_TYPES = {
    "dp_rank": int,
    "num_running_reqs": int,
    "num_waiting_reqs": int,
    "num_waiting_uncached_tokens": int,
    "num_used_tokens": int,
    "num_total_tokens": int,
    "num_active_tokens": int,
    "max_total_num_tokens": int,
    "max_running_requests": int,
    "token_usage": float,
    "gen_throughput": float,
    "cache_hit_rate": float,
    "total_prefill_uncached_tokens": int,
    "memory": dict,
    "queues": dict,
}


def document(engine, path):
    status, found = run(ask(engine, "GET", path))
    assert status == 200
    return found


def test_loads_have_the_fields_and_types_that_the_router_reads(engine):
    found = document(engine, "/v1/loads?include=all")
    assert found.keys() >= LOADS_TOP
    assert isinstance(found["timestamp"], str)
    assert found["num_accelerators"] == 1
    (load,) = found["loads"]
    wrong = {
        name: load.get(name)
        for name, kind in LOAD_TYPES.items()
        if not isinstance(load.get(name), (int, kind))
    }
    assert wrong == {}
    assert load["max_running_requests"] == MAX_RUNNING
    assert load["memory"].keys() >= {"weight_gb", "kv_cache_gb", "token_capacity"}
    assert load["queues"].keys() >= {"waiting", "paused", "retracted"}


def test_tokens_advance_while_a_turn_runs_and_stand_still_afterwards(engine):
    async def progress():
        _, found = await ask(engine, "GET", "/v1/loads?include=all")
        return read_loads(found)

    async def scenario():
        async with client_of(engine) as client:
            before = await progress()
            async with turn_under_way(engine, client) as task:
                during = await progress()
                assert during.running == 1
                assert during.progress_tokens > before.progress_tokens
                await ask(engine, "POST", "/abort_request", {"rid": "long"})
                await asyncio.wait({task})
            await client.generate(request(prompt(70)))

            async def is_idle():
                return (await progress()).running == 0

            await wait_until(is_idle, "the engine to be idle")
            after = await progress()
            assert (await progress()).progress_tokens == after.progress_tokens
            assert after.progress_tokens > before.progress_tokens

    run(scenario())


def test_info_says_version_limits_and_model(engine):
    info = document(engine, "/server_info")
    assert info["weight_version"] == "0"
    assert info["model_path"] == str(engine.folders[0])
    assert info["max_total_num_tokens"] > 0
    assert info["tp_size"] == 1
    assert info["startup_time"]["tokenizer_e2e"] > 0 or engine.kind == "scripted"
    model = document(engine, "/model_info")
    assert model["model_path"] == str(engine.folders[0])
    assert model["weight_version"] == "0"


@pytest.mark.parametrize("path", ["/v1/loads", "/server_info", "/model_info"])
def test_ours_answer_no_key_that_sglang_does_not_have_but_those_in_the_table(engine, path):
    found = document(engine, path)
    keys = set(found)
    if path == "/v1/loads":
        keys |= set(found["loads"][0])
    if engine.kind == "sglang":
        assert keys >= SGLANG_KEYS[path]
    else:
        assert keys - SGLANG_KEYS[path] <= DOCUMENT_EXTRAS[path]


def test_metrics_have_sglangs_names(engine):
    async def scenario():
        async with client_of(engine) as client:
            await client.generate(request(prompt(71)))
        return await ask(engine, "GET", "/metrics")

    status, text = run(scenario())
    assert status == 200
    for name in ("num_running_reqs", "num_queue_reqs", "generation_tokens_total"):
        assert f"sglang:{name}" in text


def test_no_code_of_ours_probes_health():
    """`/health` samples a token, waits through a pause and then marks a sound server unhealthy."""
    found = [
        str(path)
        for path in Path(rlmix.__file__).parent.rglob("*.py")
        if '"GET", "/health' in path.read_text() and "server.py" not in path.name
    ]
    assert found == []
