"""The client against the scripted engine over real HTTP."""

import asyncio
import json
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from rlmix.core.errors import EngineError
from rlmix.core.trajectory import VersionSpan
from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import (
    EngineRefused,
    GenerateRequest,
    GenerationAborted,
    SamplingParams,
    request_body,
)
from rlmix.engine.scripted import HashPolicy, ScriptedEngine, turns_policy

VOCAB = 64
STOP = 7


def sampling(**changes):
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 12,
        "stop_token_ids": (STOP,),
        "seed": 11,
    }
    return SamplingParams(**{**fields, **changes})


def request(*, record="support", session="s", min_version=None, head_k=0, ids=(1, 2, 3), **changes):
    return GenerateRequest(
        session_id=session,
        request_id=f"{session}-turn",
        input_ids=ids,
        sampling=sampling(**changes),
        record=record,
        head_k=head_k,
        min_version=min_version,
    )


@asynccontextmanager
async def serving(policy=None, *, timeout_s=60.0, **options):
    async with ScriptedEngine(policy or HashPolicy(vocab_size=VOCAB), **options) as engine:
        client = EngineClient(engine.url, timeout_s=timeout_s)
        try:
            yield engine, client
        finally:
            await client.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_a_turn_carries_the_logprobs_of_the_distribution_that_was_sampled():
    async def scenario():
        policy = HashPolicy(vocab_size=VOCAB)
        async with serving(policy, pool="h100", replica="h100-0", weight_version=3) as (_, client):
            turn = await client.generate(request())
        context = [1, 2, 3]
        for token, logprob, ids, logprobs in zip(
            turn.output_ids, turn.sampler_logprobs, *turn.kept.lists(), strict=True
        ):
            full = policy.logprobs(context, version=3, temperature=0.7).astype(np.float64)
            order = np.argsort(-full)
            before = np.concatenate(([0.0], np.exp(full[order]).cumsum()[:-1]))
            expected = order[(before <= 0.9) & (np.arange(VOCAB) < 20)]
            assert set(ids) == set(expected.tolist())
            norm = np.log(np.exp(full[ids]).sum())
            np.testing.assert_allclose(logprobs, full[ids] - norm, atol=1e-6)
            assert logprob == logprobs[ids.index(token)]
            context.append(token)
        assert turn.version_spans == (VersionSpan(version=3, start=0, end=len(turn.output_ids)),)
        assert (turn.pool, turn.replica) == ("h100", "h100-0")
        assert turn.numerics_key.endswith("/emulated")
        assert turn.kept_exact

    run(scenario())


def test_the_same_seed_gives_the_same_turn_and_another_seed_another():
    async def scenario():
        async with serving() as (_, client):
            first = await client.generate(request(session="a", max_new_tokens=30, seed=5))
            again = await client.generate(request(session="b", max_new_tokens=30, seed=5))
            other = await client.generate(request(session="c", max_new_tokens=30, seed=6))
        assert first.output_ids == again.output_ids
        assert first.output_ids != other.output_ids

    run(scenario())


def test_without_support_a_truncated_turn_still_reports_renormalised_logprobs():
    async def scenario():
        async with serving() as (_, client):
            support = await client.generate(request(session="a"))
            plain = await client.generate(request(session="b", record="none"))
        assert plain.kept is None
        assert plain.sampler_logprobs == support.sampler_logprobs

    run(scenario())


def test_a_head_is_marked_as_not_exact_and_refused_under_truncation():
    async def scenario():
        async with serving() as (_, client):
            turn = await client.generate(
                request(record="head", head_k=4, top_p=1.0, top_k=-1, max_new_tokens=3)
            )
        assert not turn.kept_exact
        assert turn.kept.sizes.tolist() == [4] * len(turn.output_ids)

    run(scenario())
    with pytest.raises(ValueError, match="not those of top-p"):
        request(record="head", head_k=4)


