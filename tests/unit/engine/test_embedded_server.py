"""The embedded engine as a process, over HTTP: what one request gets.

One exact server (float32, no KV rounding) is shared, so that every number can be compared with
Transformers.
"""

import asyncio

import aiohttp
import numpy as np
import pytest

from rlmix.engine.protocol import (
    GenerationAborted,
)
from tests.unit.engine.serving import (
    VOCAB,
    client_of,
    load_of,
    prompt,
    reference_logprobs,
    request,
    run,
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
    assert meta["output_token_sampling_mask_length"] == 3
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
        zip(turn.output_ids, *turn.kept.lists(), strict=True)
    ):
        probs = np.exp(expected[position])
        order = np.argsort(-probs, kind="stable")
        before = probs[order].cumsum() - probs[order]
        oracle = order[(before <= 0.9) & (np.arange(VOCAB) < 20)]
        assert sorted(ids) == sorted(oracle.tolist())
        assert token in ids
        assert abs(np.exp(logprobs).sum() - 1) < 1e-6
        norm = np.log(probs[ids].sum())
        np.testing.assert_allclose(logprobs, expected[position][ids] - norm, atol=2e-5)
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
        assert (left.kept is None) == (right.kept is None)
        if left.kept is not None:
            assert left.kept.ids.tolist() == right.kept.ids.tolist()
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
    for ids, logprobs, row in zip(*turn.kept.lists(), expected, strict=True):
        assert ids == np.argsort(-row)[:5].tolist()
        np.testing.assert_allclose(logprobs, row[ids], atol=1e-5)


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
