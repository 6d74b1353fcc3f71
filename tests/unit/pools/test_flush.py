"""Cached prefixes are forgotten as soon as nothing holds them, and at the limit it is said."""

import asyncio

import pytest

from rlmix.core.errors import EngineError
from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import GenerateRequest, SamplingParams
from rlmix.engine.scripted.policies import HashPolicy
from rlmix.engine.scripted.server import ScriptedEngine
from rlmix.pools.engine_admin import EngineAdmin

REQUEST = GenerateRequest(
    session_id="s",
    request_id="r",
    input_ids=(1, 2, 3),
    sampling=SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=40, stop_token_ids=(), seed=1,
        ignore_eos=True,
    ),
    record="none",
)  # fmt: skip


def test_a_flush_is_asked_for_again_until_the_last_request_is_put_away() -> None:
    async def scenario() -> None:
        async with ScriptedEngine(HashPolicy(vocab_size=16, seed=1), token_s=0.02) as engine:
            admin = EngineAdmin(engine.url, name="p-0", token=None)
            client = EngineClient(engine.url, timeout_s=20)
            turn = asyncio.create_task(client.generate(REQUEST))
            while not engine.num_running:
                await asyncio.sleep(0.005)
            with pytest.raises(
                EngineError, match=r"p-0 answered POST /flush_cache with 400: .*run"
            ):
                await admin.flush_cache(timeout_s=0.1)
            assert not turn.done()
            await admin.flush_cache(timeout_s=20)
            assert engine.num_running == 0
            assert len((await turn).output_ids) == 40
            await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_engine_that_refuses_the_key_is_not_asked_twice() -> None:
    async def scenario() -> None:
        async with ScriptedEngine(HashPolicy(vocab_size=16, seed=1), key="k") as engine:
            admin = EngineAdmin(engine.url, name="p-0", token="another")
            with pytest.raises(EngineError, match="with 401"):
                await admin.flush_cache(timeout_s=20)

    asyncio.run(asyncio.wait_for(scenario(), 10))