def turn_of(record, *, json_only=False, **changes):
    async def scenario():
        async with serving(json_only=json_only) as (_, client):
            return await client.generate(request(record=record, **changes))

    return asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize(
    ("record", "changes"),
    [
        ("none", {}),
        ("none", {"top_p": 1.0, "top_k": -1}),
        ("support", {}),
        ("support", {"head_k": 5}),
        ("support", {"temperature": 0.0}),
        ("support", {"top_p": 1.0, "top_k": -1}),
        ("head", {"head_k": 5, "top_p": 1.0, "top_k": -1}),
    ],
)
def test_json_and_binary_give_the_same_turn_to_the_last_bit(record, changes):
    binary = turn_of(record, **changes)
    text = turn_of(record, json_only=True, **changes)
    assert text.wire_bytes > binary.wire_bytes > 100
    assert replace(text, engine_s=0, wire_bytes=0) == replace(binary, engine_s=0, wire_bytes=0)


def test_a_head_beside_kept_sets_holds_the_likeliest_ids_of_the_whole_vocabulary():
    turn = turn_of("support", head_k=5, temperature=1.3)
    policy = HashPolicy(vocab_size=VOCAB)
    context = [1, 2, 3]
    assert turn.kept_exact
    for token, ids, logprobs in zip(turn.output_ids, *turn.head.lists(), strict=True):
        full = policy.logprobs(context, version=0, temperature=1.3)
        assert ids == np.argsort(-full)[:5].tolist()
        assert logprobs == full[ids].tolist()
        context.append(token)
    assert (turn.head.mass() < 0.999).all()
    assert turn_of("support").head is None


def test_a_head_is_refused_where_it_would_mean_something_else():
    with pytest.raises(ValueError, match="head_k=5 with record='none'"):
        request(record="none", head_k=5)
    with pytest.raises(ValueError, match="greedy logprobs are at 1"):
        request(record="support", head_k=5, temperature=0.0)


def test_every_sampling_field_is_sent_so_no_default_of_the_engine_applies():
    body = request_body(request(seed=3))
    assert body["sampling_params"] == {
        "max_new_tokens": 12,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "min_new_tokens": 0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "n": 1,
        "stop_token_ids": [STOP],
        "ignore_eos": False,
        "sampling_seed": 3,
    }


def test_a_script_answers_its_turns_in_order_per_session():
    async def scenario():
        async with serving(turns_policy([(4, STOP), (5, 6, STOP)])) as (_, client):
            outputs = [
                (await client.generate(request(session=name))).output_ids for name in "aabba"
            ]
        assert outputs == [(4, STOP), (5, 6, STOP), (4, STOP), (5, 6, STOP), (4, STOP)]

    run(scenario())


@pytest.mark.parametrize("fault", ["busy", "stale"])
def test_a_refusal_that_started_nothing_is_tried_again(fault):
    async def scenario():
        async with serving() as (engine, client):
            engine.fail_next(fault, times=2)
            turn = await client.generate(request())
            assert turn.output_ids
            assert engine.num_requests == 1

    run(scenario())


@pytest.mark.parametrize(
    ("fault", "error", "text"),
    [
        ("refuse", EngineRefused, "400: scripted refusal"),
        ("error", EngineError, "500: scripted error"),
        ("cut", EngineError, "connection lost"),
        ("truncate", EngineError, "connection lost"),
        ("changed", EngineError, "engine: "),
        ("abort", GenerationAborted, "was aborted: Aborted"),
        ("nan_logprobs", EngineError, "engine: answer"),
        ("wrong_mask", EngineError, "is not in its kept set"),
        ("bad_spans", EngineError, "do not cover"),
    ],
)
@pytest.mark.parametrize("json_only", [False, True])
def test_a_bad_answer_is_an_error_and_never_a_turn(fault, error, text, json_only):
    if fault == "changed" and json_only:
        pytest.skip("JSON has no checksum")

    async def scenario():
        async with serving(json_only=json_only) as (engine, client):
            engine.fail_next(fault)
            with pytest.raises(error, match=text):
                await client.generate(request())
            assert (await client.generate(request())).output_ids, "the next turn is good again"

    run(scenario())


