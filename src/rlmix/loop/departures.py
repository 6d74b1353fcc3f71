"""Machines that were told to leave: their replicas drain, their slots look for others.

Who asks: a cloud's hook or a person, by `rlmix scale pools --leave HOST`. The work is the scaler's.
Invariants: while a notice stands nothing new is put on its machine; a pool keeps its number; told
again, a machine that leaves is the same departure.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from rlmix.core.errors import ConfigError
from rlmix.core.machine import Machine, find_machine
from rlmix.loop.scaler import Scaler
from rlmix.pools.callbacks import OnEvent
from rlmix.pools.fleet import Fleet
from rlmix.scaling.operation import Operation


class Cluster(Protocol):
    """What `launch.ray.RayCluster` can say and do."""

    @property
    def is_joined(self) -> bool: ...
    @property
    def own_machine(self) -> str: ...
    def machines(self) -> list[Machine]: ...
    def avoid(self, machine_ids: Collection[str]) -> None: ...


class Departures:
    """Of one attempt; made before its scaler starts."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        scaler: Scaler,
        fleet: Fleet,
        drain_s: Callable[[], float],
        on_event: OnEvent,
    ) -> None:
        """
        Args:
            drain_s: how long sessions may go on where nobody says otherwise.
        """
        self._cluster = cluster
        self._scaler = scaler
        self._fleet = fleet
        self._drain_s = drain_s
        self._on_event = on_event
        self._asking = asyncio.Lock()

    def machines(self) -> Sequence[Machine]:
        """Those of the cluster; none where the run has the one machine."""
        return self._cluster.machines() if self._cluster.is_joined else ()

    @property
    def leaving(self) -> Collection[str]:
        return self._scaler.state.leaving

    async def leave(self, name: str, *, within_s: float | None, reason: str) -> Operation:
        """Begin a departure, or find the one that was begun.

        Args:
            within_s: sessions that have not ended by then go on elsewhere; None: `drain_s`.
        Raises:
            ConfigError: there is no such machine, or the run itself is on it.
        """
        machine = self._find(name)
        if machine.id == self._cluster.own_machine:
            raise ConfigError(
                f"machine {machine}: the run's driver and trainer are on it, so it cannot leave "
                "alone; end the run with `rlmix runs stop`, and go on elsewhere with "
                "`rlmix train --resume`"
            )
        async with self._asking:
            state = self._scaler.state
            if known := state.operations.get(state.leaving.get(machine.id, "")):
                return known
            statuses = self._fleet.status()
            there = [s for s in statuses if s.is_on(machine)]
            there = [s for s in there if not (s.state.is_final or s.is_leaving)]
            names = [s.name for s in there]
            # Those may still be put there, or are about to serve there and have no session.
            again = [s.name for s in statuses if s.waits_for_machine]
            if (busy := state.running) is not None:
                steps = {name: busy.replicas[name].step for name in names if name in busy.replicas}
                again += [name for name, step in steps.items() if not step.is_final]
            number = sum(one.startswith("leave-") for one in state.operations) + 1
            planned = busy.id if busy is not None else f"leave-{machine.id[:8]}-{number}"
            limit_s = self._drain_s() if within_s is None else within_s
            # On disk and with Ray before anything is done, so that nothing new comes there.
            self._put({**state.leaving, machine.id: planned})
            self._on_event(
                "machine_leaves", reason, machine=machine.id, host=machine.host,
                address=machine.address, replicas=names, within_s=limit_s, operation=planned,
            )  # fmt: skip
            operation = await self._scaler.move(
                names, operation_id=planned, drain_s=limit_s, reason=f"{reason}: {machine} leaves"
            )
            if operation.id != planned:
                self._put({**state.leaving, machine.id: operation.id})
            for name in again:
                await self._fleet.vacate(name, f"{machine} leaves")
            return operation

    async def stay(self, name: str, *, reason: str) -> Operation | None:
        """Take a departure back: what still drains is opened again, what waits for a machine may
        have this one.

        Raises:
            ConfigError: there is no such machine, or nobody told it to leave.
        """
        machine = self._find(name)
        async with self._asking:
            state = self._scaler.state
            if machine.id not in state.leaving:
                raise ConfigError(f"machine {machine}: nobody told it to leave, so it stays anyway")
            self._put({one: by for one, by in state.leaving.items() if one != machine.id})
            statuses = self._fleet.status()
            there = [s.name for s in statuses if s.is_on(machine)]
            self._on_event(
                "machine_stays", reason, machine=machine.id, host=machine.host,
                address=machine.address, replicas=there,
            )  # fmt: skip
            self._scaler.stay(there, reason=f"{machine} stays")
            for name in [s.name for s in statuses if s.waits_for_machine]:
                await self._fleet.vacate(name, f"{machine} stays")
            return self._scaler.state.operations.get(state.leaving[machine.id])

    def _put(self, leaving: dict[str, str]) -> None:
        self._scaler.keep_leaving(leaving)
        self._cluster.avoid(leaving)

    def _find(self, name: str) -> Machine:
        if not self._cluster.is_joined:
            raise ConfigError(
                f"machine {name!r}: the run has a Ray of its own on one machine (launch.address is "
                "not set), so no machine can leave it; end it with `rlmix runs stop`"
            )
        return find_machine(name, self._cluster.machines())
