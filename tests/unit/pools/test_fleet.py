"""The fleet with scripted engines: admission, updates, deaths, replacement, the end."""

import asyncio
import os
import shutil
import signal
import sys

import pytest

from rlmix.core.errors import EngineError, LaunchError, WeightSyncError
from rlmix.engine.scripted import HashPolicy
from rlmix.pools.spec import SlotState


def run(stage, scenario):
    async def whole():
        async with stage:
            return await scenario()

    return asyncio.run(whole())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_replica_is_verified_before_the_router_hears_of_it(stage):
    policy = HashPolicy(vocab_size=256, seed=0)  # what the scripted engine samples from

    async def references(version, outputs):
        assert await stage.router.replicas() == []
        return [
            [
                float(policy.logprobs([*output.prompt_ids, *before], version=version)[token])
                for before, token in prefixes(output.output_ids)
            ]
            for output in outputs
        ]

    async def scenario():
        fleet = stage.make_fleet(
            stage.spec("h100-0"),
            references=references,
            canary_prompts=((1, 2, 3), (4, 5)),
        )
        await fleet.start(0)
        assert (await stage.routed("h100-0"))["state"] == "ready"

    run(stage, scenario)
    ready = next(fields for kind, fields in stage.events if kind == "replica_ready")
    assert ready["canary_mean_abs_nats"] < 1e-5
    assert ready["numerics_key"].startswith("h100/bf16/")


def prefixes(ids):
    return [(ids[:position], token) for position, token in enumerate(ids)]


def test_a_fleet_serves_through_the_router_and_stops_without_leaving_a_process(stage):
    async def scenario():
        fleet = stage.make_fleet(*[stage.spec(f"h100-{i}") for i in range(2)])
        await fleet.start(0)
        answers = [await stage.generate(f"s{i}") for i in range(4)]
        assert [status for status, _ in answers] == [200] * 4
        assert {headers["X-Rlmix-Replica"] for _, headers in answers} == {"h100-0", "h100-1"}
        pids = [status.pid for status in fleet.status()]
        assert all(is_running(pid) for pid in pids)
        assert [(s.state, s.version, s.incarnation) for s in fleet.status()] == [
            ("ready", 0, 1)
        ] * 2
        await fleet.stop()
        assert not any(is_running(pid) for pid in pids)
        assert await stage.router.replicas() == []
        assert [status.state for status in fleet.status()] == ["stopped"] * 2

    run(stage, scenario)
    assert stage.kinds("h100-0") == ["replica_starting", "replica_ready", "replica_stopped"]


def test_an_engine_killed_with_sigkill_is_replaced_and_its_sessions_go_on(stage):
    async def scenario():
        fleet = stage.make_fleet(*[stage.spec(f"h100-{i}") for i in range(2)])
        await fleet.start(0)
        await fleet.roll_out(0)
        home = (await stage.generate("s"))[1]["X-Rlmix-Replica"]
        before = stage.status(home)
        os.kill(before.pid, signal.SIGKILL)
        noticed_s = await stage.until(lambda: stage.status(home).state is not SlotState.READY)
        assert noticed_s < 3.0
        status, headers = await stage.generate("s")
        assert (status, headers["X-Rlmix-Rehomed"]) == (200, "1")
        await stage.until(lambda: stage.status(home).state is SlotState.READY)
        after = stage.status(home)
        assert (after.incarnation, after.restarts) == (2, 1)
        assert after.pid != before.pid
        assert (await stage.routed(home))["url"] == after.url
        return home

    home = run(stage, scenario)
    assert stage.kinds(home) == [
        "replica_starting", "replica_ready", "replica_dead", "replica_restarting",
        "replica_starting", "replica_ready", "replica_stopped",
    ]  # fmt: skip
    dead = next(fields for kind, fields in stage.events if kind == "replica_dead")
    assert "signal SIGKILL" in dead["reason"]


def test_a_replica_whose_actor_is_gone_is_replaced(stage):
    async def scenario():
        fleet = stage.make_fleet(stage.spec("h100-0"))
        await fleet.start(0)
        stage.handles["h100-0"].kill()
        await stage.until(lambda: stage.status("h100-0").incarnation == 2)
        await stage.until(lambda: stage.status("h100-0").state is SlotState.READY)

    run(stage, scenario)


