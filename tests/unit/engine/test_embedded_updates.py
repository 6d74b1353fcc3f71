"""The embedded engine as a process, over HTTP: requests beside each other, and new weights."""

import asyncio

import aiohttp
import numpy as np
import pytest

from rlmix.core.errors import EngineError
from rlmix.engine.protocol import (
    EngineRefused,
    GenerationAborted,
)
from tests.unit.engine.serving import (
    MAX_RUNNING,
    client_of,
    load_of,
    prompt,
    reference_logprobs,
    request,
    run,
    set_version,
    wait_until,
)

UPDATED_TOKENS = 440
"""Of the turn that an update interrupts: some 0.3 s, far longer than one poll."""


def long_request(rid, ids=None, tokens=400):
    return request(ids or prompt(13, 30), rid=rid, max_new_tokens=tokens, seed=1)


def test_an_aborted_request_returns_at_once_and_an_unknown_one_is_ignored(server):
    async def scenario():
        async with client_of(server) as client:
            task = asyncio.create_task(client.generate(long_request("victim")))
            await wait_until(lambda: _runs(client, 1), "the request to run")
            await client.post_json("/abort_request", {"rid": "nobody"})
            assert not task.done()
            await client.post_json("/abort_request", {"rid": "victim"})
            with pytest.raises(GenerationAborted):
                await task
            assert await _runs(client, 0)

    run(scenario())


async def _runs(client, count):
    return (await load_of(client))["num_running_reqs"] == count


def test_a_client_that_leaves_frees_its_slot(server):
    async def scenario():
        async with client_of(server) as watcher, client_of(server) as leaver:
            task = asyncio.create_task(leaver.generate(long_request("leaver")))
            await wait_until(lambda: _runs(watcher, 1), "the request to run")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await leaver.close()
            await wait_until(lambda: _runs(watcher, 0), "the slot to be free", limit_s=20)

    run(scenario())


def test_requests_beyond_the_slots_wait_and_all_finish(server):
    async def scenario():
        async with client_of(server) as client:
            tasks = [
                asyncio.create_task(client.generate(long_request(f"q{n}", prompt(200 + n), 60)))
                for n in range(MAX_RUNNING + 3)
            ]

            async def is_full():
                load = await load_of(client)
                return load["num_running_reqs"] == MAX_RUNNING and load["num_waiting_reqs"] == 3

            await wait_until(is_full, "8 to run and 3 to wait")
            turns = await asyncio.gather(*tasks)
            assert all(len(turn.output_ids) == 60 for turn in turns)

    run(scenario())


def test_a_pause_holds_back_new_requests_until_continue(server):
    async def scenario():
        async with client_of(server) as client:
            await client.post_json("/pause_generation", {"mode": "retract"})
            task = asyncio.create_task(client.generate(request(prompt(14))))
            await asyncio.sleep(0.2)
            assert not task.done()
            assert (await client.get_json("/ping")) == {}
            with pytest.raises(EngineError, match="503"):
                await client.get_json("/ready")
            await client.post_json("/continue_generation", {})
            assert len((await task).output_ids) == 12
            assert (await client.get_json("/ready")) == {}
            with pytest.raises(EngineRefused, match="abort, retract, in_place"):
                await client.post_json("/pause_generation", {"mode": "gently"})

    run(scenario())


async def update_in_the_middle(client, folder, *, mode, flush_cache):
    """A long turn during which version 1 is loaded; returns it and the update's error, if any."""

    async def num_generated():
        return (await client.get_json("/v1/loads"))["total_generated_tokens"]

    async def is_under_way():
        return await num_generated() > before + 20

    # Not `num_used_tokens`: prefixes that earlier tests left behind count as used.
    before = await num_generated()
    task = asyncio.create_task(client.generate(long_request("updated", tokens=UPDATED_TOKENS)))
    await wait_until(is_under_way, "the turn to be under way")
    await client.post_json("/pause_generation", {"mode": mode})
    error = None
    try:
        await client.post_json(
            "/update_weights_from_disk",
            {"model_path": str(folder), "weight_version": "1", "flush_cache": flush_cache},
        )
    except EngineRefused as refused:
        error = str(refused)
    info = await client.get_json("/server_info")
    assert info["weight_version"] == "1"
    await client.post_json("/continue_generation", {})
    return await task, error


def second_span_gap(turn, model):
    """Largest difference of the second span's logprobs to those of a model."""
    start = turn.version_spans[1].start
    rows = reference_logprobs(model, [*prompt(13, 30), *turn.output_ids], UPDATED_TOKENS, 0.8)
    chosen = rows[np.arange(UPDATED_TOKENS), list(turn.output_ids)]
    return np.abs(np.array(turn.sampler_logprobs) - chosen)[start:].max()


def test_retracted_requests_go_on_as_if_the_new_weights_had_read_everything(
    server, view_folders, make_model
):
    async def scenario():
        async with client_of(server) as client:
            try:
                return await update_in_the_middle(
                    client, view_folders["bf16", 1], mode="retract", flush_cache=True
                )
            finally:
                await set_version(client, view_folders, 0)

    turn, error = run(scenario())
    assert error is None
    first, second = turn.version_spans
    assert (first.version, second.version) == (0, 1)
    assert 0 < first.end == second.start < second.end == UPDATED_TOKENS
    assert second_span_gap(turn, make_model(1)) < 1e-4


