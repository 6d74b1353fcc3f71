"""The embedded engine as a process, over HTTP.

One exact server (float32, no KV rounding) is shared, so that every number can be compared with
Transformers.
"""

import asyncio
import time
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
import torch

from rlmix.core.errors import EngineError
from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import (
    EngineRefused,
    GenerateRequest,
    GenerationAborted,
    SamplingParams,
)

VOCAB = 512
MAX_RUNNING = 8
MASK_CAP = 64


@pytest.fixture(scope="module")
def server(view_folders, tmp_path_factory, start_server):
    ready = tmp_path_factory.mktemp("server") / "ready.json"
    options = {"max_running_requests": MAX_RUNNING, "sampling_mask_max_tokens": MASK_CAP}
    with start_server(view_folders["bf16", 0], ready, **options) as (url, _):
        yield url


@asynccontextmanager
async def client_of(url, *, timeout_s=120.0):
    client = EngineClient(url, timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 180))


def prompt(seed, length=24):
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def request(ids, *, record="none", head_k=0, min_version=None, rid="r", **changes):
    fields = {
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 12,
        "stop_token_ids": (),
        "seed": 3,
    }
    return GenerateRequest(
        session_id=rid,
        request_id=rid,
        input_ids=ids,
        sampling=SamplingParams(**{**fields, **changes}),
        record=record,
        head_k=head_k,
        min_version=min_version,
    )


