"""The task that asks every replica of a stand-alone router how it is, once a second.

Invariant: a replica gets sessions only after it answered `/ready`, and `/v1/loads` or
`/server_info` said what it serves; one that stops answering gets no new ones.
"""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from rlmix.router.probe import DEFAULT_MAX_RUNNING, Loads, read_loads, read_server_info
from rlmix.router.registry import Registry, ReplicaRecord
from rlmix.router.strategies import ReplicaState

log = logging.getLogger(__name__)

PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticReplica:
    """One replica of the command line."""

    name: str
    url: str
    speed: float

    @property
    def pool(self) -> str:
        """`h100-0` and `h100-1` are of pool `h100`."""
        return re.sub(r"[-_]\d+$", "", self.name) or self.name


class Prober:
    """Keeps the registry's records of static replicas as the replicas themselves say."""

    def __init__(
        self, replicas: Sequence[StaticReplica], registry: Registry, *, token: str | None
    ) -> None:
        self._replicas = replicas
        self._registry = registry
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    async def run(self, http: aiohttp.ClientSession) -> None:
        await asyncio.gather(*[self._watch(http, replica) for replica in self._replicas])

    async def _watch(self, http: aiohttp.ClientSession, replica: StaticReplica) -> None:
        while True:
            try:
                await self._probe(http, replica)
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                known = self._registry.upstreams.get(replica.name)
                if known is not None and known.state.takes_new_sessions:
                    log.warning("replica %s: probe failed: %r", replica.name, error)
            await asyncio.sleep(PROBE_EVERY_S)

    async def _probe(self, http: aiohttp.ClientSession, replica: StaticReplica) -> None:
        known = self._registry.upstreams.get(replica.name)
        is_ready = (await self._get(http, replica, "/ready"))[0] == 200
        status, document = await self._get(http, replica, "/v1/loads?include=all")
        loads = read_loads(document) if status == 200 else Loads()
        if known is None or known.is_lost:
            if is_ready:
                self._registry.put(await self._record(http, replica, loads))
            return
        state = ReplicaState.READY if is_ready else ReplicaState.UPDATING
        version = known.version if loads.version is None else loads.version
        if (known.state, known.version) != (state, version):
            self._registry.put(known.record(state=state, version=version))

    async def _record(
        self, http: aiohttp.ClientSession, replica: StaticReplica, loads: Loads
    ) -> ReplicaRecord:
        status, document = await self._get(http, replica, "/server_info")
        facts = read_server_info(document if status == 200 else {})
        version = facts.version if loads.version is None else loads.version
        return ReplicaRecord(
            name=replica.name,
            pool=replica.pool,
            url=replica.url,
            numerics_key=facts.numerics_key,
            speed=replica.speed,
            max_running=facts.max_running or loads.max_running or DEFAULT_MAX_RUNNING,
            version=version or 0,
            state=ReplicaState.READY,
        )

    async def _get(
        self, http: aiohttp.ClientSession, replica: StaticReplica, path: str
    ) -> tuple[int, Mapping[str, Any]]:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with http.get(replica.url + path, headers=self._headers, timeout=timeout) as response:
            content = await response.read()
            try:
                document = orjson.loads(content) if content.strip() else {}
            except orjson.JSONDecodeError:
                document = {}
            return response.status, document if isinstance(document, dict) else {}


def parse_replicas(named: Sequence[str], speeds: Sequence[str]) -> tuple[StaticReplica, ...]:
    """Replicas out of `NAME=URL` and `NAME=X` arguments.

    Raises:
        ValueError: one that is malformed or given twice, or a speed of no replica.
    """
    prior: dict[str, float] = {}
    for text in speeds:
        name, _, value = text.partition("=")
        try:
            prior[name] = float(value)
        except ValueError:
            raise ValueError(f"--speed {text}: give NAME=X with a number above 0") from None
        if not 0 < prior[name] < float("inf"):
            raise ValueError(f"--speed {text}: give NAME=X with a number above 0")
    replicas: dict[str, StaticReplica] = {}
    for text in named:
        name, _, url = text.partition("=")
        if not name or not url.startswith(("http://", "https://")):
            raise ValueError(f"--replica {text}: give NAME=URL, e.g. h100-0=http://127.0.0.1:30000")
        if name in replicas:
            raise ValueError(f"--replica {text}: the name {name} is given twice")
        replicas[name] = StaticReplica(name=name, url=url.rstrip("/"), speed=prior.get(name, 1.0))
    unknown = sorted(set(prior) - set(replicas))
    if unknown:
        raise ValueError(
            f"--speed {unknown[0]}=...: no --replica has this name; "
            f"known are {', '.join(replicas) or 'none'}"
        )
    return tuple(replicas.values())
