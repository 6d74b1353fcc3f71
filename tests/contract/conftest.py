"""One engine after the other, each started once: the same tests run against all of them."""

import os

import pytest

from tests.contract import servers
from tests.contract.checkpoints import HashReference, build
from tests.contract.servers import Engine
from tests.contract.talking import reset, run

ENGINES = ("scripted-hash", "embedded-dense", "embedded-moe", "sglang-dense", "sglang-moe")

LONG_TOKENS = {"scripted": 300, "embedded": 900, "sglang": 300}
"""Seconds on each of them, on the machines that this was tried on."""

SCRIPTED_NATS = 1e-5
"""A script's logprobs are its reference's, rounded to float32."""

NOISE_FACTOR = {"dense": 4.0, "moe": 8.0}
"""How many times as far as BF16 moves Transformers an engine in BF16 may be from float32: another
order of additions, other places of rounding, and a short turn instead of a long average. Experts
that flip stay in a turn's keys and values: of 240 turns of 12 tokens at temperature 0.8 from a real
server the furthest was 6 times as far on average, and 2 times without experts."""


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {kind: build(kind, root / kind) for kind in ("dense", "moe")}


@pytest.fixture(scope="session", params=ENGINES)
def running_engine(request, checkpoints, tmp_path_factory):
    kind, _, model = request.param.partition("-")
    if kind == "sglang" and servers.sglang_python() is None:
        message = (
            "no SGLang environment: run scripts/sglang-env (11 GB, up to 12 minutes), or name one "
            "in RLMIX_SGLANG_ENV"
        )
        if os.environ.get("RLMIX_REQUIRE_SGLANG") == "1":
            pytest.fail(message)
        pytest.skip(message)
    shape = "dense" if model == "hash" else model
    checkpoint = checkpoints[shape]
    noise_nats = NOISE_FACTOR[shape] * checkpoint.noise_nats()
    start = getattr(servers, kind)
    with start(checkpoint.folders[0], tmp_path_factory.mktemp(request.param)) as url:
        yield Engine(
            name=request.param,
            kind=kind,
            url=url,
            folders=checkpoint.folders,
            reference=HashReference() if kind == "scripted" else checkpoint,
            mean_nats=SCRIPTED_NATS if kind == "scripted" else noise_nats,
            max_nats=10 * (SCRIPTED_NATS if kind == "scripted" else noise_nats),
            long_tokens=LONG_TOKENS[kind],
        )


@pytest.fixture
def engine(running_engine):
    """The engine, idle and on version 0 before and after each test."""
    run(reset(running_engine))
    return running_engine
