"""What the tests of the contract share: a client, requests, raw HTTP, waiting."""

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import aiohttp
import numpy as np

from rlmix.core.errors import EngineError
from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import GenerateRequest, SamplingParams
from tests.contract.checkpoints import VOCAB

LIMIT_S = 300.0


@asynccontextmanager
async def client_of(engine, *, timeout_s=120.0):
    client = EngineClient(engine.url, timeout_s=timeout_s)
    try:
        yield client
    finally:
        await client.close()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, LIMIT_S))


def prompt(seed, length=24):
    """Random ids, the end of text not among them."""
    return tuple(np.random.default_rng(seed).integers(0, VOCAB - 1, length).tolist())


def request(ids, *, record="none", head_k=0, rid="r", min_version=None, salt=None, **changes):
    fields = {
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 12,
        "stop_token_ids": (),
        "seed": 3,
        "ignore_eos": True,
    }
    return GenerateRequest(
        session_id=rid,
        request_id=rid,
        input_ids=tuple(ids),
        sampling=SamplingParams(**{**fields, **changes}),
        record=record,
        head_k=head_k,
        min_version=min_version,
        cache_salt=salt,
    )


def body(ids, **changes):
    """A `/generate` body; keys of `sampling_params` and of the body itself may be changed."""
    params = {
        "max_new_tokens": 12,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "stop_token_ids": [],
        "ignore_eos": True,
    }
    document = {"input_ids": list(ids), "return_logprob": True}
    for name, value in changes.items():
        target = params if name in params or name == "sampling_seed" else document
        target[name] = value
    return {**document, "sampling_params": params}


async def ask(engine, method, path, document=None, *, timeout_s=120.0):
    """(status, JSON document or text) of one exchange; nothing is interpreted."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.request(method, engine.url + path, json=document) as response,
    ):
        if response.content_type == "application/json":
            return response.status, await response.json()
        return response.status, await response.text()


async def load_of(engine):
    _, document = await ask(engine, "GET", "/v1/loads?include=all")
    return document["loads"][0]


async def version_of(engine):
    _, document = await ask(engine, "GET", "/model_info")
    return document["weight_version"]


async def checksum_of(engine):
    status, document = await ask(engine, "POST", "/weights_checker", {"action": "checksum"})
    assert status == 200, document
    return document["per_engine_checksum"]


async def wait_until(condition, what, limit_s=120.0):
    deadline_s = time.monotonic() + limit_s
    while not await condition():
        assert time.monotonic() < deadline_s, f"waited {limit_s:g} s for {what}"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def turn_under_way(engine, client, **changes):
    """A task whose turn has sampled some tokens and has many to go."""

    async def steps():
        # Null until the real server has decoded something.
        return ((await load_of(engine))["decode_moments"] or [0])[0]

    before = await steps()
    fields = {"rid": "long", "max_new_tokens": engine.long_tokens, **changes}
    task = asyncio.create_task(client.generate(request(prompt(13, 30), **fields)))

    async def is_under_way():
        return task.done() or await steps() > before + 5

    try:
        await wait_until(is_under_way, "the turn to be under way")
        assert not task.done(), "the turn was over before anything could happen in it"
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def load_version(engine, version, **changes):
    """Status and document of an update from disk. It flushes nothing unless told to: without a
    pause a real server refuses that (400) when an answer has gone out and its scheduler has not put
    the turn away yet. `flush` asks again."""
    document = {
        "model_path": str(engine.folders.get(version, "")),
        "weight_version": str(version),
        "flush_cache": False,
        "abort_all_requests": False,
        **changes,
    }
    return await ask(engine, "POST", "/update_weights_from_disk", document)


async def flush(engine):
    """Forget the cached prefixes as soon as the engine has put away what it has answered."""

    async def is_flushed():
        return (await ask(engine, "POST", "/flush_cache"))[0] == 200

    await wait_until(is_flushed, "the cache to be flushed", limit_s=30)


async def reset(engine):
    """Serving version 0, idle, whatever a test did."""
    await ask(engine, "POST", "/abort_request", {"rid": "", "abort_all": True})
    await ask(engine, "POST", "/continue_generation", {})
    # An update that a failed test left open.
    await ask(engine, "POST", "/end_weight_update", {})

    async def is_idle():
        load = await load_of(engine)
        return load["num_running_reqs"] == load["num_waiting_reqs"] == 0

    await wait_until(is_idle, "the engine to be idle")
    # After an update that was refused its flush a real server tells the old version of new weights.
    if await version_of(engine) != "0" or engine.kind != "scripted":
        status, document = await load_version(engine, 0)
        assert status == 200, document
        await flush(engine)


def gaps(engine, turn, ids, *, version=0, temperature=0.8, start=0):
    """|sampler - reference| of each sampled token from `start` on, nats."""
    rows = engine.reference.logprobs(
        version, [*ids, *turn.output_ids], num_new=len(turn.output_ids), temperature=temperature
    )
    chosen = rows[np.arange(len(rows)), list(turn.output_ids)]
    return np.abs(np.array(turn.sampler_logprobs) - chosen)[start:]


async def error_of(awaitable):
    """The text of the EngineError that something ends with; "" when it ends well."""
    with suppress(asyncio.CancelledError):
        try:
            await awaitable
        except EngineError as error:
            return str(error)
    return ""
