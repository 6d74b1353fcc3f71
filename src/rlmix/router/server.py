"""The router's HTTP side: a proxy for one session's requests at a time, many at once.

Invariant: a client sees a whole answer of one replica, or an error that says what to do; never a
part of one, and never parts of two. Generation is not streamed, so a request whose replica died
can be sent again elsewhere: nothing of the lost one has reached anybody.

Bodies pass as bytes and are not parsed: a body with 128K ids would cost 14 ms to read. Header
names are those of `rlmix.engine.protocol`, spelled out because that file loads numpy (a test
compares them).
"""

import asyncio
import hmac
import logging
import os
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp
import orjson
from aiohttp import web

from rlmix.core.errors import ConfigError
from rlmix.router.metrics import Counters, metrics_text
from rlmix.router.prober import Prober, StaticReplica
from rlmix.router.registry import Registry, ReplicaRecord, Upstream
from rlmix.router.sessions import Session, SessionTable
from rlmix.router.strategies import STRATEGIES, Refusal, ReplicaState

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 << 20
"""A million token ids in JSON take 8 MB; this only stops nonsense."""

MAX_MOVES_PER_REQUEST = 4
"""A request that saw this many replicas die is given back as 503: it may be what kills them."""

SWEEP_EVERY_S = 2.0
"""How often idle sessions are looked for and speeds are recomputed."""

CONNECT_TIMEOUT_S = 5.0
"""A replica that does not accept a connection in this time is as good as gone."""

RETRY_AFTER_S = "1"

JSON_TYPE = "application/json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSpec:
    """What a router is started with."""

    policy: str
    """A name in `strategies.STRATEGIES`."""
    queue_timeout_s: float
    """How long a new session may wait for a place before it is answered 503."""
    request_timeout_s: float
    """How long one request may take on a replica before it is answered 504."""
    idle_expiry_s: float
    """A session without a request for this long is forgotten."""
    max_sessions: int
    """Above this number the longest idle sessions are forgotten."""
    observe_speeds: bool
    """True corrects the replicas' speeds by what their turns show; False keeps the priors."""
    replicas: tuple[StaticReplica, ...] = ()
    """Replicas that the router asks itself how they are; a fleet registers its own by PUT."""
    token: str | None = None
    """Bearer token that every request but `/ping` must carry; None asks for none."""


class _ReplicaLost(Exception):
    """The replica died under the request."""


