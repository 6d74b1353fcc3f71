"""All replicas of a run: boots them, keeps them on the newest version, replaces the lost.

Who acts: one task per slot (`Slot.keep`), and one that compares the router with the slots, so
that a router which was restarted, or lost faith in a replica that is alive, is put right.
Invariant: nothing is registered at the router before it was verified; nobody waits for the
slowest replica. Slots come (`add`) and go (`close`, `empty`, `remove`) while it runs.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from rlmix.core.errors import EngineError, LaunchError, WeightSyncError
from rlmix.pools.callbacks import OnEvent, References, Spawn
from rlmix.pools.probes import WeightLedger
from rlmix.pools.slot import Slot
from rlmix.pools.spec import FleetSpec, ReplicaSpec, ReplicaStatus, SlotState, UpdateReport
from rlmix.router.client import RouterAdmin

log = logging.getLogger(__name__)

RECONCILE_EVERY_S = 2.0
"""How often the router's list is compared with ours; one request to the router."""


class Fleet:
    """The driver's side. Create and use it inside one running event loop."""

    def __init__(
        self,
        spec: FleetSpec,
        *,
        spawn: Spawn,
        router: RouterAdmin,
        on_event: OnEvent,
        references: References | None = None,
    ) -> None:
        """
        Args:
            spawn: makes the actor for a slot's replica, at the start and for each replacement.
            references: the trainer's logprobs for canaries; None checks only that canary
                logprobs are numbers.
        """
        names = [replica.name for replica in spec.replicas]
        if len(set(names)) != len(names):
            raise LaunchError(f"pools: replica names repeat: {', '.join(sorted(names))}")
        self._router = router
        self._on_event = on_event
        self._version = -1
        self._new_slot = partial(
            Slot,
            fleet=spec,
            spawn=spawn,
            router=router,
            references=references,
            on_event=on_event,
            boots=asyncio.Semaphore(spec.max_parallel_boots),
            pulls=asyncio.Semaphore(spec.max_parallel_pulls),
            ledger=WeightLedger(),
        )
        self._slots = [self._new_slot(replica) for replica in spec.replicas]
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._reconciler: asyncio.Task[None] | None = None

    async def start(self, version: int) -> None:
        """Boot every replica on `version` and wait until all serve.

        Raises:
            LaunchError: a replica could not be started, with the reason and its log's last lines.
                The others keep running; call `stop`.
        """
        self._version = version
        for slot in self._slots:
            self._fill(slot)
        self._reconciler = asyncio.create_task(self._reconcile(), name="fleet reconciler")
        await self._until(
            lambda: all(slot.routed_version is not None or slot.is_held for slot in self._slots)
        )
        if self._slots and all(slot.is_held for slot in self._slots):
            reasons = dict.fromkeys(slot.reason for slot in self._slots)
            raise LaunchError("pools: no replica may serve: " + "; ".join(reasons))

    def add(self, replica: ReplicaSpec) -> None:
        """A slot more, filled in the background like those of the start; after `start`.

        Raises:
            LaunchError: a slot of that name is there.
        """
        if any(slot.spec.name == replica.name for slot in self._slots):
            raise LaunchError(f"pools: there is a replica {replica.name} already")
        slot = self._new_slot(replica)
        self._slots.append(slot)
        self._fill(slot)

    async def close(self, name: str) -> None:
        """No new session for this replica; those that are there go on. LaunchError: unknown."""
        await self._slot(name).close()

    async def reopen(self, name: str) -> None:
        """Take `close` back."""
        await self._slot(name).reopen()

    async def empty(self, name: str) -> None:
        """What still runs on a closed replica goes on elsewhere."""
        await self._slot(name).empty()

    async def remove(self, name: str) -> None:
        """End a replica and its slot; one that is not there is removed already."""
        for slot in self._slots:
            if slot.spec.name == name:
                break
        else:
            return
        self._slots.remove(slot)
        await self._end_task(name)
        await slot.end("the pool was made smaller")

    async def vacate(self, name: str, reason: str) -> None:
        """End the replica of a slot, which is then filled again in the background; one that is not
        there is gone already."""
        slot = next((slot for slot in self._slots if slot.spec.name == name), None)
        if slot is None:
            return
        try:
            await slot.empty()
            await self._end_task(name)
        finally:  # Also where a limit of the caller's ended this: no slot is left without a task.
            slot.again(reason)
            self._fill(slot)

    async def _end_task(self, name: str) -> None:
        if task := self._tasks.pop(name, None):
            task.cancel()
            (result,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(result, Exception):
                log.error("pools: the task of %s failed", name, exc_info=result)

    def _fill(self, slot: Slot) -> None:
        slot.set_target(self._version)
        name = slot.spec.name
        self._tasks[name] = asyncio.create_task(slot.keep(), name=f"slot {name}")

    def _slot(self, name: str) -> Slot:
        for slot in self._slots:
            if slot.spec.name == name:
                return slot
        raise LaunchError(f"pools: there is no replica {name}")

    async def roll_out(self, version: int) -> None:
        """Bring every replica to `version`, in the background; the newest order wins.

        Raises:
            WeightSyncError: `version` is older than one ordered before.
            Exception: what ended a slot's task, if a bug did.
        """
        self._raise_failures()
        if version < self._version:
            raise WeightSyncError(
                f"pools: version {version} was ordered after {self._version}; versions only grow"
            )
        self._version = version
        for slot in self._slots:
            slot.set_target(version)

    async def wait_for_version(self, version: int, *, timeout_s: float) -> None:
        """Wait until every replica that is not retired serves `version` or a newer one, and the
        router knows.

        Raises:
            EngineError: after `timeout_s`, with the replicas that are behind.
        """

        def behind() -> list[str]:
            return [
                f"{slot.spec.name} ({slot.state.value}, version {slot.version})"
                for slot in self._slots
                if not (slot.state.is_final or slot.is_held or slot.is_leaving)
                and (slot.routed_version is None or slot.routed_version < version)
            ]

        try:
            async with asyncio.timeout(timeout_s):
                await self._until(lambda: not behind())
        except TimeoutError:
            raise EngineError(
                f"pools: after {timeout_s:g} s version {version} is not served by: "
                + ", ".join(behind())
            ) from None

    async def quarantine(self, pool: str, reason: str) -> list[str]:
        """Take a pool out: its sessions move to other replicas at once, its engines end, and
        nothing is started in its place until `release`. May be called before `start`.

        Returns:
            Names of the replicas that were taken out; empty when the pool has none left.
        """
        slots = [slot for slot in self._slots if slot.spec.pool == pool and not slot.is_held]
        slots = [slot for slot in slots if not slot.state.is_final]
        await asyncio.gather(*[slot.hold(reason) for slot in slots])
        return [slot.spec.name for slot in slots]

    def release(self, pool: str) -> list[str]:
        """End a pool's quarantine: each of its replicas boots, answers the canary prompts and is
        registered like a new one, in the background. Returns their names."""
        slots = [slot for slot in self._slots if slot.spec.pool == pool and slot.is_held]
        for slot in slots:
            slot.release()
        return [slot.spec.name for slot in slots]

    def serving_pools(self) -> frozenset[str]:
        """Pools with at least one replica that takes sessions."""
        records = [slot.router_record() for slot in self._slots]
        return frozenset(r["pool"] for r in records if r is not None and r["state"] == "ready")

    def status(self) -> list[ReplicaStatus]:
        """Every slot, in the plan's order."""
        return [slot.status() for slot in self._slots]

    def drain_updates(self) -> list[UpdateReport]:
        """Activations since the last call."""
        found = [report for slot in self._slots for report in slot.updates]
        for slot in self._slots:
            slot.updates.clear()
        return found

    def versions_being_read(self) -> frozenset[int]:
        """Versions that some replica is loading now; deleting them would break its start."""
        return frozenset(slot.loading for slot in self._slots if slot.loading is not None)

    async def stop(self) -> None:
        """End every replica politely, all at once; about as long as the slowest takes."""
        tasks = [*self._tasks.values()]
        if self._reconciler is not None:
            tasks.append(self._reconciler)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                log.error("pools: a slot's task failed", exc_info=result)
        started = [slot for slot in self._slots if slot.spec.name in self._tasks]
        await asyncio.gather(*[slot.end("the fleet stops") for slot in started])
        self._tasks.clear()

    async def _until(self, is_reached: Callable[[], bool]) -> None:
        """Wait until the condition holds; raises when a slot's task failed or gave up."""
        while not is_reached():
            for slot in self._slots:
                slot.changed.clear()
            self._raise_failures()
            for slot in self._slots:
                if slot.state is SlotState.RETIRED and not slot.has_served:
                    raise LaunchError(f"pools: {slot.spec.name} cannot be started: {slot.reason}")
            waits = [asyncio.create_task(slot.changed.wait()) for slot in self._slots]
            try:
                await asyncio.wait(
                    {*waits, *[t for t in self._tasks.values() if not t.done()]},
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    def _raise_failures(self) -> None:
        for task in self._tasks.values():
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    async def _reconcile(self) -> None:
        while True:
            await asyncio.sleep(RECONCILE_EVERY_S)
            try:
                held = {record["name"]: record for record in await self._router.replicas()}
            except EngineError as error:
                log.warning("pools: %s", error)
                continue
            for slot in list(self._slots):
                if slot not in self._slots:  # It went while another was registered.
                    continue
                wanted, there = slot.router_record(), held.get(slot.spec.name)
                # A version that is being proved is told when it is.
                is_proved = slot.state is not SlotState.UPDATING
                keys = ("url", "state", "version") if is_proved else ("url", "state")
                if wanted is None or there is None:
                    differs = wanted is not None
                else:
                    differs = any(there[key] != wanted[key] for key in keys)
                if differs:
                    self._on_event(
                        "replica_registered_again",
                        "the router did not hold it as it is",
                        replica=slot.spec.name,
                        pool=slot.spec.pool,
                    )
                    await slot.register()
