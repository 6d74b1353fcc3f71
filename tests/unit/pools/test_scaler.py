"""Scale operations on a fleet of real engine processes behind a real router."""

import asyncio
import os
import signal
import sys
from dataclasses import replace

import pytest

from rlmix.core.errors import ConfigError
from rlmix.loop.scaler import PoolFacts, Scaler
from rlmix.pools.spec import SlotState
from rlmix.scaling.history import ScaleState, read_state, write_state
from rlmix.scaling.operation import Status
from rlmix.scaling.policy import FleetLimits, PoolLimits

VIEWS = {"h100": "fp8", "a100": "bf16", "rtx": "bf16"}
LIMITS = FleetLimits(
    pools={name: PoolLimits(floor=0, may_be_zero=True) for name in VIEWS}, usd_per_hour=100.0
)


def run(stage, scenario):
    async def whole():
        async with stage:
            return await scenario()

    return asyncio.run(whole())


def spec_of(stage, pool, index, **changes):
    # Every engine here is the scripted one; only what the router hears differs.
    return stage.spec(f"{pool}-{index}", pool=pool, view="bf16", **changes)


def make_scaler(stage, *, limits=LIMITS, new_replica=None, state=None, drain_s=30.0, **changes):
    held = []
    scaler = Scaler(
        fleet=stage.fleet,
        router=stage.router,
        pools={
            name: PoolFacts(accelerator=name, gpus=1, usd_per_hour=2.0, view="bf16")
            for name in VIEWS
        },
        limits=lambda: limits,
        drain_s=lambda: drain_s,
        keeps_view=True,
        new_replica=new_replica or (lambda pool, index: spec_of(stage, pool, index)),
        state=state or ScaleState(),
        save=lambda state: write_state(stage.folder, state),
        on_event=lambda kind, reason, **fields: stage.events.append(
            (kind, {"reason": reason, **fields})
        ),
        on_held=held.append,
        **changes,
    )
    scaler.start()
    return scaler, held


def steps(stage, name):
    return [f["step"] for kind, f in stage.events if kind == "scale_step" and f["replica"] == name]


async def over(stage, scaler, operation_id, *, timeout_s=30.0):
    await stage.until(lambda: scaler.operation(operation_id).status.is_final, timeout_s=timeout_s)
    return scaler.operation(operation_id)


async def served_by(stage, session_id):
    status, headers = await stage.generate(session_id)
    assert status == 200
    return headers["X-Rlmix-Replica"]


def test_out_and_in_at_once_new_ones_serve_first_and_drained_sessions_end_where_they_are(stage):
    async def scenario():
        fleet = stage.make_fleet(
            spec_of(stage, "h100", 0), spec_of(stage, "a100", 0), canary_prompts=((1, 2, 3),)
        )
        await fleet.start(0)
        homes = {f"s{i}": await served_by(stage, f"s{i}") for i in range(6)}
        there = [name for name, home in homes.items() if home == "a100-0"]
        assert there
        stage.publish(1)
        await fleet.roll_out(1)
        scaler, held = make_scaler(stage)
        begun = await scaler.request({"h100": 2, "a100": 0}, operation_id="x", reason="asked")
        assert begun.status is Status.RUNNING
        # The same id and targets are the same operation.
        assert await scaler.request({"h100": 2, "a100": 0}, operation_id="x", reason="") == begun
        with pytest.raises(ConfigError, match="x is under way"):
            await scaler.request({"h100": 1}, operation_id="y", reason="")
        assert scaler.targets() == {"h100": 2, "a100": 0, "rtx": 0}

        await stage.until(lambda: "draining" in steps(stage, "a100-0"), timeout_s=30)
        assert steps(stage, "h100-1")[-1] == "serving"
        # Sessions stay, new ones go elsewhere.
        assert {await served_by(stage, name) for name in there} == {"a100-0"}
        assert {await served_by(stage, f"t{i}") for i in range(8)} == {"h100-0", "h100-1"}
        assert stage.status("a100-0").is_leaving
        for name in there:
            await stage.http.delete(f"{stage.router_url}/sessions/{name}")
        done = await over(stage, scaler, "x")
        assert (done.status, done.progress_frac) == (Status.DONE, 1.0)
        assert [status.name for status in fleet.status()] == ["h100-0", "h100-1"]
        assert sorted(r["name"] for r in await stage.router.replicas()) == ["h100-0", "h100-1"]
        await stage.until(lambda: held[-1] == {"h100": 2})
        assert {"h100": 2, "a100": 1} in held
        assert read_state(stage.folder).targets == {"h100": 2, "a100": 0}
        await scaler.stop()

    run(stage, scenario)
    assert steps(stage, "h100-1") == ["catching_up", "verifying", "rotating_in", "serving"]
    assert steps(stage, "a100-0") == ["draining", "stopping", "gone"]
    kinds = [kind for kind, _ in stage.events]
    ready = kinds.index("scale_started")
    assert ready < kinds.index("replica_ready", ready) < kinds.index("scale_done")


