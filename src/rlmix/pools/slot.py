"""One slot of the fleet: the replica that fills it now, and its life from start to end.

Who calls: the fleet starts one `keep` task per slot. Order of a life: boot, catch up, verify,
register at the router; then serve, update, and be watched; on the way out the router hears first.
Updates of one slot cannot overlap, because only its own task makes them. A slot that is leaving
keeps its sessions until they end or are sent elsewhere, gets no new one, and is not filled again.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlmix.core.errors import EngineError, LaunchError, PlacementError, WeightSyncError
from rlmix.launch.handle import Handle
from rlmix.pools.admission import ProgressWatch, RestartBudget
from rlmix.pools.callbacks import OnEvent, References, Spawn
from rlmix.pools.gate import Gate
from rlmix.pools.probes import WeightLedger
from rlmix.pools.spec import (
    AdmissionRefused,
    BringUp,
    FleetSpec,
    Leaving,
    PlanMismatch,
    ReplicaInfo,
    ReplicaLoad,
    ReplicaSpec,
    ReplicaStatus,
    SlotState,
    UpdateReport,
)
from rlmix.pools.status import record_of, status_of
from rlmix.pools.watching import Gone, until_due, until_gone
from rlmix.router.client import RouterAdmin
from rlmix.weights.store import version_dir

log = logging.getLogger(__name__)

CALL_MARGIN_S = 10.0
"""On top of a replica's own limits, for an actor that starts or is slow to answer."""

LOADS_TIMEOUT_S = 10.0
"""For one load report, or half the stall limit where that is shorter: one report may be missed."""

STOP_TIMEOUT_S = 6.0
"""For a polite stop; then the actor is killed."""

FIRST_START_ATTEMPTS = 2
"""A slot that never served is given up after this many starts: waiting longer for a broken
command or a missing file only hides it."""


class _Held(Exception):
    """The slot was put in quarantine; the message says why."""


