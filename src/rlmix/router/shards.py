"""What a router process that is one of several knows of the others.

Every session is owned by one shard, `crc32(session id) mod N`; a shard that is asked about another
shard's session passes the request on. Each shard writes what it has under way into a file of its
own, ten times a second, and reads the others': so all of them reckon with the whole load, and one
that was restarted learns the replicas from them. Invariant: two shards never serve the same
session.
"""

import asyncio
import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from rlmix.router import headers as names
from rlmix.router.admin import parse_record, reply_json
from rlmix.router.forward import Forwarder
from rlmix.router.merge import merge
from rlmix.router.metrics import Counters
from rlmix.router.registry import Registry
from rlmix.router.strategies import work

GOSSIP_EVERY_S = 0.1
GOSSIP_MAX_AGE_S = 2.0
"""A shard that wrote nothing for so long is gone; its load does not count."""

OWNER_LIMIT_S = 15.0
"""How long a request waits for the owner of its session to come back."""
OWNER_RETRY_S = 0.1
GATHER_TIMEOUT_S = 5.0

HOP_HEADERS = frozenset(
    ("host", "content-length", "connection", "transfer-encoding", "keep-alive", "date", "server")
)
"""Of one connection, not of the message."""

SESSION_PATHS = ("/generate", "/v1/chat/completions", "/v1/completions")
MERGED_PATHS = ("/pools", "/replicas", "/sessions", "/metrics")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSpec:
    """Which shard this process is."""

    index: int
    count: int
    folder: Path
    """Where the shards' files are."""


def owner_of(session_id: str, count: int) -> int:
    """The shard that owns a session; any client can reckon it."""
    return zlib.crc32(session_id.encode()) % count


