"""Aborting, pausing and changing weights while a turn is under way."""

import asyncio

import pytest

from rlmix.engine.protocol import GenerationAborted
from tests.contract.differences import expected
from tests.contract.talking import (
    ask,
    body,
    client_of,
    error_of,
    flush,
    gaps,
    load_of,
    load_version,
    prompt,
    request,
    run,
    turn_under_way,
    version_of,
    wait_until,
)

TEMPERATURE = 0.8


def spans_of(turn):
    return [span.version for span in turn.version_spans]


def test_an_aborted_turn_says_so_and_is_never_taken_for_a_whole_one(engine):
    async def scenario():
        async with client_of(engine) as client, turn_under_way(engine, client) as task:
            status, _ = await ask(engine, "POST", "/abort_request", {"rid": "nobody"})
            assert status == 200
            assert not task.done()
            status, _ = await ask(engine, "POST", "/abort_request", {"rid": "long"})
            assert status == 200
            with pytest.raises(GenerationAborted, match="long was aborted"):
                await task

    run(scenario())


def test_the_document_of_an_aborted_turn_keeps_its_tokens_under_finish_reason_abort(engine):
    async def scenario():
        document = body(prompt(13, 30), rid="partial", max_new_tokens=engine.long_tokens)
        task = asyncio.create_task(ask(engine, "POST", "/generate", document))

        async def runs():
            return (await load_of(engine))["num_running_reqs"] == 1

        await wait_until(runs, "the turn to run")
        await ask(engine, "POST", "/abort_request", {"rid": "partial"})
        return await task

    status, document = run(scenario())
    assert status == 200
    assert document["meta_info"]["finish_reason"]["type"] == "abort"
    count = len(document["output_ids"])
    assert count < engine.long_tokens
    assert len(document["meta_info"]["output_token_logprobs"]) == count


def test_a_client_that_leaves_frees_its_slot(engine):
    async def scenario():
        async with client_of(engine) as client:
            async with turn_under_way(engine, client) as task:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            await client.close()

            async def is_idle():
                return (await load_of(engine))["num_running_reqs"] == 0

            await wait_until(is_idle, "the slot to be free", limit_s=30)

    run(scenario())


def test_while_paused_requests_wait_ready_says_no_and_ping_says_yes(engine):
    async def scenario():
        async with client_of(engine) as client:
            status, _ = await ask(engine, "POST", "/pause_generation", {"mode": "retract"})
            assert status == 200
            task = asyncio.create_task(client.generate(request(prompt(40), rid="waits")))
            await asyncio.sleep(1.0)
            assert not task.done()
            assert (await ask(engine, "GET", "/ping"))[0] == 200
            assert (await ask(engine, "GET", "/ready"))[0] == 503
            status, _ = await ask(engine, "POST", "/continue_generation", {})
            assert status == 200
            assert len((await task).output_ids) == 12
            assert (await ask(engine, "GET", "/ready"))[0] == 200

    run(scenario())


async def update_in_mid_turn(engine, client, mode, **changes):
    """(status, document) of the update, and the turn's task after continue."""
    async with turn_under_way(engine, client) as task:
        status, _ = await ask(engine, "POST", "/pause_generation", {"mode": mode})
        assert status == 200
        answer = await load_version(engine, 1, **changes)
        told = "1"
        if answer[0] != 200:
            told = expected("version told after an update whose flush was refused", engine)
        assert await version_of(engine) == told
        await ask(engine, "POST", "/continue_generation", {})
        await asyncio.wait({task})
    return answer, task


def test_retract_recomputes_under_the_new_weights(engine):
    async def scenario():
        async with client_of(engine) as client:
            (status, document), task = await update_in_mid_turn(
                engine, client, "retract", flush_cache=True
            )
            assert (status, document["success"]) == (200, True)
            return await task

    turn = run(scenario())
    assert spans_of(turn) == [0, 1]
    first, second = turn.version_spans
    assert 0 < first.end == second.start < second.end == engine.long_tokens
    old = gaps(engine, turn, prompt(13, 30))[: first.end]
    assert old.mean() < 2 * engine.mean_nats
    if engine.kind == "scripted":  # Its script was chosen when the turn began.
        return
    new = gaps(engine, turn, prompt(13, 30), version=1, start=second.start)
    assert new.mean() < 2 * engine.mean_nats


def test_in_place_goes_on_with_the_old_cache(engine):
    async def scenario():
        async with client_of(engine) as client:
            (status, document), task = await update_in_mid_turn(engine, client, "in_place")
            assert (status, document["success"]) == (200, True)
            return await task

    turn = run(scenario())
    assert spans_of(turn) == [0, 1]
    if engine.kind == "scripted":
        return
    start = turn.version_spans[1].start
    for version in (0, 1):
        assert gaps(engine, turn, prompt(13, 30), version=version, start=start).mean() > 0.5


def test_in_place_with_the_usual_flush_is_a_400_although_the_weights_changed(engine):
    async def scenario():
        async with client_of(engine) as client:
            (status, document), task = await update_in_mid_turn(
                engine, client, "in_place", flush_cache=True
            )
            assert (status, document["success"]) == (400, False)
            assert "cache" in document["message"]
            assert "not flushed" in document["message"]
            return await task

    assert spans_of(run(scenario())) == [0, 1]


def test_abort_ends_the_turn_before_the_weights_change(engine):
    async def scenario():
        async with client_of(engine) as client:
            (status, document), task = await update_in_mid_turn(engine, client, "abort")
            assert (status, document["success"]) == (200, True)
            with pytest.raises(GenerationAborted):
                await task
            turn = await client.generate(request(prompt(41)))
            assert spans_of(turn) == [1]

    run(scenario())


def test_without_a_pause_the_update_waits_and_later_turns_wait_behind_it(engine):
    async def scenario():
        async with client_of(engine) as client, turn_under_way(engine, client) as task:
            update = asyncio.create_task(load_version(engine, 1))
            await asyncio.sleep(0.1)
            late = asyncio.create_task(client.generate(request(prompt(42), rid="late")))
            status, document = await update
            assert (status, document["success"]) == (200, True)
            return await task, await late

    old, late = run(scenario())
    assert spans_of(old) == [0]
    assert spans_of(late) == [1]


def test_an_update_may_abort_what_runs_instead_of_waiting(engine):
    async def scenario():
        async with client_of(engine) as client, turn_under_way(engine, client) as task:
            status, document = await load_version(engine, 1, abort_all_requests=True)
            assert (status, document["success"]) == (200, True)
            assert "aborted" in await error_of(task)
            await flush(engine)

    run(scenario())


def test_a_flush_is_refused_while_requests_run(engine):
    async def scenario():
        async with client_of(engine) as client, turn_under_way(engine, client):
            status, _ = await ask(engine, "POST", "/flush_cache")
            assert status == 400
        await ask(engine, "POST", "/abort_request", {"rid": "", "abort_all": True})

        async def is_idle():
            return (await load_of(engine))["num_running_reqs"] == 0

        await wait_until(is_idle, "the engine to be idle")
        await flush(engine)

    run(scenario())