def reference_logprobs(model, ids, num_new, temperature):
    """float64 [num_new, V] of a Hugging Face model for the last `num_new` ids."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    return torch.log_softmax(logits[-num_new - 1 : -1] / temperature, -1).numpy()


async def load_of(client):
    return (await client.get_json("/v1/loads"))["loads"][0]


async def wait_until(condition, what, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        await asyncio.sleep(0.005)


async def set_version(client, view_folders, version):
    """Back to known weights, whatever the test did."""
    await client.post_json("/continue_generation", {})
    await client.post_json(
        "/update_weights_from_disk",
        {
            "model_path": str(view_folders["bf16", version]),
            "weight_version": str(version),
            "abort_all_requests": True,
        },
    )


def test_the_answer_has_the_shape_of_the_real_server(server):
    async def scenario():
        async with aiohttp.ClientSession() as session:
            body = {
                "rid": "mine",
                "input_ids": list(prompt(1)),
                "sampling_params": {"max_new_tokens": 3, "temperature": 1.0, "top_k": 5},
                "return_logprob": True,
                "top_logprobs_num": 2,
                "return_sampling_mask": True,
                "sampling_logprobs_mode": "selected",
            }
            async with session.post(f"{server}/generate", json=body) as response:
                assert response.status == 200
                assert response.headers["X-Rlmix-Pool"] == "test"
                assert response.headers["X-Rlmix-Replica"] == "test-0"
                assert response.headers["X-Rlmix-Numerics"].startswith("cpu/bf16/a=fp32/kv=fp32")
                return await response.json()

    answer = run(scenario())
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 3
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 3}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (24, 3)
    assert meta["weight_version"] == "0"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 3}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [
        [token, None] for token in answer["output_ids"]
    ]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
    assert meta["output_token_sampling_mask_length"] == [5, 5, 5]
    assert all(isinstance(value, float) for value in meta["output_token_sampling_logprobs"])
    assert meta["e2e_latency"] > 0


def test_sampler_logprobs_are_those_of_a_full_float32_forward(server, tiny_model):
    async def scenario():
        async with client_of(server) as client:
            return await client.generate(request(prompt(2), max_new_tokens=40))

    turn = run(scenario())
    expected = reference_logprobs(tiny_model, [*prompt(2), *turn.output_ids], 40, 0.8)
    chosen = expected[np.arange(40), list(turn.output_ids)]
    np.testing.assert_allclose(turn.sampler_logprobs, chosen, atol=1e-5)


def test_kept_sets_equal_a_dense_oracle_and_sum_to_one(server, tiny_model):
    async def scenario():
        async with client_of(server) as client:
            return await client.generate(
                request(prompt(3), record="support", top_p=0.9, top_k=20, max_new_tokens=40)
            )

    turn = run(scenario())
    expected = reference_logprobs(tiny_model, [*prompt(3), *turn.output_ids], 40, 0.8)
    for position, (token, ids, logprobs) in enumerate(
        zip(turn.output_ids, turn.kept_ids, turn.kept_logprobs, strict=True)
    ):
        probs = np.exp(expected[position])
        order = np.argsort(-probs, kind="stable")
        before = probs[order].cumsum() - probs[order]
        oracle = order[(before <= 0.9) & (np.arange(VOCAB) < 20)]
        assert sorted(ids) == sorted(oracle.tolist())
        assert token in ids
        assert abs(np.exp(logprobs).sum() - 1) < 1e-6
        norm = np.log(probs[list(ids)].sum())
        np.testing.assert_allclose(logprobs, expected[position][list(ids)] - norm, atol=2e-5)
        assert turn.sampler_logprobs[position] == logprobs[ids.index(token)]


def test_a_batch_gives_what_each_request_gives_alone(server):
    """More requests than slots, of different lengths and parameters, some with kept sets."""
    requests = [
        request(
            prompt(100 + number, 5 + 7 * number),
            rid=f"batch-{number}",
            seed=number,
            record="support" if number % 3 == 1 else "none",
            top_p=0.9 if number % 3 else 1.0,
            top_k=30 if number % 3 else -1,
            max_new_tokens=10 + number,
            temperature=0.5 + 0.1 * number,
        )
        for number in range(12)
    ]

    async def scenario():
        async with client_of(server) as client:
            together = await asyncio.gather(*(client.generate(one) for one in requests))
            await client.post_json("/flush_cache", {})
            return together, [await client.generate(one) for one in requests]

    together, alone = run(scenario())
    for left, right in zip(together, alone, strict=True):
        assert left.output_ids == right.output_ids
        assert left.kept_ids == right.kept_ids
        np.testing.assert_allclose(left.sampler_logprobs, right.sampler_logprobs, atol=1e-5)


def test_the_next_turn_reuses_the_session_so_far_and_changes_no_number(server):
    async def scenario():
        async with client_of(server) as client:
            first = await client.generate(request(prompt(4, 40)))
            context = (*prompt(4, 40), *first.output_ids, *prompt(5, 10))
            warm = await client.generate(request(context))
            await client.post_json("/flush_cache", {})
            cold = await client.generate(request(context))
            return first, warm, cold

    first, warm, cold = run(scenario())
    assert first.cached_tokens == 0
    # All but the last sampled token, whose keys and values nobody computed.
    assert warm.cached_tokens == 40 + 12 - 1
    assert cold.cached_tokens == 0
    assert warm.output_ids == cold.output_ids
    np.testing.assert_allclose(warm.sampler_logprobs, cold.sampler_logprobs, atol=1e-5)


def test_siblings_that_arrive_together_compute_their_prompt_once(server):
    async def scenario():
        async with client_of(server) as client:
            ids = prompt(6, 80)
            return await asyncio.gather(
                *(client.generate(request(ids, rid=f"s{n}", seed=n)) for n in range(8))
            )

    turns = run(scenario())
    assert sorted(turn.cached_tokens for turn in turns) == [0] + [79] * 7
    assert len({turn.output_ids for turn in turns}) > 1


def test_a_seed_decides_the_turn_and_no_seed_varies(server):
    async def scenario():
        async with client_of(server) as client:
            return [
                (await client.generate(request(prompt(7), seed=seed))).output_ids
                for seed in (1, 1, 2, None, None)
            ]

    first, again, other, free, free_again = run(scenario())
    assert first == again != other
    assert free != free_again


def test_greedy_takes_the_most_likely_token_and_reports_temperature_one(server, tiny_model):
    async def scenario():
        async with client_of(server) as client:
            return await client.generate(request(prompt(8), temperature=0.0, max_new_tokens=6))

    turn = run(scenario())
    expected = reference_logprobs(tiny_model, [*prompt(8), *turn.output_ids], 6, 1.0)
    assert turn.output_ids == tuple(expected.argmax(1).tolist())
    np.testing.assert_allclose(turn.sampler_logprobs, expected.max(1), atol=1e-5)


def test_a_stop_token_ends_the_turn_and_is_part_of_it(server):
    async def scenario():
        async with client_of(server) as client:
            free = await client.generate(request(prompt(9), max_new_tokens=10))
            stop = free.output_ids[4]
            return free, await client.generate(
                request(prompt(9), max_new_tokens=10, stop_token_ids=(stop,))
            )

    free, stopped = run(scenario())
    end = free.output_ids.index(stopped.output_ids[-1]) + 1
    assert stopped.finish_reason == "stop"
    assert stopped.output_ids == free.output_ids[:end]
    assert free.finish_reason == "length"


def test_a_head_holds_the_most_likely_tokens_with_full_logprobs(server, tiny_model):
    async def scenario():
        async with client_of(server) as client:
            return await client.generate(
                request(prompt(10), record="head", head_k=5, max_new_tokens=4)
            )

    turn = run(scenario())
    expected = reference_logprobs(tiny_model, [*prompt(10), *turn.output_ids], 4, 0.8)
    for ids, logprobs, row in zip(turn.kept_ids, turn.kept_logprobs, expected, strict=True):
        assert ids == tuple(np.argsort(-row)[:5].tolist())
        np.testing.assert_allclose(logprobs, row[list(ids)], atol=1e-5)


def test_a_kept_set_above_the_cap_is_an_error_and_never_cut(server):
    async def scenario():
        async with client_of(server) as client:
            with pytest.raises(GenerationAborted, match="at most 64 are recorded"):
                await client.generate(
                    request(prompt(11), record="support", top_k=200, temperature=5.0)
                )

    run(scenario())


BAD = [
    ({"input_ids": [1, VOCAB]}, "token id 512 is outside the vocabulary"),
    ({"input_ids": [1, -1]}, "token id -1 is outside"),
    ({"input_ids": []}, "at least one token id"),
    ({"input_ids": [1.5]}, "whole numbers"),
    ({"input_ids": [[1], [2, 3]]}, "one flat list"),
    ({"input_ids": ["a"]}, "whole numbers"),
    ({"input_ids": None, "text": "hello"}, "input_ids is missing"),
    ({"input_ids": [1] * 510}, "510 input and 5 new tokens, 515 in all; the limit is 512"),
    ({"stream": True}, "stream=true"),
    ({"top_logprobs_num": 1000}, "top_logprobs_num=1000"),
    ({"return_sampling_mask": True, "sampling_logprobs_mode": "all"}, "allowed: selected"),
    ({"sampling_params": {"temperature": -1}}, "temperature=-1"),
    ({"sampling_params": {"temperature": "hot"}}, "temperature='hot'"),
    ({"sampling_params": {"top_p": 1.5}}, "top_p=1.5"),
    ({"sampling_params": {"top_k": 0}}, "top_k=0"),
    ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens=0"),
    ({"sampling_params": {"stop_token_ids": "x"}}, "stop_token_ids"),
    ({"sampling_params": {"min_p": 0.1}}, "min_p=0.1: the embedded engine has no min_p"),
    ({"sampling_params": {"n": 2}}, "n=2"),
]


def test_bad_input_is_a_400_that_says_what_is_allowed_and_harms_nobody(server):
    async def scenario():
        async with aiohttp.ClientSession() as session:
            for change, text in BAD:
                body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5}, **change}
                body["sampling_params"] = {"max_new_tokens": 5, **body["sampling_params"]}
                async with session.post(f"{server}/generate", json=body) as response:
                    message = (await response.json())["error"]["message"]
                    assert response.status == 400, change
                    assert text in message, message
            async with session.post(f"{server}/generate", data=b"{not json") as response:
                assert response.status == 400
            async with session.get(f"{server}/nowhere") as response:
                assert response.status == 404
                assert "/generate" in (await response.json())["error"]["message"]
        async with client_of(server) as client:
            assert len((await client.generate(request(prompt(12)))).output_ids) == 12
            assert (await load_of(client))["num_running_reqs"] == 0

    run(scenario())


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
    task = asyncio.create_task(client.generate(long_request("updated", tokens=300)))

    async def has_started():
        return (await load_of(client))["num_used_tokens"] > 60

    await wait_until(has_started, "the turn to be under way")
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
    rows = reference_logprobs(model, [*prompt(13, 30), *turn.output_ids], 300, 0.8)
    chosen = rows[np.arange(300), list(turn.output_ids)]
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
    assert 0 < first.end == second.start < second.end == 300
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