class Router:
    """One router; `app` is what aiohttp serves."""

    def __init__(self, spec: RouterSpec) -> None:
        if spec.policy not in STRATEGIES:
            raise ConfigError(
                f"router.policy: {spec.policy!r} is not known; use one of {', '.join(STRATEGIES)}"
            )
        self._spec = spec
        self._token = f"Bearer {spec.token}" if spec.token else None
        self.registry = Registry(
            strategy=STRATEGIES[spec.policy], observe_speeds=spec.observe_speeds
        )
        self.sessions: SessionTable[Upstream] = SessionTable(
            idle_expiry_s=spec.idle_expiry_s, max_sessions=spec.max_sessions
        )
        self.counters = Counters()
        self._http: aiohttp.ClientSession | None = None
        self.app = web.Application(client_max_size=MAX_BODY_BYTES)
        self.app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/ping", self._ping),
                web.delete("/sessions/{id}", self._release),
                web.get("/sessions", self._list_sessions),
                web.get("/pools", self._list_pools),
                web.get("/replicas", self._list_replicas),
                web.put("/replicas/{name}", self._put_replica),
                web.delete("/replicas/{name}", self._delete_replica),
                web.get("/metrics", self._metrics),
            ]
        )
        self.app.cleanup_ctx.append(self._run)

    async def _run(self, app: web.Application) -> Any:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
        timeout = aiohttp.ClientTimeout(
            total=self._spec.request_timeout_s, sock_connect=CONNECT_TIMEOUT_S
        )
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
        ) as self._http:
            tasks = [asyncio.create_task(self._sweep(), name="router sweep")]
            if self._spec.replicas:
                prober = Prober(self._spec.replicas, self.registry, token=self._spec.token)
                tasks.append(asyncio.create_task(prober.run(self._http), name="router prober"))
            yield
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_EVERY_S)
            self.sessions.expire(now_s=time.monotonic())
            self.registry.refresh_speeds()

    async def _generate(self, request: web.Request) -> web.Response:
        self._check_token(request)
        session_id = request.headers.get("X-Session-Id", "")
        if not session_id:
            return self._refuse(400, "X-Session-Id: missing; send the session's own id")
        try:
            min_version = int(request.headers["X-Min-Version"])
        except KeyError:
            min_version = None
        except ValueError:
            return self._refuse(400, "X-Min-Version: not a whole number")
        accept = request.headers.get("Accept", JSON_TYPE)
        body = await request.read()
        started_s = time.monotonic()
        session = self.sessions.open(session_id, now_s=started_s)
        tool_s = None if session.answered_s is None else started_s - session.answered_s
        session.in_flight += 1
        try:
            response = await self._serve(session, body, min_version=min_version, accept=accept)
        finally:
            session.in_flight -= 1
            now_s = time.monotonic()
            self.sessions.touch(session, now_s=now_s)
        self.counters.count_response(response.status)
        if response.status == 200:
            session.turns += 1
            session.answered_s = now_s
            self.registry.observe_session(model_s=now_s - started_s, tool_s=tool_s)
        return response

    async def _serve(
        self, session: Session[Upstream], body: bytes, *, min_version: int | None, accept: str
    ) -> web.Response:
        """Find the session's replica, send, and start over elsewhere when the replica dies."""
        for _ in range(MAX_MOVES_PER_REQUEST + 1):
            upstream = session.home
            if upstream is not None and upstream.keeps_sessions:
                if min_version is not None and upstream.version < min_version:
                    return self._too_old(min_version, upstream)
                upstream.in_flight += 1
            else:
                placed = await self._place(session, min_version=min_version)
                if isinstance(placed, web.Response):
                    return placed
                upstream = placed
            try:
                return await self._forward(
                    session, upstream, body, min_version=min_version, accept=accept
                )
            except _ReplicaLost as error:
                upstream.faults += 1
                self.counters.lost_requests += 1
                log.warning(
                    "request of session %s lost on %s: %s",
                    session.session_id,
                    upstream.name,
                    error,
                )
            except TimeoutError:
                return self._refuse(
                    504,
                    f"replica {upstream.name} did not answer in {self._spec.request_timeout_s:g} s",
                )
            finally:
                self.registry.give_place(upstream)
        return self._refuse(
            503, f"{MAX_MOVES_PER_REQUEST + 1} replicas died under this request; giving it back"
        )

    async def _place(
        self, session: Session[Upstream], *, min_version: int | None
    ) -> Upstream | web.Response:
        """Give the session a home, with this request's place taken there."""
        chosen = await self.registry.take_place(
            min_version=min_version, timeout_s=self._spec.queue_timeout_s
        )
        if chosen is Refusal.TOO_OLD:
            return self._too_old(min_version, None)
        if isinstance(chosen, Refusal):
            why = {
                Refusal.NONE_READY: "no replica is ready",
                Refusal.ALL_FULL: "all ready replicas are full",
            }[chosen]
            return self._refuse(503, f"{why} (waited {self._spec.queue_timeout_s:g} s)")
        current = session.home
        if current is not None and current.keeps_sessions:
            # Another request of the same session found a home while this one waited.
            self.registry.give_place(chosen)
            current.in_flight += 1
            return current
        if current is not None:
            session.moves += 1
            self.counters.rehomed += 1
        self.sessions.settle(session, chosen)
        return chosen

    async def _forward(
        self,
        session: Session[Upstream],
        upstream: Upstream,
        body: bytes,
        *,
        min_version: int | None,
        accept: str,
    ) -> web.Response:
        """Send the request and wait for the whole answer.

        Raises:
            _ReplicaLost: the connection broke twice, or the fleet gave the replica up.
            TimeoutError: no answer within the request's limit.
        """
        started_s = time.monotonic()
        in_flight_before = upstream.in_flight
        task = asyncio.ensure_future(
            self._post(upstream, body, self._headers(session, min_version, accept))
        )
        upstream.requests.add(task)
        try:
            status, content, headers = await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if upstream.is_lost and me is not None and not me.cancelling():
                raise _ReplicaLost("the fleet gave the replica up") from None
            raise
        except aiohttp.ClientError as error:
            if not upstream.is_lost:
                upstream.lose()
            raise _ReplicaLost(f"{type(error).__name__}: {error}") from None
        finally:
            upstream.requests.discard(task)
        if status == 200:
            turn_s = time.monotonic() - started_s
            upstream.observe_turn(turn_s, (in_flight_before + upstream.in_flight) / 2)
        elif status == 503 and session.turns == 0 and session.in_flight == 1:
            # Full, and nothing of the session is cached there: let the next try go elsewhere.
            self.sessions.settle(session, None)
        headers["X-Rlmix-Pool"] = upstream.pool
        headers["X-Rlmix-Replica"] = upstream.name
        headers["X-Rlmix-Numerics"] = upstream.numerics_key
        headers["X-Rlmix-Rehomed"] = str(session.moves)
        return web.Response(body=content, status=status, headers=headers)

    def _headers(
        self, session: Session[Upstream], min_version: int | None, accept: str
    ) -> dict[str, str]:
        headers = {
            "Content-Type": JSON_TYPE,
            "X-Session-Id": session.session_id,
            "Accept": accept,
        }
        if min_version is not None:
            headers["X-Min-Version"] = str(min_version)
        if self._token is not None:
            headers["Authorization"] = self._token
        return headers

    async def _post(
        self, upstream: Upstream, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, dict[str, str]]:
        """One exchange with a replica; a broken connection is tried once more.

        A replica that is alive may close an idle connection just as we use it; one that is dead
        refuses the second connection at once.
        """
        assert self._http is not None
        for is_last in (False, True):
            try:
                async with self._http.post(
                    upstream.url + "/generate", data=body, headers=headers
                ) as response:
                    content = await response.read()
                    kept = {"Content-Type": response.headers.get("Content-Type", JSON_TYPE)}
                    if "Retry-After" in response.headers:
                        kept["Retry-After"] = response.headers["Retry-After"]
                    return response.status, content, kept
            except aiohttp.ClientConnectorError:
                raise
            except aiohttp.ClientError:
                if is_last:
                    raise
                self.counters.reconnects += 1
        raise AssertionError("unreachable")

    async def _release(self, request: web.Request) -> web.Response:
        self._check_token(request)
        known = self.sessions.release(request.match_info["id"])
        return _json({"released": known})

    async def _ping(self, request: web.Request) -> web.Response:
        return _json({"ok": True, "pid": os.getpid()})

    async def _list_sessions(self, request: web.Request) -> web.Response:
        self._check_token(request)
        now_s = time.monotonic()
        sessions = [
            {
                "session_id": session.session_id,
                "replica": None if session.home is None else session.home.name,
                "pool": None if session.home is None else session.home.pool,
                "in_flight": session.in_flight,
                "turns": session.turns,
                "idle_s": round(now_s - session.seen_s, 3),
            }
            for session in self.sessions
        ]
        return _json({"num_sessions": len(sessions), "sessions": sessions})

    async def _list_pools(self, request: web.Request) -> web.Response:
        self._check_token(request)
        pools: dict[str, dict[str, Any]] = {}
        for upstream in self.registry.upstreams.values():
            pool = pools.setdefault(
                upstream.pool,
                {"replicas": 0, "ready": 0, "sessions": 0, "in_flight": 0, "speed": 0.0,
                 "max_running": 0, "turns": 0, "versions": []},
            )  # fmt: skip
            pool["replicas"] += 1
            pool["sessions"] += upstream.num_sessions
            pool["in_flight"] += upstream.in_flight
            pool["turns"] += upstream.turns
            if upstream.state.takes_new_sessions:
                pool["ready"] += 1
                pool["speed"] += upstream.speed
                pool["max_running"] += upstream.max_running
                pool["versions"] = sorted({*pool["versions"], upstream.version})
        return _json(
            {
                "pools": pools,
                "waiting": self.registry.num_waiting,
                "busy_frac": round(self.registry.busy_frac, 4),
            }
        )

    async def _list_replicas(self, request: web.Request) -> web.Response:
        self._check_token(request)
        return _json({"replicas": [_describe(u) for u in self.registry.upstreams.values()]})

    async def _put_replica(self, request: web.Request) -> web.Response:
        """Register or change a replica; of a known one, only what changes must be sent."""
        self._check_token(request)
        name = request.match_info["name"]
        known = self.registry.upstreams.get(name)
        try:
            record = parse_record(name, await request.read(), known=known)
        except ValueError as error:
            return self._refuse(400, f"replica {name}: {error}")
        return _json(_describe(self.registry.put(record)))

    async def _delete_replica(self, request: web.Request) -> web.Response:
        self._check_token(request)
        return _json({"removed": self.registry.remove(request.match_info["name"])})

    async def _metrics(self, request: web.Request) -> web.Response:
        self._check_token(request)
        text = metrics_text(
            self.registry, self.counters, len(self.sessions), self.sessions.num_expired
        )
        return web.Response(text=text, content_type="text/plain")

    def _check_token(self, request: web.Request) -> None:
        if self._token is None:
            return
        given = request.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            _unauthorized()

    def _too_old(self, min_version: int | None, upstream: Upstream | None) -> web.Response:
        who = "every ready replica" if upstream is None else f"replica {upstream.name}"
        has = "" if upstream is None else f" (it has {upstream.version})"
        return self._refuse(409, f"{who} is older than version {min_version}{has}; ask again")

    def _refuse(self, status: int, error: str) -> web.Response:
        headers = {"Retry-After": RETRY_AFTER_S} if status in (409, 503) else {}
        return _json({"error": f"router: {error}"}, status=status, headers=headers)