class Slot:
    """Keeps one replica alive."""

    def __init__(
        self,
        spec: ReplicaSpec,
        fleet: FleetSpec,
        *,
        spawn: Spawn,
        router: RouterAdmin,
        references: References | None,
        on_event: OnEvent,
        boots: asyncio.Semaphore,
        pulls: asyncio.Semaphore,
        ledger: WeightLedger,
    ) -> None:
        self.spec = spec
        self._gate = Gate(spec, fleet, call=self._call, references=references, ledger=ledger)
        self._fleet = fleet
        self._spawn = spawn
        self._router = router
        self._on_event = on_event
        self._boots = boots
        self._pulls = pulls
        self.updates: list[UpdateReport] = []
        """Of this slot since the fleet looked last."""
        self._budget = RestartBudget(
            max_restarts=fleet.max_restarts,
            window_s=fleet.restart_window_s,
            delay_s=fleet.restart_delay_s,
        )
        self.handle: Handle | None = None
        self._target = 0
        self._refused_version = -1
        self._is_registered = False
        self.cache_salt = ""
        self._hold_reason = ""
        self.leaving = Leaving.NO
        self.bring_up = BringUp.BOOTING
        self._released = asyncio.Event()
        self._wake = asyncio.Event()
        self.changed = asyncio.Event()
        """Set at every change of state or version; whoever waits clears it."""
        self.state = SlotState.STARTING
        self.reason = "not started yet"
        self.incarnation = 0
        self.restarts = 0
        self.has_served = False
        self.boot_s: float | None = None
        """From the last start to the first session; None before it."""
        self.version: int | None = None
        self.loading: int | None = None
        """Version whose files are being read now; they must stay until that has ended."""
        self.routed_version: int | None = None
        """What the router was told last; None while it must not send anything here."""
        self.info: ReplicaInfo | None = None
        self.load: ReplicaLoad | None = None
        self._since_s = time.monotonic()

    @property
    def is_serving(self) -> bool:
        return self.state in (SlotState.READY, SlotState.UPDATING)

    def set_target(self, version: int) -> None:
        """The slot's replica shall serve this version, or a newer one, as soon as it can."""
        self._target = version
        self._wake.set()

    @property
    def is_held(self) -> bool:
        """In quarantine until `release`: nothing runs in the slot, or it is just being ended."""
        return bool(self._hold_reason)

    async def hold(self, reason: str) -> None:
        """Out of routing now, and no replica until `release`; the one there is ended."""
        self._hold_reason = reason
        self._released.clear()
        self._wake.set()
        await self._leave_router("quarantined")

    def release(self) -> None:
        """Fill the slot again, through the same gate as at the start."""
        self._hold_reason = ""
        self._released.set()

    @property
    def is_leaving(self) -> bool:
        return self.leaving is not Leaving.NO

    async def close(self) -> None:
        """No new session from now on; those that are there go on."""
        self.leaving = Leaving.DRAINING
        await self.register()

    async def reopen(self) -> None:
        """Take `close` back."""
        self.leaving = Leaving.NO
        await self.register()

    async def empty(self) -> None:
        """Out of routing: sessions that are still there go on elsewhere with their next turn, the
        turn under way is sent again there."""
        self.leaving = Leaving.EMPTIED
        await self._leave_router("dead")

    async def keep(self) -> None:
        """Fill the slot, and fill it again, until it is retired or lost while leaving. Cancel it to
        end the slot."""
        try:
            while True:
                was_refused = is_unplaced = False
                try:
                    if self.is_held:
                        raise _Held(self._hold_reason)
                    await self._bring_up()
                    await self._serve()
                except _Held as held:
                    await self._take_down(SlotState.QUARANTINED, str(held))
                    await self._released.wait()
                    continue
                except Gone as gone:
                    await self._take_down(SlotState.DEAD, str(gone))
                except (LaunchError, WeightSyncError) as error:
                    is_unplaced = isinstance(error, PlacementError)
                    is_given_up = is_unplaced and not self.has_served
                    state = SlotState.RETIRED if is_given_up else SlotState.DEAD
                    await self._take_down(state, str(error))
                    if is_given_up:
                        return
                except PlanMismatch as error:
                    await self._take_down(SlotState.RETIRED, str(error))
                    return
                except EngineError as error:
                    await self._take_down(SlotState.QUARANTINED, str(error))
                    was_refused = isinstance(error, AdmissionRefused)
                if self.is_leaving:
                    return
                # Asking again for a machine is no restart: nothing was started that is broken.
                delay_s = self._fleet.restart_delay_s if is_unplaced else self._next_delay_s()
                if delay_s is None and was_refused:
                    # Not broken, not trusted: the run goes on without it.
                    self._hold_reason = self.reason
                    self._released.clear()
                    continue
                if delay_s is None:
                    last = self.reason
                    self._enter(SlotState.RETIRED, f"started too often; last: {last}")
                    await self._tell_router(self._router.delete_replica(self.spec.name))
                    return
                self.restarts += 1
                self._enter(
                    SlotState.RESTARTING,
                    f"restart {self.restarts} in {delay_s:g} s after: {_first_line(self.reason)}",
                )
                await asyncio.sleep(delay_s)
        finally:
            if self.handle is not None:
                await self._stop_replica()

    def status(self) -> ReplicaStatus:
        return status_of(self, since_s=time.monotonic() - self._since_s)

    def router_record(self) -> dict[str, Any] | None:
        """What the router must hold about the slot now; None when it must not serve."""
        return record_of(self)

    async def register(self) -> None:
        """Put the slot's facts into the router; a router that is away is told again later."""
        record = self.router_record()
        if record is not None:
            self._is_registered = True
            await self._tell_router(self._router.put_replica(self.spec.name, **record))
            if self.is_held:  # Meanwhile; the router may have heard the two in either order.
                self._is_registered = True
                await self._leave_router("quarantined")
                return
            self.routed_version = record["version"]
            self.changed.set()

    async def _bring_up(self) -> None:
        self.incarnation += 1
        self.handle = None
        if self.spec.needs is not None:
            # Before its turn to boot: one that finds no machine holds up nobody else.
            self._enter(SlotState.STARTING, f"waiting for a machine with {self.spec.needs.kind}")
            self.handle = self._spawn(self.spec, self.incarnation)
            await self.handle.placed()
        async with self._boots:
            version = self._target
            self.version, self.info, self.load = None, None, None
            self.cache_salt = ""
            self.bring_up = BringUp.BOOTING
            self._enter(SlotState.STARTING, f"booting version {version}")
            started_s = time.monotonic()
            if self.handle is None:
                self.handle = self._spawn(self.spec, self.incarnation)
            with self._reading(version):
                await self._stage(version)
                self.info = await self._call(
                    "boot",
                    version,
                    self._folder(version),
                    limit_s=self.spec.boot_timeout_s + self.spec.update_timeout_s,
                )
            self.version = self.info.version
            self.bring_up = BringUp.CATCHING_UP
            await self._catch_up()
            boot_s = time.monotonic() - started_s
            self.bring_up = BringUp.VERIFYING
            mean_abs = await self._gate.admit(self.version, self._folder(self.version))
            await self._catch_up()  # With what was published meanwhile.
        if self.is_held:
            raise _Held(self._hold_reason)
        self.has_served = True
        self.boot_s = time.monotonic() - started_s
        self.bring_up = BringUp.ROTATING_IN
        self._enter(
            SlotState.READY,
            "verified",
            boot_s=round(boot_s, 3),
            canary_mean_abs_nats=mean_abs,
            url=self.info.url,
            pid=self.info.pid,
            numerics_key=self.info.numerics_key,
        )
        await self.register()

    async def _catch_up(self) -> None:
        while (self.version or 0) < self._target and self._target != self._refused_version:
            await self._update()

    async def _serve(self) -> None:
        """Watch and update until the replica is gone; raises what ended it."""
        assert self.handle is not None
        progress = ProgressWatch(moved_s=time.monotonic())
        answered_s = time.monotonic()
        report_s = min(LOADS_TIMEOUT_S, self._fleet.stall_timeout_s / 2)
        watch = asyncio.create_task(self.handle.call("watch"), name=f"watch {self.spec.name}")
        try:
            while True:
                if self.is_held:
                    raise _Held(self._hold_reason)
                if watch.done():
                    raise Gone(watch.result())
                assert self.version is not None
                if self._target > self.version and self._target != self._refused_version:
                    await until_gone(watch, self._update_while_serving())
                    progress = ProgressWatch(moved_s=time.monotonic())
                try:
                    self.load = await until_gone(
                        watch, self.handle.call("loads", timeout_s=report_s)
                    )
                    answered_s = now_s = time.monotonic()
                    stalled_s = progress.stalled_s(self.load, now_s=now_s)
                    if stalled_s > self._fleet.stall_timeout_s:
                        raise Gone(
                            f"{self.load.running} requests run and {self.load.queued} wait, "
                            f"without a token for {stalled_s:.0f} s"
                        )
                except (TimeoutError, EngineError) as error:
                    silent_s = time.monotonic() - answered_s
                    if silent_s > self._fleet.stall_timeout_s:
                        raise Gone(
                            f"no load report for {silent_s:.0f} s ({error or 'timeout'})"
                        ) from None
                await until_due(watch, self._wake, every_s=self._fleet.loads_every_s)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _update_while_serving(self) -> None:
        self._enter(SlotState.UPDATING, f"to version {self._target}")
        report = await self._update()
        if report is None:
            self._enter(SlotState.READY, "keeps its version")
        else:
            facts: dict[str, float] = {"pull_s": report.pull_s, "pause_s": report.pause_s}
            if self.spec.staging is not None:
                facts["pull_bytes"] = report.pull_bytes
            why = f"serves version {self.version}"
            self._enter(SlotState.READY, why, kind="replica_updated", **facts)
        await self.register()

    async def _update(self) -> UpdateReport | None:
        """Activate the newest version; None when its files are bad and the replica goes on."""
        version = self._target
        try:
            with self._reading(version):
                await self._stage(version)
                if self._fleet.pause_mode == "in_place" and self._is_registered:
                    await self._change_salt(version)
                report: UpdateReport = await self._call(
                    "activate",
                    version,
                    self._folder(version),
                    self._fleet.pause_mode,
                    limit_s=self.spec.update_timeout_s * 2,
                )
        except WeightSyncError as error:
            # Not the replica's fault, and it serves on. A newer version may have replaced this
            # one meanwhile; otherwise this version is not tried again.
            if self._target == version:
                self._refused_version = version
                self._event("update_refused", str(error), version=version)
            return None
        self.version = report.version
        self.updates.append(report)
        await self._gate.prove(self.version)
        return report

    async def _stage(self, version: int) -> None:
        """Let the replica's machine fetch a version; a few machines at a time."""
        if self.spec.staging is not None:
            async with self._pulls:
                await self._call("stage", self._folder(version), limit_s=self.spec.update_timeout_s)

    async def _change_salt(self, version: int) -> None:
        """Requests that keep their KV make a flush impossible, so no later one may find a prefix
        of the old weights. The engine is paused first: nothing sampled by the old weights is
        cached under the new salt."""
        folder, limit_s = self._folder(version), self.spec.update_timeout_s * 2
        await self._call("pause_for", folder, self._fleet.pause_mode, limit_s=limit_s)
        self.cache_salt = salt = f"v{version}"
        await self._tell_router(self._router.put_replica(self.spec.name, cache_salt=salt))

    @contextmanager
    def _reading(self, version: int) -> Iterator[None]:
        self.loading = version
        try:
            yield
        finally:
            self.loading = None

    async def _take_down(self, state: SlotState, reason: str) -> None:
        """The router first, so that no further request goes there; then the process."""
        self._enter(state, reason)
        await self._leave_router("quarantined" if state is SlotState.QUARANTINED else "dead")
        if self.handle is not None:
            self.handle.kill()
            self.handle = None

    async def _leave_router(self, state: str) -> None:
        self.routed_version = None
        if self._is_registered:
            self._is_registered = False
            await self._tell_router(self._router.put_replica(self.spec.name, state=state))

    async def _stop_replica(self) -> None:
        """The polite end, when the slot itself ends; one without a machine has nothing to end."""
        handle, self.handle = self.handle, None
        assert handle is not None
        try:
            if not handle.is_placed:
                return
            await handle.call("stop", timeout_s=STOP_TIMEOUT_S)
        except (LaunchError, EngineError, TimeoutError) as error:
            log.info("%s did not stop by itself: %s", self.spec.name, error)
        finally:
            handle.kill()

    async def end(self, reason: str) -> None:
        """After `keep` was cancelled: say so, and leave the router."""
        if not self.state.is_final:
            self._enter(SlotState.STOPPED, reason)
        await self._tell_router(self._router.delete_replica(self.spec.name))

    def again(self, reason: str) -> None:
        """After `keep` was cancelled: whoever calls this starts it anew."""
        self.leaving = Leaving.NO
        self._enter(SlotState.RESTARTING, reason)

    async def _call(self, method: str, *args: Any, limit_s: float, **kwargs: Any) -> Any:
        assert self.handle is not None
        try:
            return await self.handle.call(
                method, *args, timeout_s=limit_s + CALL_MARGIN_S, **kwargs
            )
        except TimeoutError:
            raise EngineError(
                f"pools: {self.spec.name} did not finish {method} in {limit_s + CALL_MARGIN_S:g} s"
            ) from None

    def _folder(self, version: int) -> Path:
        return version_dir(self._fleet.store, self.spec.view, version)

    def _next_delay_s(self) -> float | None:
        if not self.has_served and self.incarnation >= FIRST_START_ATTEMPTS:
            return None
        return self._budget.next_delay_s(now_s=time.monotonic())

    def _enter(
        self, state: SlotState, reason: str, *, kind: str | None = None, **facts: Any
    ) -> None:
        self.state, self.reason = state, reason
        self._since_s = time.monotonic()
        self._event(kind or f"replica_{state.value}", reason, version=self.version, **facts)
        self.changed.set()

    def _event(self, kind: str, reason: str, **facts: Any) -> None:
        self._on_event(
            kind,
            reason,
            replica=self.spec.name,
            pool=self.spec.pool,
            incarnation=self.incarnation,
            **facts,
        )

    async def _tell_router(self, message: Awaitable[object]) -> None:
        try:
            await message
        except EngineError as error:
            self._event("router_unreachable", str(error))


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else text
