"""The router's HTTP side: many sessions' requests at a time, each passed to one replica.

Invariant: a client sees a whole answer of one replica, a stream of one replica, or an error that
says what to do; never parts of two. Bodies of `/generate` pass as bytes and are not parsed: one
with 262,144 ids would cost 27 ms to read.
"""

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from rlmix.core.bearer import is_bearer
from rlmix.core.errors import ConfigError
from rlmix.router import headers as names
from rlmix.router.admin import Admin, reply_json
from rlmix.router.dispatch import VIEWS, Dispatcher, DispatchSpec, refuse
from rlmix.router.forward import JSON_TYPE, Call, Forwarder, Reply
from rlmix.router.groups import PLACEMENTS
from rlmix.router.metrics import Counters
from rlmix.router.openai_api import OpenAIApi
from rlmix.router.prober import Prober, StaticReplica
from rlmix.router.registry import Registry
from rlmix.router.replies import EventSink, keep_alive_reply, to_response
from rlmix.router.scan import scan_request
from rlmix.router.sessions import SessionTable
from rlmix.router.shards import Peers, ShardSpec
from rlmix.router.store import SessionStore
from rlmix.router.strategies import STRATEGIES
from rlmix.router.upstream import Upstream

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20
"""A million token ids in JSON take 8 MB; this only stops nonsense."""

MAX_ID_CHARS = 512
"""Of ids that clients make up; they are kept, listed and sent on."""

SWEEP_EVERY_S = 2.0
"""How often idle sessions are looked for."""
FIT_EVERY_S = 0.5
"""How often replicas' times are fitted anew."""
KEPT_EXPIRIES = 10.0
"""Rows of the store live for so many times the idle expiry: a session in memory writes its row
when it moves, and else about once in one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """What a router is started with."""

    policy: str
    """A name in `strategies.STRATEGIES`."""
    queue_timeout_s: float
    """How long a request without a home may wait for a place before it is answered 503."""
    request_timeout_s: float
    """How long one request may take on a replica before it is answered 504."""
    idle_expiry_s: float
    """A session without a request for this long is forgotten."""
    max_sessions: int
    """Above this number the longest idle sessions leave memory."""
    observe_speeds: bool
    """True fits the replicas' times to what they show; False keeps the priors."""
    view: str = "strict"
    """A name in `dispatch.VIEWS`."""
    placement: str = "free"
    """A name in `groups.PLACEMENTS`."""
    break_affinity_s: float = 30.0
    """A session leaves a living replica when it would be done this much sooner elsewhere."""
    staleness_s: float = 0.0
    """What a weight version behind the newest costs a replica, as delay."""
    ramp_s: float = 0.0
    """Over this time a new replica's share of new sessions grows to its whole batch."""
    admit_batches: float = 4.0
    """Batches of requests that a replica may have, running and waiting, and still be given new
    sessions."""
    max_waiting: int = 4096
    """Requests that may wait for a place; one more is answered 503 at once."""
    probe_every_s: float = 1.0
    """How often replicas are asked for their load; 0 never asks."""
    stall_timeout_s: float = 120.0
    """A replica with requests and without a token for this long is given up."""
    replicas: tuple[StaticReplica, ...] = ()
    """Replicas that the router asks itself how they are; a fleet registers its own by PUT."""
    model_dir: Path | None = None
    """Folder of the tokenizer and chat template; None: no OpenAI-style endpoints."""
    model_name: str = "rlmix"
    """What OpenAI clients call the model."""
    store_path: Path | None = None
    """File of sessions' homes and trajectories; None keeps none over a restart."""
    shard: ShardSpec | None = None
    """Of a router that is one of several processes."""
    token: str | None = None
    """Bearer token that every request but `/ping` must carry; None asks for none."""