def test_in_place_keeps_old_keys_under_new_weights_and_says_so_when_asked_to_flush(
    server, view_folders, make_model, tiny_model
):
    async def scenario(flush_cache):
        async with client_of(server) as client:
            try:
                return await update_in_the_middle(
                    client, view_folders["bf16", 1], mode="in_place", flush_cache=flush_cache
                )
            finally:
                await set_version(client, view_folders, 0)

    turn, error = run(scenario(False))
    assert error is None
    assert [span.version for span in turn.version_spans] == [0, 1]
    assert second_span_gap(turn, make_model(1)) > 0.1
    assert second_span_gap(turn, tiny_model) > 0.1
    _, error = run(scenario(True))
    assert "Weights were updated, but cache was not flushed" in error


def test_an_update_without_a_pause_waits_for_running_requests(server, view_folders):
    async def scenario():
        async with client_of(server) as client:
            try:
                running = asyncio.create_task(client.generate(long_request("old", tokens=200)))
                await wait_until(lambda: _runs(client, 1), "the request to run")
                update = asyncio.create_task(
                    client.post_json(
                        "/update_weights_from_disk",
                        {"model_path": str(view_folders["bf16", 1]), "weight_version": "1"},
                    )
                )
                await asyncio.sleep(0.05)
                late = asyncio.create_task(client.generate(request(prompt(15), rid="late")))
                await update
                return await running, await late
            finally:
                await set_version(client, view_folders, 0)

    old, late = run(scenario())
    assert [span.version for span in old.version_spans] == [0]
    assert [span.version for span in late.version_spans] == [1]


def test_new_weights_forget_the_old_prefixes_and_a_refused_folder_changes_nothing(
    server, view_folders, tmp_path
):
    async def scenario():
        async with client_of(server) as client:
            before = await client.generate(request(prompt(16)))
            for folder in (tmp_path / "missing", view_folders["fp8", 1]):
                with pytest.raises(EngineRefused):
                    await client.post_json(
                        "/update_weights_from_disk",
                        {"model_path": str(folder), "weight_version": "9"},
                    )
            with pytest.raises(EngineRefused, match="decimal"):
                await client.post_json(
                    "/update_weights_from_disk",
                    {"model_path": str(view_folders["bf16", 1]), "weight_version": "new"},
                )
            same = await client.generate(request(prompt(16)))
            assert same.output_ids == before.output_ids
            assert same.version_spans[0].version == 0
            assert same.cached_tokens > 0
            checksum = await client.post_json("/weights_checker", {"action": "checksum"})
            await set_version(client, view_folders, 1)
            try:
                other = await client.generate(request(prompt(16)))
                assert other.cached_tokens == 0
                assert other.output_ids != before.output_ids
                assert checksum != await client.post_json(
                    "/weights_checker", {"action": "checksum"}
                )
            finally:
                await set_version(client, view_folders, 0)
            assert checksum == await client.post_json("/weights_checker", {"action": "checksum"})

    run(scenario())


def test_a_replica_that_is_behind_answers_409(server):
    async def scenario():
        async with client_of(server, timeout_s=1.0) as client:
            with pytest.raises(EngineError, match=r"waiting for weight version 5 \(409\)"):
                await client.generate(request(prompt(17), min_version=5))
        async with client_of(server) as client:
            assert (await client.generate(request(prompt(17), min_version=0))).output_ids

    run(scenario())


def test_loads_info_and_metrics_say_what_the_replica_is_and_does(server):
    async def scenario():
        async with client_of(server) as client:
            await client.generate(request(prompt(18)))
            loads = await client.get_json("/v1/loads")
            info = await client.get_json("/server_info")
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"{server}/metrics") as response,
            ):
                metrics = await response.text()
        return loads, info, metrics

    loads, info, metrics = run(scenario())
    load = loads["loads"][0]
    assert loads["accelerator"] == "cpu"
    assert loads["emulated"] is True
    assert load["max_running_requests"] == MAX_RUNNING
    assert load["gen_throughput"] > 0
    assert 0 < load["cache_hit_rate"] < 1
    steps, rows, us, squares, rows_us, tokens = load["decode_moments"]
    assert steps <= rows <= squares
    assert tokens == rows
    assert us <= rows_us
    assert load["memory"]["token_capacity"] == load["max_total_num_tokens"]
    assert info["numerics"]["is_emulated"] is True
    assert (info["weights"], info["kv"], info["activations"]) == ("bf16", "fp32", "fp32")
    assert info["numerics_key"].startswith("cpu/bf16")
    assert 'sglang:num_running_reqs{pool="test",replica="test-0"' in metrics
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line[0] != "#")
    generated = next(v for k, v in values.items() if k.startswith("sglang:generation_tokens_total"))
    assert float(generated) == loads["total_generated_tokens"]
