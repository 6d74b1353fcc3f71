"""The admission gate at work: what a fleet does with engines that answer wrongly."""

import asyncio
import re

import pytest

from rlmix.engine.scripted import HashPolicy, ScriptedEngine
from rlmix.pools.spec import AdmissionRefused, SlotState
from rlmix.pools.verifying import Verifier

CANARIES = {"canary_prompts": ((1, 2), (3, 4)), "canary_tokens": 4}


def run(stage, scenario):
    async def staged():
        async with stage:
            await scenario()

    asyncio.run(asyncio.wait_for(staged(), 180))


def reason_of(stage, name):
    kind = "replica_quarantined"
    return [f["reason"] for k, f in stage.events if k == kind and f["replica"] == name]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        # Whether the other replica was first decides what the checksum is held against.
        ("partial_update", "part of an update was lost|the weights did not"),
        ("stale_update", "says it serves version '0' after it accepted 1"),
        ("failed_update", "scripted failure in mid-update"),
    ],
)
def test_an_update_that_did_not_arrive_takes_the_replica_out_and_the_other_serves_on(
    stage, fault, reason
):
    async def scenario():
        fleet = stage.make_fleet(stage.spec("h100-0"), stage.spec("h100-1"), **CANARIES)
        await fleet.start(0)
        stage.publish(1)
        await stage.post(stage.status("h100-1").url + "/faults", fault=fault)
        await fleet.roll_out(1)
        await stage.until(lambda: reason_of(stage, "h100-1"), timeout_s=60)
        await stage.until(lambda: stage.status("h100-0").version == 1, timeout_s=60)
        # It is started again on the whole version and passes then.
        await stage.until(lambda: stage.status("h100-1").version == 1, timeout_s=60)
        await fleet.wait_for_version(1, timeout_s=60)

    run(stage, scenario)
    assert re.search(reason, reason_of(stage, "h100-1")[0])
    assert not reason_of(stage, "h100-0")


def test_a_replica_that_never_passes_is_held_with_its_reason_and_the_run_starts_without_it(stage):
    async def scenario():
        refused = stage.spec("h100-1", canary_tolerance_nats=-1.0)

        async def references(version, outputs):
            return [output.sampler_logprobs for output in outputs]

        fleet = stage.make_fleet(stage.spec("h100-0"), refused, references=references, **CANARIES)
        await fleet.start(0)
        assert stage.status("h100-0").state is SlotState.READY
        held = stage.status("h100-1")
        assert held.is_held
        assert held.state is SlotState.QUARANTINED
        assert "canary logprobs differ" in held.reason
        assert [replica["name"] for replica in await stage.router.replicas()] == ["h100-0"]

    run(stage, scenario)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan_logprobs", "is not finite"),
        ("bad_spans", "do not cover"),
        ("old_version", "version probe: a turn was sampled by version 0"),
    ],
)
def test_a_probe_names_what_is_wrong_with_an_answer(fault, reason):
    async def scenario():
        async with ScriptedEngine(HashPolicy(vocab_size=64), weight_version=3) as engine:
            verifier = Verifier(engine.url, name="h100-0", token=None)
            await verifier.check_sampling((1, 2), version=3, is_short=False)
            engine.fail_next(fault, times=2)
            with pytest.raises(AdmissionRefused, match=reason):
                await verifier.check_sampling((1, 2), version=3, is_short=False)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_kept_set_without_its_token_fails_the_mask_probe():
    async def scenario():
        async with ScriptedEngine(HashPolicy(vocab_size=64)) as engine:
            verifier = Verifier(engine.url, name="h100-0", token=None)
            engine.fail_next("wrong_mask", times=2)  # The first request asks for no kept sets.
            with pytest.raises(AdmissionRefused, match=r"mask probe: .* not in its kept set"):
                await verifier.check_sampling((1, 2), version=0, is_short=True)

    asyncio.run(asyncio.wait_for(scenario(), 60))