def test_a_roll_out_reaches_every_replica_and_the_newest_order_wins(stage):
    for version in (1, 2, 3):
        stage.publish(version)

    async def scenario():
        fleet = stage.make_fleet(*[stage.spec(f"h100-{i}") for i in range(2)])
        await fleet.start(0)
        for version in (1, 2, 3):
            await fleet.roll_out(version)  # returns at once
        assert {status.version for status in fleet.status()} == {0}
        await fleet.wait_for_version(3, timeout_s=10)
        assert [record["version"] for record in await stage.router.replicas()] == [3, 3]
        with pytest.raises(WeightSyncError, match="only grow"):
            await fleet.roll_out(2)

    run(stage, scenario)
    updates = [fields for kind, fields in stage.events if kind == "replica_updated"]
    assert len(updates) == 2  # one each: 1 and 2 were overtaken
    assert all(fields["version"] == 3 and fields["pause_s"] > 0 for fields in updates)


def test_a_replacement_starts_on_the_newest_version_even_when_the_first_is_gone(stage):
    stage.publish(5)

    async def scenario():
        fleet = stage.make_fleet(stage.spec("h100-0"))
        await fleet.start(0)
        await fleet.roll_out(5)
        await fleet.wait_for_version(5, timeout_s=10)
        shutil.rmtree(stage.store / "bf16" / "v000000")
        os.kill(stage.status("h100-0").pid, signal.SIGKILL)
        await stage.until(lambda: stage.status("h100-0").incarnation == 2)
        await fleet.wait_for_version(5, timeout_s=10)
        assert (await stage.routed("h100-0"))["version"] == 5

    run(stage, scenario)


def test_damaged_files_are_refused_and_the_replica_serves_on(stage):
    stage.publish(1, damaged=True)
    stage.publish(2)

    async def scenario():
        fleet = stage.make_fleet(stage.spec("h100-0"))
        await fleet.start(0)
        await fleet.roll_out(1)
        await stage.until(lambda: "update_refused" in stage.kinds("h100-0"))
        await stage.until(lambda: stage.status("h100-0").state is SlotState.READY)
        assert stage.status("h100-0").version == 0
        assert (await stage.generate("s"))[0] == 200
        with pytest.raises(EngineError, match=r"not served by: h100-0 \(ready, version 0\)"):
            await fleet.wait_for_version(1, timeout_s=0.5)
        await fleet.roll_out(2)
        await fleet.wait_for_version(2, timeout_s=10)
        assert stage.status("h100-0").incarnation == 1

    run(stage, scenario)
    assert stage.kinds("h100-0").count("update_refused") == 1


def test_an_engine_that_fails_its_update_is_quarantined_and_replaced(stage):
    stage.publish(1)

    async def scenario():
        spec = stage.spec("h100-0", update_timeout_s=0.5)
        fleet = stage.make_fleet(spec, stall_timeout_s=4.0)
        await fleet.start(0)
        os.kill(stage.status("h100-0").pid, signal.SIGSTOP)
        await fleet.roll_out(1)
        await stage.until(lambda: "replica_quarantined" in stage.kinds("h100-0"), timeout_s=20)
        await fleet.wait_for_version(1, timeout_s=20)
        assert stage.status("h100-0").incarnation == 2

    run(stage, scenario)
    fields = next(fields for kind, fields in stage.events if kind == "replica_quarantined")
    assert "did not answer POST /pause_generation in 0.5 s" in fields["reason"]


def test_an_engine_that_is_not_what_the_plan_says_is_never_registered(stage):
    async def scenario():
        planned = {"accelerator": "h200", "weights": "bf16", "kv": "bf16"}
        spec = stage.spec("h100-0", expected=planned)
        fleet = stage.make_fleet(spec)
        with pytest.raises(LaunchError, match="accelerator is 'h100', the plan says 'h200'; kv is"):
            await fleet.start(0)
        assert await stage.router.replicas() == []
        assert stage.status("h100-0").state is SlotState.RETIRED

    run(stage, scenario)
    assert stage.kinds("h100-0") == ["replica_starting", "replica_retired"]


def test_canaries_that_differ_from_the_trainer_keep_a_replica_out(stage):
    async def references(version, outputs):
        return [[value - 0.5 for value in output.sampler_logprobs] for output in outputs]

    async def scenario():
        fleet = stage.make_fleet(
            stage.spec("h100-0"),
            references=references,
            canary_prompts=((1, 2),),
        )
        with pytest.raises(LaunchError, match=r"differ from the trainer's by 0\.5 nats"):
            await fleet.start(0)
        assert await stage.router.replicas() == []

    run(stage, scenario)
    assert "replica_quarantined" in stage.kinds("h100-0")


def test_a_command_that_fails_is_reported_with_its_log(stage):
    async def scenario():
        argv = (sys.executable, "-c", "raise SystemExit('no such flag: --speeed')")
        fleet = stage.make_fleet(stage.spec("h100-0", argv=argv))
        with pytest.raises(LaunchError, match=r"(?s)exit code 1 before.*no such flag: --speeed"):
            await fleet.start(0)

    run(stage, scenario)