def parse_record(name: str, body: bytes, *, known: Upstream | None) -> ReplicaRecord:
    """The record that a `PUT /replicas/{name}` body means.

    Raises:
        ValueError: with the field, what it was and what is allowed.
    """
    fields = orjson.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("the body must be a JSON object")
    types: dict[str, type | tuple[type, ...]] = {
        "pool": str, "url": str, "numerics_key": str, "speed": (int, float),
        "max_running": int, "version": int, "state": str,
    }  # fmt: skip
    for key, value in fields.items():
        if key not in types:
            raise ValueError(f"unknown field {key!r}; known are {', '.join(types)}")
        if not isinstance(value, types[key]) or isinstance(value, bool):
            raise ValueError(f"field {key!r} has the wrong type: {value!r}")
    if known is not None:
        fields = {
            "pool": known.pool, "url": known.url, "numerics_key": known.numerics_key,
            "speed": known.prior, "max_running": known.max_running, "version": known.version,
            "state": known.state.value, **fields,
        }  # fmt: skip
    missing = [key for key in types if key not in fields]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    if not fields["speed"] > 0 or fields["max_running"] < 1:
        raise ValueError("speed must be above 0 and max_running at least 1")
    if fields["state"] not in list(ReplicaState):
        raise ValueError(f"state {fields['state']!r} is none of {', '.join(ReplicaState)}")
    return ReplicaRecord(
        name=name,
        pool=fields["pool"],
        url=fields["url"].rstrip("/"),
        numerics_key=fields["numerics_key"],
        speed=float(fields["speed"]),
        max_running=fields["max_running"],
        version=fields["version"],
        state=ReplicaState(fields["state"]),
    )


def _describe(upstream: Upstream) -> dict[str, Any]:
    return {
        "name": upstream.name,
        "pool": upstream.pool,
        "url": upstream.url,
        "numerics_key": upstream.numerics_key,
        "state": upstream.state.value,
        "version": upstream.version,
        "prior": upstream.prior,
        "speed": round(upstream.speed, 6),
        "max_running": upstream.max_running,
        "in_flight": upstream.in_flight,
        "sessions": upstream.num_sessions,
        "turns": upstream.turns,
        "faults": upstream.faults,
    }


def _json(
    document: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=orjson.dumps(document), status=status, headers=headers, content_type=JSON_TYPE
    )


def _unauthorized() -> NoReturn:
    raise web.HTTPUnauthorized(
        body=orjson.dumps({"error": "router: token missing or wrong (Authorization: Bearer ...)"}),
        content_type=JSON_TYPE,
    )
