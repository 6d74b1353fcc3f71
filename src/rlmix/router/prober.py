"""The tasks that ask replicas how they are, about once a second each.

Two kinds: replicas of the command line, which nobody else speaks for (stand-alone), are registered,
declared dead and brought back here; those that a fleet registered are only asked for their load.
Invariant: a replica of the command line gets sessions only after it answered `/ready`, and after a
death only by way of restarting and stale.
"""

import asyncio
import contextlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from rlmix.router.probe import DEFAULT_MAX_RUNNING, Loads, read_loads, read_server_info
from rlmix.router.registry import Registry
from rlmix.router.states import Health, ReplicaState
from rlmix.router.step_model import StepModel
from rlmix.router.upstream import ReplicaRecord, Upstream

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticReplica:
    """One replica of the command line."""

    name: str
    url: str
    speed: float
    prior: StepModel | None = None

    @property
    def pool(self) -> str:
        """`h100-0` and `h100-1` are of pool `h100`."""
        return re.sub(r"[-_]\d+$", "", self.name) or self.name


class Prober:
    """Asks everybody; `run` until it is cancelled."""

    def __init__(
        self,
        replicas: Sequence[StaticReplica],
        registry: Registry,
        *,
        token: str | None,
        every_s: float,
        stall_timeout_s: float,
    ) -> None:
        self._static = {replica.name: replica for replica in replicas}
        self._registry = registry
        self._token = token
        self._every_s = every_s
        self._stall_timeout_s = stall_timeout_s
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, http: aiohttp.ClientSession) -> None:
        try:
            while True:
                names = [*self._static, *(n for n in self._registry.upstreams)]
                for name in dict.fromkeys(names):
                    task = self._tasks.get(name)
                    if task is None or task.done():
                        self._tasks[name] = asyncio.create_task(
                            self._probe(http, name), name=f"probe {name}"
                        )
                await asyncio.sleep(self._every_s)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _probe(self, http: aiohttp.ClientSession, name: str) -> None:
        """One look; whatever goes wrong is the replica's news, never the end of the prober."""
        known = self._registry.upstreams.get(name)
        static = self._static.get(name)
        try:
            if static is not None:
                await self._probe_static(http, static, known)
            elif known is not None and not known.is_lost:
                await self._ask_loads(http, known)
        except aiohttp.ClientConnectorError as error:
            if static is not None and known is not None and not known.is_lost:
                log.warning("replica %s is gone: %s", name, error)
                known.lose(f"{type(error).__name__}: {error}")
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            if static is not None and known is not None and not known.is_lost:
                known.health_record.fault(now_s=known.clock(), reason=f"probe: {error!r}")
        if known is not None and not known.is_lost:
            self._check_progress(known)

    def _check_progress(self, known: Upstream) -> None:
        stalled_s = known.stalled_s(known.loads.progress)
        if stalled_s > self._stall_timeout_s:
            log.warning(
                "replica %s: no token for %.0f s with requests there", known.name, stalled_s
            )
            known.lose(f"no token for {stalled_s:.0f} s with {known.in_flight} requests there")

    async def _probe_static(
        self, http: aiohttp.ClientSession, static: StaticReplica, known: Upstream | None
    ) -> None:
        status, _ = await self._get(http, static.url, "/ready")
        is_ready = status in (200, 404)  # Not every server has it; one that answers is there.
        if known is None:
            if is_ready:
                self._registry.put(await self._record(http, static))
            return
        loads = await self._ask_loads(http, known) if is_ready else None
        version = known.version if loads is None or loads.version is None else loads.version
        if loads is not None and loads.version is None and not known.health.is_alive:
            version = await self._version(http, static) or known.version
        state = ReplicaState.READY if is_ready else ReplicaState.UPDATING
        if (known.record.state, known.version) != (state, version):
            known.update(known.change(state=state, version=version))
            self._registry.serve_waiters()
        before = known.health
        newest = max(
            (u.version for u in self._registry.upstreams.values() if u.view == known.view),
            default=version,
        )
        after = known.health_record.answered(
            is_ready=is_ready, is_behind=version < newest, now_s=known.clock()
        )
        if after is not before:
            log.info("replica %s: %s -> %s", known.name, before.value, after.value)
            if after in (Health.STALE, Health.HEALTHY):
                known.revived()
                self._registry.serve_waiters()

    async def _ask_loads(self, http: aiohttp.ClientSession, known: Upstream) -> Loads:
        sent_in_flight = known.in_flight
        headers = known.record.authorization(self._token, os.environ)
        status, document = await self._get(http, known.url, "/v1/loads?include=all", headers)
        if status != 200:
            return Loads()
        loads = read_loads(document)
        known.observe_loads(loads, own=(sent_in_flight + known.in_flight) / 2)
        return loads

    async def _version(self, http: aiohttp.ClientSession, static: StaticReplica) -> int | None:
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            status, document = await self._get(http, static.url, "/server_info")
            return read_server_info(document).version if status == 200 else None
        return None

    async def _record(self, http: aiohttp.ClientSession, static: StaticReplica) -> ReplicaRecord:
        status, info = await self._get(http, static.url, "/server_info")
        facts = read_server_info(info if status == 200 else {})
        status, document = await self._get(http, static.url, "/v1/loads?include=all")
        loads = read_loads(document) if status == 200 else Loads()
        version = facts.version if loads.version is None else loads.version
        return ReplicaRecord(
            name=static.name,
            pool=static.pool,
            url=static.url,
            numerics_key=facts.numerics_key,
            speed=static.speed,
            prior=static.prior,
            max_running=facts.max_running or loads.max_running or DEFAULT_MAX_RUNNING,
            version=version or 0,
            state=ReplicaState.READY,
            view=facts.view or "",
            max_total_tokens=facts.max_total_tokens or loads.max_total_tokens,
            max_context_tokens=facts.max_context_tokens,
        )

    async def _get(
        self,
        http: aiohttp.ClientSession,
        url: str,
        path: str,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Mapping[str, Any]]:
        """With the run's token, unless other headers are given."""
        if headers is None:
            headers = {"Authorization": self._token} if self._token else {}
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with http.get(url + path, headers=headers, timeout=timeout) as response:
            content = await response.read()
            try:
                document = orjson.loads(content) if content.strip() else {}
            except orjson.JSONDecodeError:
                document = {}
            return response.status, document if isinstance(document, dict) else {}