def test_after_the_deadline_sessions_go_on_elsewhere(stage):
    async def scenario():
        fleet = stage.make_fleet(spec_of(stage, "h100", 0), spec_of(stage, "a100", 0))
        await fleet.start(0)
        homes = {f"s{i}": await served_by(stage, f"s{i}") for i in range(6)}
        scaler, _ = make_scaler(stage, drain_s=0.5)
        await scaler.request({"a100": 0}, operation_id="x", reason="asked")
        assert (await over(stage, scaler, "x")).status is Status.DONE
        assert {await served_by(stage, name) for name in homes} == {"h100-0"}
        await scaler.stop()

    run(stage, scenario)
    assert steps(stage, "a100-0") == ["draining", "rehoming", "stopping", "gone"]


def test_sessions_with_no_other_replica_of_their_view_are_not_sent_away(stage):
    async def scenario():
        fleet = stage.make_fleet(spec_of(stage, "h100", 0), spec_of(stage, "a100", 0))
        await fleet.start(0)
        homes = {f"s{i}": await served_by(stage, f"s{i}") for i in range(6)}
        there = [name for name, home in homes.items() if home == "a100-0"]
        scaler, _ = make_scaler(stage, drain_s=0.1)
        scaler._pools["h100"] = replace(scaler._pools["h100"], view="fp8")
        await scaler.request({"a100": 0}, operation_id="x", reason="asked")
        await stage.until(lambda: "scale_waits" in [kind for kind, _ in stage.events])
        assert {await served_by(stage, name) for name in there} == {"a100-0"}
        for name in there:
            await stage.http.delete(f"{stage.router_url}/sessions/{name}")
        assert (await over(stage, scaler, "x")).status is Status.DONE
        await scaler.stop()

    run(stage, scenario)
    assert "rehoming" not in steps(stage, "a100-0")


def test_a_replica_that_cannot_be_started_leaves_the_pools_as_they_were(stage):
    broken = (sys.executable, "-c", "raise SystemExit('no driver')")

    async def scenario():
        fleet = stage.make_fleet(spec_of(stage, "h100", 0), spec_of(stage, "a100", 0))
        await fleet.start(0)
        scaler, _ = make_scaler(
            stage, new_replica=lambda pool, index: spec_of(stage, pool, index, argv=broken)
        )
        await scaler.request({"h100": 2, "a100": 0}, operation_id="x", reason="asked")
        failed = await over(stage, scaler, "x")
        assert failed.status is Status.FAILED
        assert "no driver" in failed.reason
        assert {s.name: s.state for s in fleet.status()} == {
            "h100-0": SlotState.READY, "a100-0": SlotState.READY,
        }  # fmt: skip
        assert {r["name"]: r["state"] for r in await stage.router.replicas()} == {
            "h100-0": "ready", "a100-0": "ready",
        }  # fmt: skip
        assert read_state(stage.folder).targets == {"h100": 1, "a100": 1}
        # Another request may follow.
        scaler._new_replica = lambda pool, index: spec_of(stage, pool, index)
        await scaler.request({"h100": 2}, operation_id="y", reason="asked")
        assert (await over(stage, scaler, "y")).status is Status.DONE
        await scaler.stop()

    run(stage, scenario)
    # It was never closed: the new replica had to serve first.
    assert "draining" not in steps(stage, "a100-0")


