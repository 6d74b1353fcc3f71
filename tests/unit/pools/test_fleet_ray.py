"""The same fleet with its replicas in Ray actors: errors, deaths and the end cross processes."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from rlmix.core.errors import LaunchError
from rlmix.launch.handle import Needs
from rlmix.launch.ray import RayCluster
from rlmix.pools.replica import Replica
from rlmix.pools.spec import SlotState

pytestmark = pytest.mark.slow


def runs(pid: int) -> bool:
    """False for a process that has ended, whether or not its parent has looked at it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_replicas_in_actors_update_and_are_replaced_whether_engine_or_actor_dies(stage, tmp_path):
    stage.publish(1)
    cluster = RayCluster.start("fleet", num_cpus=8, log_dir=tmp_path / "logs")

    def spawn(spec, incarnation):
        return cluster.spawn(
            Replica,
            name=f"{spec.name}.{incarnation}",
            num_cpus=0.1,
            args=(spec,),
            log_name=f"{spec.name}.actor",
        )

    async def scenario():
        async with stage:
            stage._spawn = spawn
            specs = [stage.spec(f"h100-{i}") for i in range(2)]
            fleet = stage.make_fleet(*specs)
            await fleet.start(0)
            await fleet.roll_out(1)
            await fleet.wait_for_version(1, timeout_s=10)
            actors = [slot.handle for slot in fleet._slots]
            actor_pids = [await actor.call("process_id") for actor in actors]
            # One loses its engine, the other its actor; the engine dies with the actor.
            engine_pids = [status.pid for status in fleet.status()]
            os.kill(engine_pids[0], signal.SIGKILL)
            os.kill(actor_pids[1], signal.SIGKILL)
            for name in ("h100-0", "h100-1"):
                noticed_s = await stage.until(
                    lambda name=name: stage.status(name).state is not SlotState.READY
                )
                print(f"{name}: noticed after {noticed_s:.2f} s")
            await stage.until(
                lambda: all(
                    status.incarnation == 2 and status.state is SlotState.READY
                    for status in fleet.status()
                ),
                timeout_s=30,
            )
            assert [status.version for status in fleet.status()] == [1, 1]
            # Whoever adopted the second engine may take a moment to reap it.
            await stage.until(lambda: not any(runs(pid) for pid in engine_pids))
            reasons = {
                fields["replica"]: fields["reason"]
                for kind, fields in stage.events
                if kind == "replica_dead"
            }
            assert "signal SIGKILL" in reasons["h100-0"]
            assert "actor h100-1.1 is gone" in reasons["h100-1"]
            await fleet.stop()
            wrong = stage.spec("h100-2", expected={"kv": "bf16"})
            with pytest.raises(LaunchError, match="kv is 'fp8', the plan says 'bf16'"):
                await stage.make_fleet(wrong).start(0)

    try:
        asyncio.run(scenario())
    finally:
        cluster.stop()


def test_a_fleet_that_stops_takes_a_replica_that_waits_for_a_machine_out_of_ray_s_queue(
    stage, tmp_path
):
    cluster = RayCluster.start("waits", num_cpus=8, log_dir=tmp_path / "logs")
    cluster._place_limit_s = 600.0  # As in a cluster that was joined.
    nobody = Needs(kind="b300", gpus=0.0, resources={"b300_unit": 1.0}, labels={})

    def spawn(spec, incarnation):
        return cluster.spawn(Replica, name=spec.name, num_cpus=0.1, args=(spec,), needs=spec.needs)

    def states():
        from ray._private.state import actors

        return [actor["State"] for actor in actors().values()]

    async def scenario():
        async with stage:
            stage._spawn = spawn
            fleet = stage.make_fleet(stage.spec("b300-0", needs=nobody))
            starting = asyncio.create_task(fleet.start(0))
            await stage.until(lambda: states() == ["PENDING_CREATION"], timeout_s=30)
            began_s = time.monotonic()
            await fleet.stop()
            assert time.monotonic() - began_s < 20.0  # Not 600.
            assert cluster._asked == {}
            await stage.until(lambda: states() == ["DEAD"], timeout_s=10)
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    try:
        asyncio.run(scenario())
    finally:
        cluster.stop()
