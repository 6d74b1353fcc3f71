"""Machines that leave, with real engine processes behind a real router; machines are names only."""

import asyncio
import os
import signal

import pytest

from rlmix.core.errors import ConfigError, PlacementError
from rlmix.core.machine import Machine
from rlmix.launch.handle import InProcessHandle
from rlmix.loop.departures import Departures
from rlmix.loop.scaler import PoolFacts, Scaler
from rlmix.pools.replica import Replica
from rlmix.pools.spec import SlotState
from rlmix.scaling.history import ScaleState, read_state, write_state
from rlmix.scaling.operation import Status
from rlmix.scaling.policy import FleetLimits

HEAD = Machine(id="00000000head", address="10.0.0.1", host="head")
ONE = Machine(id="11111111one", address="10.0.0.2", host="gpu-1")
TWO = Machine(id="22222222two", address="10.0.0.3", host="gpu-2")


class Waiting(InProcessHandle):
    """No machine is left for it, and none comes."""

    is_placed = False

    async def placed(self):
        await asyncio.sleep(600.0)
        raise PlacementError("launch: no machine")

    async def call(self, method, *args, timeout_s=None, **kwargs):
        await self.placed()


class Cluster:
    """Places each process on the first machine with a free place that is not avoided."""

    is_joined = True
    own_machine = HEAD.id

    def __init__(self, places):
        self.places = dict(places)
        self.avoided = frozenset()
        self.handles = []

    def machines(self):
        return [HEAD, *self.places]

    def avoid(self, machine_ids):
        self.avoided = frozenset(machine_ids)

    def spawn(self, spec, incarnation):
        name = f"{spec.name}.{incarnation}"
        for machine, places in self.places.items():
            used = sum(h.machine == machine and h._target is not None for h in self.handles)
            if machine.id not in self.avoided and used < places:
                handle = InProcessHandle(Replica(spec), name=name, machine=machine)
                self.handles.append(handle)
                return handle
        return Waiting(Replica(spec), name=name)


def run(stage, scenario):
    async def whole():
        async with stage:
            return await scenario()

    return asyncio.run(whole())


def spec_of(stage, pool, index):
    return stage.spec(f"{pool}-{index}", pool=pool)


async def served_by(stage, session_id):
    status, headers = await stage.generate(session_id)
    assert status == 200
    return headers["X-Rlmix-Replica"]


async def homes_of_six(stage):
    """Session -> the replica that it is served by, of six that begin now."""
    return {f"s{i}": await served_by(stage, f"s{i}") for i in range(6)}


def steps(stage, name):
    return [f["step"] for kind, f in stage.events if kind == "scale_step" and f["replica"] == name]


async def begin(stage, cluster, *specs, drain_s=30.0):
    stage._spawn = cluster.spawn
    fleet = stage.make_fleet(*specs)
    await fleet.start(0)

    def on_event(kind, reason, **fields):
        stage.events.append((kind, {"reason": reason, **fields}))

    facts = {
        pool: PoolFacts(accelerator=pool, gpus=1, usd_per_hour=2.0, view="bf16")
        for pool in ("h100", "a100")
    }
    scaler = Scaler(
        fleet=fleet, router=stage.router, pools=facts, limits=lambda: FleetLimits(pools={}),
        drain_s=lambda: drain_s, keeps_view=True,
        new_replica=lambda pool, index: spec_of(stage, pool, index), state=ScaleState(),
        save=lambda state: write_state(stage.folder, state), on_event=on_event,
    )  # fmt: skip
    scaler.start()
    departures = Departures(
        cluster=cluster, scaler=scaler, fleet=fleet, drain_s=lambda: drain_s, on_event=on_event
    )
    return fleet, scaler, departures


def where(fleet):
    return {status.name: status.machine and status.machine.host for status in fleet.status()}


def test_a_machine_that_leaves_drains_and_its_slot_is_filled_on_another_one(stage):
    async def scenario():
        cluster = Cluster({ONE: 1, TWO: 2})
        fleet, scaler, departures = await begin(
            stage, cluster, spec_of(stage, "h100", 0), spec_of(stage, "a100", 0)
        )
        assert where(fleet) == {"h100-0": "gpu-1", "a100-0": "gpu-2"}
        homes = await homes_of_six(stage)
        there = [name for name, home in homes.items() if home == "h100-0"]
        assert there
        begun = await departures.leave("gpu-1", within_s=None, reason="spot notice")
        assert (begun.id, begun.targets) == ("leave-11111111-1", {"h100": 1})
        # By its other names, too, it is the same departure.
        for name in ("gpu-1", "10.0.0.2", "11111111one"):
            again = await departures.leave(name, within_s=1.0, reason="spot notice")
            assert again.id == begun.id
        await stage.until(lambda: "draining" in steps(stage, "h100-0"))
        assert read_state(stage.folder).leaving == {ONE.id: begun.id}
        assert {await served_by(stage, name) for name in there} == {"h100-0"}
        assert {await served_by(stage, f"t{i}") for i in range(4)} == {"a100-0"}
        with pytest.raises(ConfigError, match="`rlmix scale pools --stay HOST` takes that back"):
            scaler.cancel(begun.id, reason="no")
        for name in there:
            await stage.http.delete(f"{stage.router_url}/sessions/{name}")
        await stage.until(
            lambda: (
                stage.status("h100-0").incarnation == 2
                and stage.status("h100-0").state is SlotState.READY
            ),
            timeout_s=30,
        )
        assert scaler.operation(begun.id).status is Status.DONE
        assert where(fleet) == {"h100-0": "gpu-2", "a100-0": "gpu-2"}
        assert scaler.targets() == {"h100": 1, "a100": 1}
        assert read_state(stage.folder).targets.get("h100") == 1
        assert (await stage.routed("h100-0"))["state"] == "ready"
        await scaler.stop()

    run(stage, scenario)
    told = [fields for kind, fields in stage.events if kind == "machine_leaves"]
    assert [(f["host"], f["replicas"], f["within_s"]) for f in told] == [("gpu-1", ["h100-0"], 30)]
    assert steps(stage, "h100-0") == ["draining", "stopping", "gone"]