def test_a_slow_answer_is_waited_for_and_an_engine_that_dies_is_an_error(tmp_path):
    async def scenario():
        async with serving() as (engine, client):
            engine.fail_next("slow")
            assert (await client.generate(request())).output_ids
        argv = [
            *(sys.executable, "-m", "rlmix.engine.scripted", "--model-path", str(tmp_path)),
            *("--accelerator", "h100", "--weights", "bf16", "--kv", "bf16", "--attention", "fa3"),
            *("--max-running-requests", "4", "--ready-file", str(tmp_path / "ready")),
        ]
        child = await asyncio.create_subprocess_exec(*argv)
        try:
            while not (tmp_path / "ready").exists():
                await asyncio.sleep(0.02)
            client = EngineClient(json.loads((tmp_path / "ready").read_text())["url"], timeout_s=60)
            await client.post_json("/faults", {"fault": "exit"})
            with pytest.raises(EngineError, match="connection lost"):
                await client.generate(request())
            assert await child.wait() == 1
            await client.close()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()

    run(scenario())


def test_an_answer_by_an_older_version_than_asked_for_is_an_error():
    async def scenario():
        async with serving(weight_version=4) as (engine, client):
            engine.fail_next("old_version")
            with pytest.raises(EngineError, match="sampled by version 0, asked for at least 4"):
                await client.generate(request(min_version=4))

    run(scenario())


def test_a_hanging_engine_costs_the_limit_and_the_error_says_what_was_waited_for():
    async def scenario():
        async with serving(timeout_s=1.5) as (engine, client):
            engine.fail_next("hang")
            started_s = time.monotonic()
            with pytest.raises(EngineError, match=r"within 1\.5 s while waiting for an answer"):
                await client.generate(request())
            assert time.monotonic() - started_s < 30
            engine.fail_next("busy", times=1000)
            with pytest.raises(EngineError, match=r"waiting for room \(503\)"):
                await client.generate(request())

    run(scenario())


def test_a_replica_behind_the_asked_version_is_waited_for(tmp_path):
    async def scenario():
        async with serving(weight_version=1) as (engine, client):
            task = asyncio.create_task(client.generate(request(min_version=2)))
            await asyncio.sleep(0.1)
            assert not task.done()
            await client.post_json(
                "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "2"}
            )
            turn = await task
            assert turn.version_spans[0].version == 2
            assert engine.weight_version == 2

    run(scenario())


def test_a_weight_update_in_the_middle_of_a_turn_gives_two_spans(tmp_path):
    async def scenario():
        script = turns_policy([tuple(range(8, 28))])
        async with serving(script, weight_version=1, token_s=0.05) as (_, client):
            task = asyncio.create_task(client.generate(request(max_new_tokens=20)))
            await asyncio.sleep(0.3)
            await client.post_json("/pause_generation", {"mode": "retract"})
            await client.post_json(
                "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "2"}
            )
            assert not task.done()
            await client.post_json("/continue_generation", {})
            turn = await task
        assert [span.version for span in turn.version_spans] == [1, 2]
        assert turn.version_spans[0].end == turn.version_spans[1].start
        assert turn.version_spans[1].end == 20

    run(scenario())


def test_pausing_with_abort_ends_running_turns_with_nothing_to_store():
    async def scenario():
        async with serving(turns_policy([tuple(range(8, 28))]), token_s=0.05) as (engine, client):
            task = asyncio.create_task(client.generate(request(max_new_tokens=20)))
            while engine.num_running == 0:
                await asyncio.sleep(0.01)
            await client.post_json("/pause_generation", {"mode": "abort"})
            with pytest.raises(GenerationAborted):
                await task

    run(scenario())


def test_loads_and_server_info_have_the_fields_that_a_router_reads():
    async def scenario():
        async with serving(weight_version=5, max_running=4) as (_, client):
            await client.generate(request())
            loads = await client.get_json("/v1/loads")
            info = await client.get_json("/server_info")
        load = loads["loads"][0]
        assert load["max_running_requests"] == 4
        assert load["num_running_reqs"] == 0
        assert len(load["decode_moments"]) == 6
        assert loads["emulated"] is True
        assert info["weight_version"] == "5"
        assert info["numerics"]["engine"] == "scripted"

    run(scenario())


def test_releasing_a_session_where_nobody_keeps_sessions_is_harmless():
    async def scenario():
        async with serving() as (_, client):
            await client.release("s")
        await EngineClient("http://127.0.0.1:9", timeout_s=1).release("s")

    run(scenario())