def test_cancelling_stops_what_does_not_serve_and_opens_what_was_closed(stage):
    async def scenario():
        fleet = stage.make_fleet(spec_of(stage, "h100", 0), spec_of(stage, "a100", 0))
        await fleet.start(0)
        home = {f"s{i}": await served_by(stage, f"s{i}") for i in range(6)}
        assert "a100-0" in home.values()
        scaler, _ = make_scaler(stage)
        await scaler.request({"a100": 0}, operation_id="x", reason="asked")
        await stage.until(lambda: stage.status("a100-0").is_leaving)
        scaler.cancel("x", reason="changed my mind")
        assert (await over(stage, scaler, "x")).status is Status.CANCELLED
        assert (await stage.routed("a100-0"))["state"] == "ready"
        assert scaler.targets() == {"h100": 1, "a100": 1, "rtx": 0}
        with pytest.raises(ConfigError, match="no scale operation 'z'; the last ones are x"):
            scaler.cancel("z", reason="")
        await scaler.stop()

    run(stage, scenario)
    cancelled = [f for kind, f in stage.events if kind == "scale_cancelled"]
    assert cancelled[0]["reason"] == "changed my mind"


def test_a_machine_taken_back_while_it_drains_ends_the_removal_and_its_sessions_go_on(stage):
    async def scenario():
        fleet = stage.make_fleet(spec_of(stage, "h100", 0), spec_of(stage, "a100", 0))
        await fleet.start(0)
        home = {f"s{i}": await served_by(stage, f"s{i}") for i in range(6)}
        scaler, _ = make_scaler(stage)
        await scaler.request({"a100": 0}, operation_id="x", reason="asked")
        await stage.until(lambda: "draining" in steps(stage, "a100-0"))
        os.kill(stage.status("a100-0").pid, signal.SIGKILL)
        done = await over(stage, scaler, "x")
        assert done.status is Status.DONE
        assert "SIGKILL" in done.replicas["a100-0"].reason
        assert [s.name for s in fleet.status()] == ["h100-0"]
        assert {await served_by(stage, name) for name in home} == {"h100-0"}
        await scaler.stop()

    run(stage, scenario)


def test_a_replica_that_is_given_up_is_a_removal_that_nobody_announced(stage):
    async def scenario():
        fleet = stage.make_fleet(
            spec_of(stage, "h100", 0), spec_of(stage, "a100", 0), max_restarts=0
        )
        await fleet.start(0)
        scaler, _ = make_scaler(stage)
        os.kill(stage.status("a100-0").pid, signal.SIGKILL)
        await stage.until(lambda: len(fleet.status()) == 1)
        (operation,) = scaler.state.operations.values()
        assert operation.id.startswith("loss-a100-0")
        assert (operation.targets, operation.replicas_from) == ({"a100": 0}, {"a100": 1})
        assert scaler.targets()["a100"] == 0
        # The last one stays and says why the run ends.
        os.kill(stage.status("h100-0").pid, signal.SIGKILL)
        await stage.until(lambda: stage.status("h100-0").state is SlotState.RETIRED)
        await asyncio.sleep(1.2)
        assert len(fleet.status()) == 1
        await scaler.stop()

    run(stage, scenario)


def test_without_room_for_both_the_old_replica_goes_first(stage):
    async def scenario():
        fleet = stage.make_fleet(spec_of(stage, "h100", 0), spec_of(stage, "a100", 0))
        await fleet.start(0)
        scaler, _ = make_scaler(stage, limits=replace(LIMITS, usd_per_hour=4.0))
        with pytest.raises(ConfigError, match=r"would cost 6\.00 USD/h"):
            await scaler.request({"h100": 2}, operation_id="x", reason="asked")
        await scaler.request({"h100": 2, "a100": 0}, operation_id="x", reason="asked")
        assert (await over(stage, scaler, "x")).status is Status.DONE
        await scaler.stop()

    run(stage, scenario)
    told = [(f["replica"], f["step"]) for kind, f in stage.events if kind == "scale_step"]
    assert told.index(("a100-0", "gone")) < told.index(("h100-1", "catching_up"))