def test_after_its_time_sessions_go_on_elsewhere_and_a_slot_without_another_machine_waits(stage):
    async def scenario():
        cluster = Cluster({ONE: 1, TWO: 1})
        fleet, scaler, departures = await begin(
            stage, cluster, spec_of(stage, "h100", 0), spec_of(stage, "a100", 0)
        )
        homes = await homes_of_six(stage)
        begun = await departures.leave("gpu-1", within_s=0.5, reason="spot notice")
        await stage.until(lambda: scaler.operation(begun.id).status.is_final)
        assert {await served_by(stage, name) for name in homes} == {"a100-0"}
        # gpu-1 has a free place now, which is never taken while the notice stands.
        await stage.until(lambda: stage.status("h100-0").waits_for_machine)
        assert scaler.sizes()["h100"].replicas == 1
        # The notice is taken back: what waits may have that machine now.
        await departures.stay("gpu-1", reason="false alarm")
        assert (cluster.avoided, read_state(stage.folder).leaving) == (frozenset(), {})
        with pytest.raises(ConfigError, match="nobody told it to leave"):
            await departures.stay("gpu-1", reason="again")
        await stage.until(lambda: stage.status("h100-0").state is SlotState.READY, timeout_s=30)
        assert where(fleet)["h100-0"] == "gpu-1"
        await scaler.stop()

    run(stage, scenario)
    assert steps(stage, "h100-0") == ["draining", "rehoming", "stopping", "gone"]


def test_a_machine_that_stays_after_all_opens_what_drains(stage):
    async def scenario():
        cluster = Cluster({ONE: 1, TWO: 1})
        _, scaler, departures = await begin(
            stage, cluster, spec_of(stage, "h100", 0), spec_of(stage, "a100", 0)
        )
        homes = await homes_of_six(stage)
        assert "h100-0" in homes.values()
        begun = await departures.leave("gpu-1", within_s=None, reason="spot notice")
        await stage.until(lambda: stage.status("h100-0").is_leaving)
        await departures.stay("gpu-1", reason="false alarm")
        await stage.until(lambda: scaler.operation(begun.id).status.is_final)
        assert (await stage.routed("h100-0"))["state"] == "ready"
        assert stage.status("h100-0").incarnation == 1
        await scaler.stop()

    run(stage, scenario)


def test_a_machine_that_goes_before_its_time_is_over_fills_its_slot_elsewhere_all_the_same(stage):
    async def scenario():
        cluster = Cluster({ONE: 1, TWO: 2})
        fleet, scaler, departures = await begin(
            stage, cluster, spec_of(stage, "h100", 0), spec_of(stage, "a100", 0)
        )
        homes = await homes_of_six(stage)
        assert "h100-0" in homes.values()
        begun = await departures.leave("gpu-1", within_s=None, reason="spot notice")
        await stage.until(lambda: "draining" in steps(stage, "h100-0"))
        os.kill(stage.status("h100-0").pid, signal.SIGKILL)
        await stage.until(lambda: scaler.operation(begun.id).status is Status.DONE)
        await stage.until(lambda: stage.status("h100-0").state is SlotState.READY, timeout_s=30)
        assert where(fleet)["h100-0"] == "gpu-2"
        await scaler.stop()

    run(stage, scenario)


def test_a_machine_leaves_while_a_pool_grows_and_the_growth_goes_on(stage):
    async def scenario():
        cluster = Cluster({ONE: 1, TWO: 3})
        fleet, scaler, departures = await begin(
            stage, cluster, spec_of(stage, "h100", 0), spec_of(stage, "a100", 0)
        )
        await scaler.request({"a100": 2}, operation_id="grow", reason="asked")
        begun = await departures.leave("gpu-1", within_s=0.0, reason="spot notice")
        assert begun.id == "grow"
        await stage.until(lambda: scaler.operation("grow").status.is_final, timeout_s=30)
        assert scaler.operation("grow").status is Status.DONE
        await stage.until(
            lambda: all(s.state is SlotState.READY for s in fleet.status()), timeout_s=30
        )
        assert where(fleet) == dict.fromkeys(["h100-0", "a100-0", "a100-1"], "gpu-2")
        assert scaler.targets() == {"h100": 1, "a100": 2}
        await scaler.stop()

    run(stage, scenario)


def test_unknown_machines_the_run_s_own_one_and_those_without_replicas(stage):
    async def scenario():
        cluster = Cluster({TWO: 1, ONE: 1})
        _, scaler, departures = await begin(stage, cluster, spec_of(stage, "h100", 0))
        with pytest.raises(ConfigError, match=r"there are gpu-1 \(10\.0\.0\.2, 11111111\), gpu-2"):
            await departures.leave("gpu-7", within_s=None, reason="notice")
        with pytest.raises(ConfigError, match="the run's driver and trainer are on it"):
            await departures.leave("head", within_s=None, reason="notice")
        assert cluster.avoided == frozenset()
        # Nothing is there, so nothing drains, and nothing will come there.
        begun = await departures.leave("gpu-1", within_s=None, reason="notice")
        assert (begun.status, begun.replicas) == (Status.DONE, {})
        assert cluster.avoided == {ONE.id}
        await scaler.stop()

    run(stage, scenario)
