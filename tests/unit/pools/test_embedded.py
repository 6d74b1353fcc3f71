"""Replicas of the embedded engine with the bundled model: killed in mid-session, replaced."""

import asyncio
import os
import signal
import sys

import pytest
from safetensors.torch import load_file

from rlmix.engine.client import EngineClient
from rlmix.engine.protocol import GenerateRequest, SamplingParams
from rlmix.model.bundle import resolve_model
from rlmix.pools.spec import SlotState
from rlmix.weights.publish import publish_version

pytestmark = pytest.mark.slow

FORMATS = {
    "b200-0": {"accelerator": "b200", "weights": "nvfp4", "kv": "fp8", "attention": "trtllm_mha"},
    "a100-0": {"accelerator": "a100", "weights": "bf16", "kv": "bf16", "attention": "flashinfer"},
}


def replica(stage, name):
    facts = FORMATS[name]
    argv = [
        sys.executable, "-m", "rlmix.engine.embedded", "--model-path", "{model_path}",
        "--weight-version", "{weight_version}", "--ready-file", "{ready_file}",
        "--max-running-requests", "8", "--pool", facts["accelerator"], "--replica", name,
    ]  # fmt: skip
    for key, value in facts.items():
        argv += [f"--{key}", value]
    return stage.spec(
        name, argv=tuple(argv), expected=facts, view=facts["weights"], pool=facts["accelerator"],
        boot_timeout_s=120.0, update_timeout_s=60.0,
    )  # fmt: skip


def test_a_killed_replica_is_replaced_on_the_newest_version_while_its_sessions_go_on(stage):
    model = resolve_model("bundled:tiny")
    state = load_file(model / "model.safetensors")
    store = stage.folder / "published"
    for version in (0, 1):
        publish_version(
            state, version=version, store=store, views=["bf16", "nvfp4"], model_files=model
        )

    async def session(client, number):
        """Three turns, each on the context of the one before."""
        context, answers = [5, 6, 7, 8 + number], []
        for turn in range(3):
            generation = await client.generate(
                GenerateRequest(
                    session_id=f"s{number}",
                    request_id=f"s{number}-{turn}",
                    input_ids=tuple(context),
                    sampling=SamplingParams(
                        temperature=1.0, top_p=0.95, top_k=64, max_new_tokens=24, seed=number
                    ),
                    record="support",
                )
            )
            context += [*generation.output_ids, 9]
            answers.append(generation)
        return answers

    async def scenario():
        fleet = stage.make_fleet(
            *[replica(stage, name) for name in FORMATS],
            store=store,
            canary_prompts=((5, 6, 7),),
            stall_timeout_s=60.0,
        )
        await fleet.start(0)
        client = EngineClient(stage.router_url, timeout_s=60.0)
        try:
            await fleet.roll_out(1)
            await fleet.wait_for_version(1, timeout_s=60)
            tasks = [asyncio.create_task(session(client, number)) for number in range(12)]
            await stage.until(lambda: is_working("b200-0"), timeout_s=20)
            killed = stage.status("b200-0")
            os.kill(killed.pid, signal.SIGKILL)
            answers = [turn for turns in await asyncio.gather(*tasks) for turn in turns]
            assert {turn.pool for turn in answers} == {"b200", "a100"}
            assert {span.version for turn in answers for span in turn.version_spans} == {1}
            # Twice for a session that had come from a busier replica just before.
            assert max(turn.rehomed for turn in answers) in (1, 2)
            await stage.until(
                lambda: (
                    stage.status("b200-0").incarnation == 2
                    and stage.status("b200-0").state is SlotState.READY
                ),
                timeout_s=90,
            )
            assert stage.status("b200-0").version == 1
            after = await asyncio.gather(*[session(client, number) for number in range(20, 26)])
            assert "b200-0" in {turn.replica for turns in after for turn in turns}
        finally:
            await client.close()

    async def is_working(name):
        record = await stage.routed(name)
        return record["turns"] > 0 and record["in_flight"] > 0

    async def whole():
        async with stage:
            await scenario()

    asyncio.run(whole())
    keys = {fields["numerics_key"] for kind, fields in stage.events if kind == "replica_ready"}
    assert {key.split("/")[1] for key in keys} == {"nvfp4", "bf16"}
