"""What the operator asks and says: replicas, pools, sessions, metrics."""

import time
from typing import Any

import orjson
from aiohttp import web

from rlmix.router.forward import JSON_TYPE, Forwarder
from rlmix.router.metrics import Counters, TableCounts, metrics_text
from rlmix.router.registry import Registry
from rlmix.router.sessions import SessionTable
from rlmix.router.states import Health, ReplicaState
from rlmix.router.upstream import RECORD_FIELDS, ReplicaRecord, Upstream

MAX_LISTED_SESSIONS = 10_000


class Admin:
    """Handlers of the operator's endpoints; the server checks tokens before them."""

    def __init__(
        self,
        registry: Registry,
        sessions: SessionTable[Upstream],
        counters: Counters,
        forwarder: Forwarder,
    ) -> None:
        self._registry = registry
        self._sessions = sessions
        self._counters = counters
        self._forwarder = forwarder

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/sessions", self._list_sessions),
            web.get("/pools", self._list_pools),
            web.get("/replicas", self._list_replicas),
            web.put("/replicas/{name}", self._put_replica),
            web.delete("/replicas/{name}", self._delete_replica),
            web.get("/metrics", self._metrics),
        ]

    async def _list_sessions(self, request: web.Request) -> web.Response:
        now_s = time.monotonic()
        sessions = [
            {
                "session_id": session.session_id,
                "replica": None if session.home is None else session.home.name,
                "pool": None if session.home is None else session.home.pool,
                "view": session.view,
                "in_flight": session.in_flight,
                "turns": session.turns,
                "moves": session.moves,
                "idle_s": round(now_s - session.seen_s, 3),
            }
            for session, _ in zip(self._sessions, range(MAX_LISTED_SESSIONS), strict=False)
        ]
        return reply_json({"num_sessions": len(self._sessions), "sessions": sessions})

    async def _list_pools(self, request: web.Request) -> web.Response:
        pools: dict[str, dict[str, Any]] = {}
        for upstream in self._registry.upstreams.values():
            pool = pools.setdefault(
                upstream.pool,
                {"replicas": 0, "ready": 0, "sessions": 0, "in_flight": 0, "speed": 0.0,
                 "max_running": 0, "turns": 0, "versions": []},
            )  # fmt: skip
            pool["replicas"] += 1
            pool["sessions"] += upstream.num_sessions
            pool["in_flight"] += upstream.in_flight
            pool["turns"] += upstream.turns
            if upstream.state.takes_new_sessions and upstream.health is Health.HEALTHY:
                pool["ready"] += 1
                pool["speed"] += upstream.speed
                pool["max_running"] += upstream.max_running
                pool["versions"] = sorted({*pool["versions"], upstream.version})
        return reply_json(
            {
                "pools": pools,
                "waiting": self._registry.num_waiting,
                "busy_frac": round(self._registry.busy_frac, 4),
            }
        )

    async def _list_replicas(self, request: web.Request) -> web.Response:
        return reply_json({"replicas": [describe(u) for u in self._registry.upstreams.values()]})

    async def _put_replica(self, request: web.Request) -> web.Response:
        """Register or change a replica; of a known one, only what changes must be sent."""
        name = request.match_info["name"]
        known = self._registry.upstreams.get(name)
        try:
            record = parse_record(name, await request.read(), known=known)
        except ValueError as error:
            return reply_json({"error": f"router: replica {name}: {error}"}, status=400)
        return reply_json(describe(self._registry.put(record)))

    async def _delete_replica(self, request: web.Request) -> web.Response:
        return reply_json({"removed": self._registry.remove(request.match_info["name"])})

    async def _metrics(self, request: web.Request) -> web.Response:
        table = TableCounts(
            sessions=len(self._sessions),
            expired=self._sessions.num_expired,
            spilled=self._sessions.num_spilled,
            reconnects=self._forwarder.reconnects,
        )
        text = metrics_text(self._registry, self._counters, table)
        return web.Response(text=text, content_type="text/plain")


NEEDED = ("pool", "url", "numerics_key", "speed", "max_running", "version", "state")
TYPES: dict[str, tuple[type, ...]] = {
    "pool": (str,), "url": (str,), "numerics_key": (str,), "speed": (int, float),
    "max_running": (int,), "version": (int,), "state": (str,), "view": (str,),
    "max_total_tokens": (int,), "max_context_tokens": (int,), "state_slots": (int,),
    "token_env": (str,), "cache_salt": (str,),
}  # fmt: skip
AT_LEAST_ONE = ("max_running", "max_total_tokens", "max_context_tokens", "state_slots")


def parse_record(name: str, body: bytes, *, known: Upstream | None) -> ReplicaRecord:
    """The record that a `PUT /replicas/{name}` body means.

    Raises:
        ValueError: with the field, what it was and what is allowed.
    """
    if not name.isprintable():
        raise ValueError("the name must be of printable characters")
    fields = orjson.loads(body)
    if not isinstance(fields, dict):
        raise ValueError("the body must be a JSON object")
    for key, value in fields.items():
        if key not in TYPES:
            raise ValueError(f"unknown field {key!r}; known are {', '.join(TYPES)}")
        if not isinstance(value, TYPES[key]) or isinstance(value, bool):
            raise ValueError(f"field {key!r} has the wrong type: {value!r}")
        if isinstance(value, str) and not value.isprintable():
            raise ValueError(f"field {key!r}: {value!r}; give printable characters")
    if known is not None:
        held = {key: getattr(known.record, key) for key in RECORD_FIELDS if key != "name"}
        fields = {**held, "state": known.state.value, **fields}
    missing = [key for key in NEEDED if key not in fields]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    if not fields["speed"] > 0 or fields["max_running"] < 1:
        raise ValueError("speed must be above 0 and max_running at least 1")
    for key in AT_LEAST_ONE:
        if fields.get(key) is not None and fields[key] < 1:
            raise ValueError(f"{key} must be at least 1, not {fields[key]}")
    if fields["state"] not in list(ReplicaState):
        raise ValueError(f"state {fields['state']!r} is none of {', '.join(ReplicaState)}")
    fields["url"] = fields["url"].rstrip("/")
    fields["speed"] = float(fields["speed"])
    fields["state"] = ReplicaState(fields["state"])
    return ReplicaRecord(name=name, **fields)


def describe(upstream: Upstream) -> dict[str, Any]:
    """One replica, for its operator."""
    return {
        "name": upstream.name,
        "pool": upstream.pool,
        "url": upstream.url,
        "numerics_key": upstream.numerics_key,
        "view": upstream.view,
        "state": upstream.state.value,
        "health": upstream.health.value,
        "reason": upstream.health_record.reason,
        "version": upstream.version,
        "cache_salt": upstream.record.cache_salt,
        "prior": upstream.record.speed,
        "speed": round(upstream.speed, 6),
        "step": {
            "base_s": upstream.model.base_s,
            "request_s": upstream.model.request_s,
            "token_s": upstream.model.token_s,
            "prefill_token_s": upstream.model.prefill_token_s,
            "observed_steps": upstream.fit.steps,
        },
        "max_running": upstream.max_running,
        "max_total_tokens": upstream.max_total_tokens,
        "max_context_tokens": upstream.max_context_tokens,
        "in_flight": upstream.in_flight,
        "others": round(upstream.others, 2),
        "reserved_tokens": upstream.reserved_tokens,
        "sessions": upstream.num_sessions,
        "turns": upstream.turns,
        "faults": upstream.faults,
        "errors": upstream.errors,
    }


def reply_json(document: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(document), status=status, content_type=JSON_TYPE)