def test_a_replica_that_keeps_dying_is_retired_and_the_others_serve_on(stage):
    async def scenario():
        fleet = stage.make_fleet(*[stage.spec(f"h100-{i}") for i in range(2)])
        await fleet.start(0)
        for incarnation in (1, 2, 3):
            await stage.until(
                lambda want=incarnation: (
                    stage.status("h100-0").incarnation == want
                    and stage.status("h100-0").state is SlotState.READY
                )
            )
            os.kill(stage.status("h100-0").pid, signal.SIGKILL)
        await stage.until(lambda: stage.status("h100-0").state is SlotState.RETIRED)
        assert await stage.routed("h100-0") is None
        assert (await stage.generate("s"))[1]["X-Rlmix-Replica"] == "h100-1"
        await fleet.wait_for_version(0, timeout_s=1)  # the retired one is not waited for

    run(stage, scenario)


def test_an_engine_that_hangs_with_work_is_given_up_and_the_request_answered_elsewhere(stage):
    async def scenario():
        fleet = stage.make_fleet(*[stage.spec(f"h100-{i}") for i in range(2)], stall_timeout_s=0.6)
        await fleet.start(0)
        home = (await stage.generate("s"))[1]["X-Rlmix-Replica"]
        url = stage.status(home).url
        await stage.post(url + "/pause_generation", mode="in_place")
        await stage.post(url + "/faults", fault="hang")
        waiting = asyncio.create_task(stage.generate("s"))
        await asyncio.sleep(0.1)
        os.kill(stage.status(home).pid, signal.SIGSTOP)
        status, headers = await asyncio.wait_for(waiting, 25)
        assert status == 200
        assert headers["X-Rlmix-Replica"] != home

    run(stage, scenario)
    assert any("no load report" in fields["reason"] for kind, fields in stage.events)


def test_a_router_that_was_restarted_is_told_everything_again(stage):
    async def scenario():
        fleet = stage.make_fleet(stage.spec("h100-0"))
        await fleet.start(0)
        await stage.router.delete_replica("h100-0")  # as empty as a fresh one
        await stage.until(lambda: has_replica())
        await stage.router.put_replica("h100-0", state="dead")  # lost faith in a live replica
        await stage.until(lambda: has_replica())
        assert (await stage.generate("s"))[0] == 200

    async def has_replica():
        record = await stage.routed("h100-0")
        return record is not None and record["state"] == "ready"

    run(stage, scenario)
    assert stage.kinds("h100-0").count("replica_registered_again") == 2


def test_status_shows_what_each_replica_does(stage):
    async def scenario():
        spec = stage.spec("h100-0")
        slow = stage.spec("h100-0", argv=(*spec.argv, "--token-s", "0.3"))
        fleet = stage.make_fleet(slow)
        await fleet.start(0)
        tasks = [asyncio.create_task(stage.generate(f"s{i}", tokens=4)) for i in range(3)]
        await stage.until(lambda: stage.status("h100-0").running == 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(stage, scenario)


def test_repeated_names_are_refused(stage):
    spec = stage.spec("h100-0")

    async def scenario():
        with pytest.raises(LaunchError, match="names repeat"):
            stage.make_fleet(spec, spec)

    run(stage, scenario)


@pytest.mark.parametrize(("pause_mode", "salts"), [("in_place", ("", "v1")), ("retract", ("", ""))])
def test_an_update_that_cannot_flush_the_cache_changes_its_salt_before_the_load(
    stage, pause_mode, salts
):
    """The weights are swapped only once later requests cannot find what the old ones cached."""
    told = []

    async def scenario():
        async with stage:
            fleet = stage.make_fleet(stage.spec("h100-0"), pause_mode=pause_mode)
            await fleet.start(0)
            told.append((await stage.routed("h100-0"))["cache_salt"])
            replica = stage.replicas["h100-0"]
            load = replica.activate

            async def seen(version, folder, mode):
                told.append((await stage.routed("h100-0"))["cache_salt"])
                told.append((await replica.loads()).is_paused)
                return await load(version, folder, mode)

            replica.activate = seen
            stage.publish(1)
            await fleet.roll_out(1)
            await stage.until(lambda: is_routed_with(1))
            assert (await stage.routed("h100-0"))["cache_salt"] == salts[1]
            assert (await stage.generate("s"))[0] == 200

    async def is_routed_with(version):
        return (await stage.routed("h100-0"))["version"] == version

    asyncio.run(scenario())
    assert told == [salts[0], salts[1], pause_mode == "in_place"]
