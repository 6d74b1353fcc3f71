"""A session's request from its arrival to its answer: find the home, send, start over elsewhere.

Invariant: a request whose replica died is sent again only while nothing of its answer has reached
anybody. A session's weight view is that of its first answer, and under `view=strict` never another.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

import aiohttp
import orjson

from rlmix.router import headers as names
from rlmix.router.forward import JSON_TYPE, BrokenStream, Call, ClientGone, Forwarder, Reply
from rlmix.router.metrics import Counters
from rlmix.router.registry import Registry
from rlmix.router.scan import scan_answer
from rlmix.router.sessions import Session, SessionTable
from rlmix.router.strategies import Ask, Refusal
from rlmix.router.upstream import Upstream

log = logging.getLogger(__name__)

MAX_MOVES_PER_REQUEST = 4
"""A request that saw this many replicas die is given back as 503: it may be what kills them."""

RETRY_AFTER_S = "1"

RETURN_LIMIT_S = 5.0
"""After a restart of the router: how long a session waits for its own replica to be registered."""

CLIENT_GONE = 499
"""Counted, and seen by nobody."""

VIEWS = ("strict", "prefer")


@dataclass(frozen=True, kw_only=True, slots=True)
class DispatchSpec:
    queue_timeout_s: float
    """How long a request without a home may wait for a place before it is answered 503."""
    view: str
    """`strict`: a session never changes its weight view; `prefer`: only when it must."""
    request_timeout_s: float
    """A replica that kept a request for half of this without an answer has a fault."""
    started_s: float
    """When this router started; sessions from before may come back for `RETURN_LIMIT_S`."""


class _ReplicaLost(Exception):
    """The replica died under the request."""


class Dispatcher:
    """Serves calls; one per router."""

    def __init__(
        self,
        spec: DispatchSpec,
        registry: Registry,
        sessions: SessionTable[Upstream],
        forwarder: Forwarder,
        counters: Counters,
    ) -> None:
        self._spec = spec
        self._registry = registry
        self._sessions = sessions
        self._forwarder = forwarder
        self._counters = counters

    async def serve(self, session_id: str, call: Call) -> Reply:
        """The answer to one call of a session, refusals and errors included."""
        session = self._sessions.open(session_id, now_s=call.started_s)
        tool_s = None if session.answered_s is None else call.started_s - session.answered_s
        session.in_flight += 1
        try:
            reply = await self._serve(session, call)
        finally:
            session.in_flight -= 1
            now_s = time.monotonic()
            self._sessions.touch(session, now_s=now_s)
        self._counters.count_response(reply.status)
        if reply.status == 200:
            session.turns += 1
            session.answered_s = now_s
            self._registry.observe_session(model_s=now_s - call.started_s, tool_s=tool_s)
        reply.headers[names.REQUEST_ID] = call.request_id
        return reply

    async def _serve(self, session: Session[Upstream], call: Call) -> Reply:
        for _ in range(MAX_MOVES_PER_REQUEST + 1):
            ask = self._ask(session, call)
            upstream = await self._home(session, ask)
            if upstream is not None:
                if call.min_version is not None and upstream.version < call.min_version:
                    return too_old(call.min_version, upstream)
                upstream.take(ask.total_tokens)
            else:
                placed = await self._place(session, call, ask)
                if isinstance(placed, Reply):
                    return placed
                upstream = placed
            sent_s = time.monotonic()
            try:
                return await self._forward(session, upstream, call)
            except _ReplicaLost as error:
                upstream.faults += 1
                self._counters.lost_requests += 1
                log.warning(
                    "request %s of session %s lost on %s: %s",
                    call.request_id,
                    session.session_id,
                    upstream.name,
                    error,
                )
                if call.has_passed:
                    return _broken(upstream, error)
            except BrokenStream as error:
                upstream.faults += 1
                self._note_fault(upstream, str(error))
                return _broken(upstream, error)
            except ClientGone:
                return Reply(status=CLIENT_GONE, content=b"", is_streamed=True)
            except TimeoutError:
                # How little time a client has left is not the replica's fault.
                if time.monotonic() - sent_s >= self._spec.request_timeout_s / 2:
                    self._note_fault(upstream, "timeout")
                return refuse(504, f"replica {upstream.name} did not answer in {call.limit_s:g} s")
            finally:
                self._registry.give_place(upstream, ask.total_tokens)
        return refuse(
            503, f"{MAX_MOVES_PER_REQUEST + 1} replicas died under this request; giving it back"
        )

    def _ask(self, session: Session[Upstream], call: Call) -> Ask:
        expected = self._registry.mean_output_tokens
        limit = call.facts.max_new_tokens
        return Ask(
            context_tokens=call.facts.context_tokens,
            output_tokens=expected if limit is None else min(expected, float(limit)),
            min_version=call.min_version,
            view=session.view or None,
            is_view_strict=self._spec.view == "strict",
            deadline_s=call.deadline_s,
            cached_on=None if session.home is None else session.home.name,
            cached_tokens=session.context_tokens,
        )

    async def _home(self, session: Session[Upstream], ask: Ask) -> Upstream | None:
        """The session's replica, while it is there and no other is so much better."""
        home = session.home
        if home is None and session.home_name:
            left_s = self._spec.started_s + RETURN_LIMIT_S - time.monotonic()
            known = self._registry.upstreams.get(session.home_name)
            if known is None and left_s > 0:
                known = await self._registry.wait_for(session.home_name, timeout_s=left_s)
            if known is not None and known.keeps_sessions and session.home is None:
                self._sessions.settle(session, known)
            home = session.home
        if home is None or not home.keeps_sessions:
            return None
        better = self._registry.better_home(home, ask) if session.in_flight == 1 else None
        if better is not None:
            self._move(session, better)
            self._counters.affinity_breaks += 1
            return better
        return home

    async def _place(self, session: Session[Upstream], call: Call, ask: Ask) -> Upstream | Reply:
        """Give the session a home, with this request's place taken there."""
        patience_s = min(self._spec.queue_timeout_s, max(call.left_s, 0.0))
        chosen = await self._registry.take_place(ask, timeout_s=patience_s, group_id=call.group_id)
        if isinstance(chosen, Refusal):
            return self._refused(chosen, ask, patience_s)
        current = session.home
        if current is not None and current.keeps_sessions:
            # Another request of the same session found a home while this one waited.
            self._registry.give_place(chosen, ask.total_tokens)
            current.take(ask.total_tokens)
            return current
        if current is not None or session.home_name:
            self._move(session, chosen)
        else:
            self._registry.groups.placed(call.group_id, chosen.pool)
            self._sessions.settle(session, chosen)
        chosen.placed()
        return chosen

    def _move(self, session: Session[Upstream], target: Upstream) -> None:
        session.moves += 1
        session.context_tokens = 0
        self._counters.rehomed += 1
        if session.view and target.view != session.view:
            self._counters.view_changes += 1
        self._sessions.settle(session, target)

    def _refused(self, why: Refusal, ask: Ask, waited_s: float) -> Reply:
        if why is Refusal.TOO_OLD:
            return too_old(ask.min_version, None)
        if why is Refusal.TOO_LONG:
            return refuse(400, f"a context of {ask.context_tokens} tokens fits into no replica")
        if why is Refusal.NO_VIEW:
            return refuse(
                410,
                f"no replica of the session's weight view {ask.view!r} is left, and a session "
                "keeps its view (router.view=strict); start the session anew",
            )
        texts = {
            Refusal.NONE_READY: "no replica is ready",
            Refusal.ALL_FULL: "all ready replicas are full",
        }
        of_view = f" with the session's weight view {ask.view!r}" if ask.view else ""
        return refuse(503, f"{texts[why]}{of_view} (waited {waited_s:g} s)")

    async def _forward(self, session: Session[Upstream], upstream: Upstream, call: Call) -> Reply:
        """Send the request and wait for the answer.

        Raises:
            _ReplicaLost: the connection broke twice, or the replica was given up.
            TimeoutError: no answer within the request's limit.
            BrokenStream: lost in the middle of a streamed answer.
        """
        started_s = time.monotonic()
        in_flight_before = upstream.in_flight
        identity = {
            names.POOL: upstream.pool,
            names.REPLICA: upstream.name,
            names.NUMERICS: upstream.numerics_key,
            names.REHOMED: str(session.moves),
        }
        task = asyncio.ensure_future(
            self._forwarder.post(upstream, session.session_id, call, identity)
        )
        upstream.requests.add(task)
        try:
            reply = await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if upstream.is_lost and me is not None and not me.cancelling():
                raise _ReplicaLost(f"given up: {upstream.health_record.reason}") from None
            raise
        except aiohttp.ClientError as error:
            if not upstream.is_lost:
                upstream.lose(f"{type(error).__name__}: {error}")
            raise _ReplicaLost(f"{type(error).__name__}: {error}") from None
        finally:
            task.cancel()
            upstream.requests.discard(task)
        self._learn(session, upstream, call, reply, started_s, in_flight_before)
        reply.headers.update(identity)
        return reply

    def _learn(
        self,
        session: Session[Upstream],
        upstream: Upstream,
        call: Call,
        reply: Reply,
        started_s: float,
        in_flight_before: int,
    ) -> None:
        now_s = time.monotonic()
        if reply.status == 200:
            facts = scan_answer(reply.content, most_output_tokens=call.facts.max_new_tokens)
            upstream.observe_turn(
                now_s - started_s,
                (in_flight_before + upstream.in_flight) / 2,
                context_tokens=call.facts.context_tokens,
                output_tokens=facts.output_tokens,
                cached_tokens=facts.cached_tokens,
            )
            upstream.health_record.success(now_s=now_s)
            uncached = None
            if facts.cached_tokens is not None and call.facts.context_tokens:
                uncached = max(0, call.facts.context_tokens - facts.cached_tokens)
            self._registry.observe_turn(output_tokens=facts.output_tokens, uncached_tokens=uncached)
            session.context_tokens = call.facts.context_tokens + (facts.output_tokens or 0)
            if not session.view and upstream.view:
                session.view = upstream.view
                self._sessions.record(session)
        elif reply.status == 503:
            if session.turns == 0 and session.in_flight == 1:
                # Full, and nothing of the session is cached there: the next try may go elsewhere.
                self._sessions.settle(session, None)
        elif reply.status >= 500:
            self._note_fault(upstream, f"status {reply.status}")

    def _note_fault(self, upstream: Upstream, reason: str) -> None:
        upstream.errors += 1
        upstream.health_record.fault(now_s=time.monotonic(), reason=reason)
        if upstream.is_lost:
            upstream.lose(reason)


def too_old(min_version: int | None, upstream: Upstream | None) -> Reply:
    who = "every ready replica" if upstream is None else f"replica {upstream.name}"
    has = "" if upstream is None else f" (it has {upstream.version})"
    return refuse(409, f"{who} is older than version {min_version}{has}; ask again")


def _broken(upstream: Upstream, error: Exception) -> Reply:
    return refuse(502, f"replica {upstream.name} was lost amid its answer: {error}; ask again")


def refuse(status: int, error: str) -> Reply:
    headers = {"Content-Type": JSON_TYPE}
    if status in (409, 503):
        headers["Retry-After"] = RETRY_AFTER_S
    return Reply(
        status=status, content=orjson.dumps({"error": f"router: {error}"}), headers=headers
    )
