"""Timed replicas over HTTP: what a client and a router see of them, and their faults."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rlmix.engine.timed.cache import BLOCK_BYTES, PrefixCache, blocks_of
from rlmix.engine.timed.fleet import TimedFleet, read_specs, write_specs
from rlmix.engine.timed.player import OneUrl, Player, request_body
from rlmix.engine.timed.prompts import ID_BYTES, STREAM, read_chat, read_generate
from rlmix.engine.timed.replica import ReplicaSpec
from rlmix.engine.timed.steps import StepTimes
from rlmix.engine.timed.trace import Shape, Spread, make_trace

IDS_PER_BLOCK = BLOCK_BYTES // ID_BYTES


def spec(name: str, **fields: Any) -> ReplicaSpec:
    steps = StepTimes(fixed_s=0.001, prefill_token_s=1e-6)
    return ReplicaSpec(
        name=name, accelerator="none", steps=steps, max_running=8, kv_tokens=100_000, **fields
    )


class Stage:
    def __init__(self, fleet: TimedFleet, http: aiohttp.ClientSession) -> None:
        self.fleet, self.http = fleet, http

    async def generate(
        self, name: str, ids: bytes, tokens: int, *, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, Any]]:
        url = self.fleet.replicas[name].url + "/generate"
        body = request_body(ids, tokens)
        async with self.http.post(url, data=body, headers=headers) as response:
            return response.status, await response.json(content_type=None)

    async def get(self, name: str, path: str) -> Any:
        async with self.http.get(self.fleet.replicas[name].url + path) as response:
            return await response.json(content_type=None)

    async def busy(self, name: str, count: int = 1) -> None:
        while self.fleet.replicas[name].in_flight < count:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def stage(*specs: ReplicaSpec) -> AsyncIterator[Stage]:
    fleet = TimedFleet(specs)
    await fleet.start()
    async with aiohttp.ClientSession() as http:
        yield Stage(fleet, http)
    await fleet.stop()


def ids(count: int, start: int = 0) -> bytes:
    return STREAM[start * ID_BYTES : (start + count) * ID_BYTES - 1]


def test_blocks_stand_for_everything_before_them() -> None:
    text, other = b"a" * (3 * BLOCK_BYTES + 5), b"b" + b"a" * (3 * BLOCK_BYTES + 4)
    assert len(blocks_of(text)) == 3
    assert not set(blocks_of(text)) & set(blocks_of(other))
    head = blocks_of(text[: 2 * BLOCK_BYTES])
    assert head + blocks_of(text, state=head[-1], start=2 * BLOCK_BYTES) == blocks_of(text)


def test_the_cache_forgets_ends_before_beginnings_and_the_unused_first() -> None:
    cache = PrefixCache(50)
    cache.insert([1, 2, 3], block_tokens=10, room_tokens=50)
    cache.insert([7, 8], block_tokens=10, room_tokens=50)
    cache.insert([1, 4], block_tokens=10, room_tokens=50)
    # Six blocks do not fit: 3 was used longest ago.
    assert (cache.match([1, 2, 3]), cache.match([7, 8]), cache.match([1, 4])) == (2, 2, 2)
    cache.insert([], block_tokens=10, room_tokens=20)
    assert (cache.match([7, 8]), cache.match([1, 4]), cache.held_tokens) == (0, 2, 20)


def test_a_body_is_read_whatever_stands_around_its_ids() -> None:
    asked = read_generate(
        b'{"rid": "a", "sampling_params": {"max_new_tokens": 9}, "input_ids": [1, 22,333 ],'
        b' "return_logprob": true}'
    )
    assert (asked.rid, asked.prompt_tokens, asked.output_tokens) == ("a", 3, 9)
    assert asked.logprobs
    assert not asked.stream
    assert read_chat(b'{"messages":[{"role":"user","content":"hello there"}]}').prompt_tokens == 5
    with pytest.raises(ValueError, match="input_ids: missing"):
        read_generate(b'{"text": "no ids"}')


def test_an_answer_has_the_planned_length_and_the_next_turn_finds_it_in_the_cache() -> None:
    async def run() -> None:
        async with stage(spec("a")) as here:
            prompt = ids(10 * IDS_PER_BLOCK)
            # Two blocks and one id, whose comma completes the twelfth block.
            status, first = await here.generate("a", prompt, 2 * IDS_PER_BLOCK + 1)
            assert status == 200
            meta = first["meta_info"]
            assert (meta["prompt_tokens"], meta["cached_tokens"]) == (10 * IDS_PER_BLOCK, 0)
            assert len(first["output_ids"]) == meta["completion_tokens"] == 2 * IDS_PER_BLOCK + 1
            output = b",".join(b"%d" % token for token in first["output_ids"])
            _, second = await here.generate("a", prompt + b"," + output + b"," + ids(40), 1)
            assert second["meta_info"]["cached_tokens"] == pytest.approx(12 * IDS_PER_BLOCK, abs=3)
            loads = (await here.get("a", "/v1/loads"))["loads"][0]
            assert (loads["num_running_reqs"], loads["num_waiting_reqs"]) == (0, 0)
            assert loads["decode_moments"][0] == pytest.approx(2 * IDS_PER_BLOCK)

    asyncio.run(run())


def test_a_replica_that_is_too_old_says_so_and_spans_tell_who_sampled_what() -> None:
    async def run() -> None:
        async with stage(spec("a")) as here:
            status, _ = await here.generate("a", ids(9), 5, headers={"X-Min-Version": "1"})
            assert status == 409
            asking = asyncio.create_task(here.generate("a", ids(9), 200))
            await here.busy("a")
            await asyncio.sleep(0.02)
            assert await here.fleet.inject("a", {"fault": "version", "version": 1}) == 1
            _, answer = await asking
            old, new = answer["meta_info"]["weight_versions"]
            assert (old["version"], old["start"], new["version"], new["end"]) == ("0", 0, "1", 200)
            assert old["end"] == new["start"]
            assert 1 <= old["end"] < 200
            status, _ = await here.generate("a", ids(9), 5, headers={"X-Min-Version": "1"})
            assert status == 200

    asyncio.run(run())


def test_pausing_aborts_with_what_there_is_and_nothing_is_answered_until_it_continues() -> None:
    async def run() -> None:
        async with stage(spec("a")) as here:
            url = here.fleet.replicas["a"].url
            asking = asyncio.create_task(here.generate("a", ids(9), 4000))
            await here.busy("a")
            async with here.http.post(url + "/pause_generation", json={"mode": "abort"}):
                pass
            _, answer = await asking
            assert answer["meta_info"]["finish_reason"]["type"] == "abort"
            assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] < 4000
            later = asyncio.create_task(here.generate("a", ids(9), 3))
            await here.busy("a")
            async with here.http.get(url + "/ready") as response:
                assert response.status == 503
            assert not later.done()
            async with here.http.post(url + "/continue_generation"):
                pass
            assert (await later)[0] == 200

    asyncio.run(run())


def test_a_client_that_leaves_frees_its_place() -> None:
    async def run() -> None:
        async with stage(spec("a")) as here:
            asking = asyncio.create_task(here.generate("a", ids(9), 100_000 - 9))
            await here.busy("a")
            asking.cancel()
            replica = here.fleet.replicas["a"]
            while replica.in_flight:
                await asyncio.sleep(0.001)
            assert replica.tally.left == 1

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["kill", "flap"])
def test_an_unreachable_replica_cuts_its_turns_and_comes_back_at_its_address(fault: str) -> None:
    async def run() -> None:
        async with stage(spec("a")) as here:
            asking = asyncio.create_task(here.generate("a", ids(9), 50_000))
            await here.busy("a")
            order = {"fault": fault, "down_s": 0.05, "up_s": 0.0}
            assert await here.fleet.inject("a", order) == 1
            with pytest.raises(aiohttp.ClientError):
                await asking
            if fault == "kill":
                with pytest.raises(aiohttp.ClientConnectorError):
                    await here.generate("a", ids(9), 1)
                await here.fleet.inject("a", {"fault": "restart"})
            while not here.fleet.describe()["a"]["is_up"]:
                await asyncio.sleep(0.01)
            assert (await here.generate("a", ids(9), 1))[0] == 200

    asyncio.run(run())


def test_a_stalled_replica_answers_everything_but_turns_and_a_hung_one_nothing() -> None:
    async def run() -> None:
        async with stage(spec("a"), spec("b")) as here:
            asking = [asyncio.create_task(here.generate(name, ids(9), 50)) for name in "ab"]
            await here.busy("a")
            await here.busy("b")
            assert await here.fleet.inject("a", {"fault": "stall"}) == 1
            assert await here.fleet.inject("b", {"fault": "hang"}) == 1
            before = (await here.get("a", "/v1/loads"))["total_generated_tokens"]
            await asyncio.sleep(0.1)
            loads = await here.get("a", "/v1/loads")
            assert (loads["total_generated_tokens"], loads["paused"]) == (before, False)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await here.get("b", "/ping")
            assert not any(task.done() for task in asking)
            for task in asking:
                task.cancel()

    asyncio.run(run())


def test_an_unknown_fault_names_the_known_ones() -> None:
    async def run() -> None:
        async with (
            stage(spec("a")) as here,
            here.http.post(here.fleet.control_url + "/fleet/a", json={"fault": "fire"}) as response,
        ):
            assert response.status == 400
            assert "kill, restart, hang, stall, flap, version" in await response.text()

    asyncio.run(run())


def test_a_trace_is_a_function_of_its_seed_and_a_group_shares_its_prompt() -> None:
    shape = Shape(group_size=2, shared_tokens=100)
    first, again, other = (make_trace(4, seed=seed, shape=shape) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0].prompt == first[1].prompt != first[2].prompt
    assert first[0].prompt[: 100 * ID_BYTES] == first[2].prompt[: 100 * ID_BYTES]
    assert first[0].turns != first[1].turns


def test_a_player_plays_every_turn_and_counts_where_prefixes_were_found() -> None:
    async def run() -> None:
        shape = Shape(
            turns=Spread(median=3, sigma=0, least=3, most=3),
            prompt_tokens=Spread(median=1024, sigma=0, least=1024, most=1024),
            output_tokens=Spread(median=20, sigma=0, least=20, most=20),
            observation_tokens=Spread(median=30, sigma=0, least=30, most=30),
            tool_s=Spread(median=0.01, sigma=0, least=0.01, most=0.01),
        )
        async with stage(spec("a")) as here:
            target = OneUrl(here.fleet.replicas["a"].url)
            player = Player(target, concurrency=3, time_scale=1.0, turn_timeout_s=20)
            played = await player.play(make_trace(5, seed=1, shape=shape))
            assert (played.sessions_done, played.sessions_lost, played.num_errors) == (5, 0, 0)
            assert [turn.prompt_tokens for turn in played.turns if turn.session_id == "s1-0"] == [
                1024, 1074, 1124,
            ]  # fmt: skip
            # The first turn finds nothing, the others the four blocks of the prompt.
            assert played.hit_frac == pytest.approx(2 * 1024 / (1024 + 1074 + 1124), rel=0.01)

    asyncio.run(run())


def test_replicas_survive_their_journey_through_json() -> None:
    specs = [spec("a", version=3, time_scale=0.5), spec("b", context_length=10)]
    assert read_specs(write_specs(specs)) == specs