class Peers:
    """The other shards."""

    def __init__(self, spec: ShardSpec, *, token: str | None) -> None:
        self._spec = spec
        self._headers = {"Authorization": token} if token else {}
        self.own_url = ""
        """Set by whoever starts the server, before the first request."""

    @property
    def index(self) -> int:
        return self._spec.index

    async def gossip(self, registry: Registry) -> None:
        """Write and read the shards' files until cancelled."""
        self._learn_replicas(registry)
        while True:
            if self.own_url:
                self._write(registry)
            self._read(registry)
            registry.serve_waiters()
            await asyncio.sleep(GOSSIP_EVERY_S)

    async def answer_elsewhere(
        self, request: web.Request, forwarder: Forwarder, counters: Counters
    ) -> web.StreamResponse | None:
        """The answer, when it is not for this shard (alone) to give; None: serve it here."""
        if names.FORWARDED in request.headers:
            return None
        method, path = request.method, request.path
        if path.startswith("/replicas/") and method in ("PUT", "DELETE"):
            await self._broadcast(request, forwarder)
            return None
        if method == "GET" and path in MERGED_PATHS:
            return await self._merged(request, forwarder)
        session_id = None
        if method == "POST" and path in SESSION_PATHS:
            session_id = request.headers.get(names.SESSION)
        elif path.startswith("/sessions/"):
            session_id = request.match_info.get("id")
        if not session_id:
            return None
        owner = owner_of(session_id, self._spec.count)
        if owner == self._spec.index:
            return None
        counters.forwarded += 1
        return await self._pass_on(request, owner, forwarder)

    # --- files

    def _path(self, index: int) -> Path:
        return self._spec.folder / f"shard-{index}.json"

    def _write(self, registry: Registry) -> None:
        replicas = {
            one.name: {
                "in_flight": one.in_flight,
                "work": work(one, registry.busy_frac) - one.others,
                "record": _record_fields(one.record),
            }
            for one in registry.upstreams.values()
            if not one.is_lost
        }
        document = {
            "url": self.own_url, "pid": os.getpid(), "at_s": time.time(), "replicas": replicas,
        }  # fmt: skip
        path = self._path(self._spec.index)
        fresh = path.with_suffix(".new")
        fresh.write_bytes(orjson.dumps(document))
        fresh.replace(path)

    def _others(self) -> Iterator[dict[str, Any]]:
        """Documents of the other shards that live."""
        for index in range(self._spec.count):
            if index != self._spec.index:
                document = self._look(index)
                if document is not None:
                    yield document

    def _look(self, index: int) -> dict[str, Any] | None:
        try:
            document = orjson.loads(self._path(index).read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        is_fresh = time.time() - document["at_s"] <= GOSSIP_MAX_AGE_S
        return dict(document) if is_fresh else None

    def _read(self, registry: Registry) -> None:
        peers: dict[str, tuple[int, float]] = {}
        for document in self._others():
            for name, held in document["replicas"].items():
                in_flight, amount = peers.get(name, (0, 0.0))
                peers[name] = (in_flight + held["in_flight"], amount + held["work"])
        for one in registry.upstreams.values():
            one.peers_in_flight, one.peers = peers.get(one.name, (0, 0.0))

    def _learn_replicas(self, registry: Registry) -> None:
        """After a restart: what a fleet registered at the others."""
        for document in self._others():
            for name, held in document["replicas"].items():
                if name not in registry.upstreams:
                    with contextlib.suppress(ValueError):
                        body = orjson.dumps(held["record"])
                        registry.put(parse_record(name, body, known=None))

    # --- requests

    async def _pass_on(
        self, request: web.Request, owner: int, forwarder: Forwarder
    ) -> web.StreamResponse:
        """Let the owner answer, waiting for it while it is restarted."""
        body = await request.read()
        kept = {k: v for k, v in request.headers.items() if k.lower() not in HOP_HEADERS}
        kept[names.FORWARDED] = str(self._spec.index)
        deadline_s = time.monotonic() + OWNER_LIMIT_S
        while True:
            document = self._look(owner)
            if document is not None:
                try:
                    async with forwarder.http.request(
                        request.method,
                        document["url"] + request.path_qs,
                        data=body,
                        headers=kept,
                        timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
                    ) as response:
                        return await _relay(request, response)
                except aiohttp.ClientError:
                    # Nothing has reached the client: the owner's successor may serve it.
                    pass
            if time.monotonic() >= deadline_s:
                text = f"router: shard {owner}, which owns the session, is away; ask again"
                response_503 = reply_json({"error": text}, status=503)
                response_503.headers["Retry-After"] = "1"
                return response_503
            await asyncio.sleep(OWNER_RETRY_S)

    async def _broadcast(self, request: web.Request, forwarder: Forwarder) -> None:
        """Tell the others what the operator says of a replica; one that is away learns it from the
        files when it is back."""
        body = await request.read()
        await self._ask_all(forwarder, request.method, request.path, body)

    async def _merged(
        self, request: web.Request, forwarder: Forwarder
    ) -> web.StreamResponse | None:
        """One answer for all shards; this shard's own is asked for as well, by its own door."""
        found = await self._ask_all(forwarder, "GET", request.path, None, with_self=True)
        if not found:
            return None
        body, content_type = merge(request.path, found)
        return web.Response(body=body, content_type=content_type)

    async def _ask_all(
        self,
        forwarder: Forwarder,
        method: str,
        path: str,
        body: bytes | None,
        *,
        with_self: bool = False,
    ) -> list[bytes]:
        urls = [document["url"] for document in self._others()]
        if with_self:
            urls.insert(0, self.own_url)
        headers = {**self._headers, names.FORWARDED: str(self._spec.index)}
        timeout = aiohttp.ClientTimeout(total=GATHER_TIMEOUT_S)

        async def ask(url: str) -> bytes | None:
            try:
                async with forwarder.http.request(
                    method, url + path, data=body, headers=headers, timeout=timeout
                ) as response:
                    content = await response.read()
                    return content if response.status == 200 else None
            except (aiohttp.ClientError, TimeoutError):
                return None

        answers = await asyncio.gather(*[ask(url) for url in urls])
        return [answer for answer in answers if answer is not None]


async def _relay(request: web.Request, response: aiohttp.ClientResponse) -> web.StreamResponse:
    headers = {k: v for k, v in response.headers.items() if k.lower() not in HOP_HEADERS}
    if "Content-Length" in response.headers:
        return web.Response(body=await response.read(), status=response.status, headers=headers)
    relayed = web.StreamResponse(status=response.status, headers=headers)
    first = await response.content.readany()
    await relayed.prepare(request)
    await relayed.write(first)
    try:
        async for piece in response.content.iter_any():
            await relayed.write(piece)
        await relayed.write_eof()
    except aiohttp.ClientError:
        # Half an answer must not end like a whole one.
        if request.transport is not None:
            request.transport.abort()
    return relayed


def _record_fields(record: Any) -> dict[str, Any]:
    """A record as `PUT /replicas/{name}` takes it."""
    fields = {
        "pool": record.pool, "url": record.url, "numerics_key": record.numerics_key,
        "speed": record.speed, "max_running": record.max_running, "version": record.version,
        "state": record.state.value, "view": record.view,
        "max_total_tokens": record.max_total_tokens,
        "max_context_tokens": record.max_context_tokens, "state_slots": record.state_slots,
        "token_env": record.token_env or None, "cache_salt": record.cache_salt or None,
    }  # fmt: skip
    return {key: value for key, value in fields.items() if value is not None}


def write_json(path: Path, document: dict[str, Any]) -> None:
    """A file that is whole whenever it is there."""
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(document))
    fresh.rename(path)
