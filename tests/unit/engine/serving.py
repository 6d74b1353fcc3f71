"""What the tests of a served engine share: a client, requests, and waiting."""

import asyncio
import time
from contextlib import asynccontextmanager

import numpy as np
import torch

from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import GenerateRequest, SamplingParams

VOCAB = 512
MAX_RUNNING = 8
MASK_CAP = 64


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