class Router:
    """One router; `app` is what aiohttp serves."""

    def __init__(self, spec: RouterSpec) -> None:
        for key, value, known in (
            ("policy", spec.policy, STRATEGIES),
            ("view", spec.view, VIEWS),
            ("placement", spec.placement, PLACEMENTS),
        ):
            if value not in known:
                raise ConfigError(
                    f"router.{key}: {value!r} is not known; use one of {', '.join(known)}"
                )
        self._spec = spec
        self._token = f"Bearer {spec.token}" if spec.token else None
        self.registry = Registry(
            strategy=STRATEGIES[spec.policy],
            observe_speeds=spec.observe_speeds,
            placement=spec.placement,
            break_affinity_s=spec.break_affinity_s,
            staleness_s=spec.staleness_s,
            ramp_s=spec.ramp_s,
            max_waiting=spec.max_waiting,
            admit_batches=spec.admit_batches,
        )
        self.store = SessionStore(spec.store_path)
        self.sessions: SessionTable[Upstream] = SessionTable(
            idle_expiry_s=spec.idle_expiry_s, max_sessions=spec.max_sessions, ledger=self.store
        )
        self.counters = Counters()
        self.forwarder = Forwarder(token=self._token)
        self._dispatcher = Dispatcher(
            DispatchSpec(
                queue_timeout_s=spec.queue_timeout_s,
                view=spec.view,
                request_timeout_s=spec.request_timeout_s,
                started_s=time.monotonic(),
            ),
            self.registry,
            self.sessions,
            self.forwarder,
            self.counters,
        )
        self._peers = None if spec.shard is None else Peers(spec.shard, token=self._token)
        self._openai = (
            None
            if spec.model_dir is None
            else OpenAIApi(
                spec.model_dir,
                model_name=spec.model_name,
                store=self.store,
                serve=self._dispatcher.serve,
                new_call=self._call,
            )
        )
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        self.app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/ping", self._ping),
                web.get("/health", self._ping),
                web.delete("/sessions/{id}", self._release),
                *Admin(self.registry, self.sessions, self.counters, self.forwarder).routes(),
            ]
        )
        if self._openai is not None:
            self.app.add_routes(self._openai.routes())
        self.app.cleanup_ctx.append(self._run)

    def set_own_url(self, url: str) -> None:
        """Where the other shards reach this one."""
        if self._peers is not None:
            self._peers.own_url = url

    async def _run(self, app: web.Application) -> Any:
        await self.forwarder.open()
        tasks = [
            asyncio.create_task(self._sweep(), name="router sweep"),
            asyncio.create_task(self._fit(), name="router fit"),
        ]
        if self._spec.probe_every_s > 0:
            prober = Prober(
                self._spec.replicas,
                self.registry,
                token=self._token,
                every_s=self._spec.probe_every_s,
                stall_timeout_s=self._spec.stall_timeout_s,
            )
            tasks.append(asyncio.create_task(prober.run(self.forwarder.http), name="prober"))
        if self._peers is not None:
            tasks.append(
                asyncio.create_task(self._peers.gossip(self.registry), name="router gossip")
            )
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.forwarder.close()
        self.store.close()

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_EVERY_S, self._spec.idle_expiry_s / 2))
            self.sessions.expire(now_s=time.monotonic())
            self.store.expire(KEPT_EXPIRIES * self._spec.idle_expiry_s)
            if self._openai is not None:
                self._openai.forget_idle(self._spec.idle_expiry_s)

    async def _fit(self) -> None:
        while True:
            await asyncio.sleep(FIT_EVERY_S)
            self.registry.refresh_speeds()
            self.registry.serve_waiters()

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """The token, and the shard that owns the session."""
        token = self._spec.token
        is_guarded = request.path not in ("/ping", "/health")
        if token and is_guarded and not is_bearer(request.headers, token):
            return reply_json(
                {"error": "router: token missing or wrong (Authorization: Bearer ...)"},
                status=401,
            )
        for name in (names.SESSION, names.GROUP, names.REQUEST_ID):
            given = request.headers.get(name, "")
            if len(given) > MAX_ID_CHARS or not given.isprintable():
                text = f"{name}: give at most {MAX_ID_CHARS} printable characters"
                return to_response(refuse(400, text))
        if self._peers is not None:
            answer = await self._peers.answer_elsewhere(request, self.forwarder, self.counters)
            if answer is not None:
                return answer
        return await handler(request)

    def _call(self, request: web.Request, body: bytes, *, accept: str = JSON_TYPE) -> Call:
        """What the headers and the scanned body say.

        Raises:
            ValueError: a header that is no number.
        """
        headers = request.headers
        limit_s = self._spec.request_timeout_s
        asked_s = _number(headers.get(names.TIMEOUT), names.TIMEOUT)
        version = _number(headers.get(names.MIN_VERSION), names.MIN_VERSION, whole=True)
        return Call(
            body=body,
            facts=scan_request(body),
            request_id=headers.get(names.REQUEST_ID) or uuid.uuid4().hex,
            started_s=time.monotonic(),
            limit_s=limit_s if asked_s is None else min(limit_s, asked_s),
            accept=accept,
            min_version=None if version is None else int(version),
            group_id=headers.get(names.GROUP, ""),
            deadline_s=_number(headers.get(names.DEADLINE), names.DEADLINE),
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        session_id = request.headers.get(names.SESSION, "")
        if not session_id:
            return to_response(refuse(400, "X-Session-Id: missing; send the session's own id"))
        body = await request.read()
        try:
            call = self._call(request, body, accept=request.headers.get("Accept", JSON_TYPE))
            every_s = _number(request.headers.get(names.KEEP_ALIVE), names.KEEP_ALIVE)
        except ValueError as error:
            return to_response(refuse(400, str(error)))
        if call.facts.is_stream:
            sink = EventSink(request, every_s=every_s)
            call.sink = sink
            return await sink.finish(self._dispatcher.serve(session_id, call))
        if every_s is not None and call.accept.startswith((JSON_TYPE, "*/*")):
            answer = self._dispatcher.serve(session_id, call)
            return await keep_alive_reply(request, answer, every_s=every_s)
        return to_response(self._owned(await self._dispatcher.serve(session_id, call)))

    def _owned(self, reply: Reply) -> Reply:
        if self._peers is not None:
            reply.headers[names.SHARD] = self._peers.own_url
        return reply

    async def _release(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        if self._openai is not None:
            self._openai.forget(session_id)
        return reply_json({"released": self.sessions.release(session_id)})

    async def _ping(self, request: web.Request) -> web.Response:
        shard = {} if self._peers is None else {"shard": self._peers.index}
        return web.Response(
            body=orjson.dumps({"ok": True, "pid": os.getpid(), **shard}), content_type=JSON_TYPE
        )


def _number(text: str | None, name: str, *, whole: bool = False) -> float | None:
    if text is None:
        return None
    try:
        number = float(int(text)) if whole else float(text)
    except (ValueError, OverflowError):
        kind = "whole number" if whole else "number"
        raise ValueError(f"{name}: {text!r} is not a {kind}") from None
    if number != number or number < 0:
        raise ValueError(f"{name}: {text!r}; give a number of at least 0")
    return number
