"""Replicas that need a machine: one that finds none holds up nobody and is told with its reason."""

import asyncio
import time

import pytest

from rlmix.core.errors import LaunchError, PlacementError
from rlmix.launch.handle import InProcessHandle, Needs
from rlmix.pools.replica import Replica
from rlmix.pools.spec import SlotState

H100 = Needs(kind="h100", gpus=1.0, resources={}, labels={})
SENTENCE = "launch: no machine for h100-1 (h100) after 0.2 s: asked for 1 GPU, 0 are free"


class Waiting(InProcessHandle):
    """Its process waits for a machine: for ever, or until the limit."""

    def __init__(self, replica: Replica, *, name: str, limit_s: float | None) -> None:
        super().__init__(replica, name=name)
        self._limit_s = limit_s

    @property
    def is_placed(self) -> bool:
        return False

    async def placed(self) -> None:
        await asyncio.sleep(3600.0 if self._limit_s is None else self._limit_s)
        raise PlacementError(SENTENCE)

    async def call(self, method, *args, timeout_s=None, **kwargs):
        await self.placed()


def spawning(stage, limits):
    """`limits`: replica -> longest wait; those that are not in it have a machine at once."""

    def spawn(spec, incarnation):
        replica = Replica(spec)
        if spec.name in limits:
            return Waiting(replica, name=spec.name, limit_s=limits[spec.name])
        return InProcessHandle(replica, name=spec.name)

    stage._spawn = spawn


def test_those_that_wait_for_a_machine_take_no_place_of_those_that_boot(stage):
    async def scenario():
        async with stage:
            # Two boot at a time, and two wait for ever: the third must not wait behind them.
            spawning(stage, {"h100-0": None, "h100-1": None})
            specs = [stage.spec(f"h100-{index}", needs=H100) for index in range(3)]
            starting = asyncio.create_task(stage.make_fleet(*specs).start(0))
            await stage.until(lambda: stage.routed("h100-2"), timeout_s=60.0)
            assert stage.status("h100-0").reason == "waiting for a machine with h100"
            assert stage.status("h100-2").state is SlotState.READY
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(scenario())


def test_a_replica_that_finds_no_machine_is_given_up_with_both_numbers(stage):
    async def scenario():
        async with stage:
            spawning(stage, {"h100-1": 0.2})
            fleet = stage.make_fleet(
                stage.spec("h100-0", needs=H100), stage.spec("h100-1", needs=H100)
            )
            with pytest.raises(LaunchError, match="asked for 1 GPU, 0 are free"):
                await fleet.start(0)
            # Once, and not as often as a command that may be broken.
            assert stage.kinds("h100-1").count("replica_retired") == 1
            assert stage.status("h100-1").incarnation == 1

    asyncio.run(scenario())


def test_a_fleet_that_stops_does_not_wait_for_a_machine_that_may_come_in_ten_minutes(stage):
    async def scenario():
        async with stage:
            spawning(stage, {"h100-0": 600.0})
            fleet = stage.make_fleet(stage.spec("h100-0", needs=H100), stage.spec("h100-1"))
            starting = asyncio.create_task(fleet.start(0))
            await stage.until(lambda: stage.routed("h100-1"), timeout_s=60.0)
            waits = fleet._slots[0].handle
            assert stage.status("h100-0").reason == "waiting for a machine with h100"
            began_s = time.monotonic()
            await fleet.stop()
            assert time.monotonic() - began_s < 60.0  # the other one's polite end, not 600
            # Killed, which takes its request for a machine back.
            assert waits._target is None
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(scenario())


def test_a_replica_that_served_asks_for_a_machine_as_often_as_it_takes(stage):
    async def scenario():
        async with stage:
            limits = {}
            spawning(stage, limits)
            fleet = stage.make_fleet(stage.spec("h100-0", needs=H100), max_restarts=1)
            await fleet.start(0)
            limits["h100-0"] = 0.05  # Its machine leaves, and there is no other one.
            await fleet.vacate("h100-0", "its machine leaves")
            await stage.until(lambda: stage.kinds("h100-0").count("replica_dead") >= 4)
            assert stage.status("h100-0").state is not SlotState.RETIRED
            limits.clear()
            await stage.until(
                lambda: stage.status("h100-0").state is SlotState.READY, timeout_s=30.0
            )

    asyncio.run(scenario())
