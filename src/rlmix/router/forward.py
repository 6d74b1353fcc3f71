"""One exchange with one replica: whole, or passed on piece by piece.

Invariant: a whole answer is one replica's or an error; what was streamed is never followed by
another replica's tokens.
"""

import os
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from rlmix.router import headers as names
from rlmix.router.scan import RequestFacts, with_salt
from rlmix.router.upstream import Upstream

JSON_TYPE = "application/json"
EVENTS_TYPE = "text/event-stream"

CONNECT_TIMEOUT_S = 5.0
"""A replica that does not accept a connection in this time is as good as gone."""

KEPT_HEADERS = ("Content-Type", "Retry-After")
"""Of a replica's answer; all others are the hop's own."""


class Sink(Protocol):
    """Takes an answer that comes in pieces."""

    async def start(self, status: int, headers: dict[str, str]) -> None: ...
    async def write(self, piece: bytes) -> None: ...


@dataclass(kw_only=True, slots=True)
class Call:
    """One request of a client, on its way to a replica."""

    body: bytes
    facts: RequestFacts
    request_id: str
    started_s: float
    """When it came in, on the monotonic clock."""
    limit_s: float
    """Seconds from then on that it may take here and further on."""
    path: str = "/generate"
    accept: str = JSON_TYPE
    min_version: int | None = None
    group_id: str = ""
    deadline_s: float | None = None
    sink: Sink | None = None
    """Where a streamed answer goes; None reads it whole."""
    has_passed: bool = False
    """An answer has begun to pass through the sink: no other replica may answer any more."""

    @property
    def left_s(self) -> float:
        return self.started_s + self.limit_s - time.monotonic()


@dataclass(kw_only=True, slots=True)
class Reply:
    """What the client is answered; `content` is empty when it went through the sink."""

    status: int
    content: bytes
    headers: dict[str, str] = field(default_factory=dict)
    is_streamed: bool = False


class BrokenStream(Exception):
    """The replica was lost after pieces of its answer had been passed on."""


class ClientGone(Exception):
    """The client hung up while an answer was passed on to it; no fault of the replica."""


class Forwarder:
    """Keeps the connections to all replicas; inside one running event loop."""

    def __init__(self, *, token: str | None) -> None:
        self._token = token
        self._http: aiohttp.ClientSession | None = None
        self.reconnects = 0
        """Requests sent again to the same replica after a broken connection."""

    @property
    def http(self) -> aiohttp.ClientSession:
        assert self._http is not None, "not open"
        return self._http

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept", "Accept-Encoding", "User-Agent"),
            read_bufsize=1 << 20,
        )

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()

    async def post(
        self, upstream: Upstream, session_id: str, call: Call, extra: dict[str, str]
    ) -> Reply:
        """Send the call; a broken connection is tried once more on the same replica: one that is
        alive may close an idle connection just as it is used, one that is dead refuses the next.

        Args:
            extra: headers that a streamed answer begins with.
        Raises:
            aiohttp.ClientError: the replica is lost.
            TimeoutError: no whole answer within the call's limit.
            BrokenStream: it was lost in the middle of a streamed answer.
            ClientGone: nobody is there any more to pass a streamed answer on to.
        """
        body = with_salt(call.body, upstream.record.cache_salt)
        for is_last in (False, True):
            timeout = aiohttp.ClientTimeout(
                total=max(call.left_s, 0.001), sock_connect=CONNECT_TIMEOUT_S
            )
            try:
                async with self.http.post(
                    upstream.url + call.path,
                    data=body,
                    headers=self._headers(upstream, session_id, call),
                    timeout=timeout,
                ) as response:
                    kept = {n: response.headers[n] for n in KEPT_HEADERS if n in response.headers}
                    kept.setdefault("Content-Type", JSON_TYPE)
                    is_events = kept["Content-Type"].startswith(EVENTS_TYPE)
                    if call.sink is not None and is_events and response.status == 200:
                        return await _pass_on(response, call, call.sink, {**kept, **extra})
                    return Reply(
                        status=response.status, content=await response.read(), headers=kept
                    )
            except aiohttp.ClientConnectorError:
                raise
            except aiohttp.ClientError:
                if is_last:
                    raise
                self.reconnects += 1
        raise AssertionError("unreachable")

    def _headers(self, upstream: Upstream, session_id: str, call: Call) -> dict[str, str]:
        headers = {
            "Content-Type": JSON_TYPE,
            names.SESSION: session_id,
            names.REQUEST_ID: call.request_id,
            names.TIMEOUT: f"{max(call.left_s, 0.0):.3f}",
            "Accept": call.accept,
        }
        if call.min_version is not None:
            headers[names.MIN_VERSION] = str(call.min_version)
        return headers | upstream.record.authorization(self._token, os.environ)


async def _pass_on(
    response: aiohttp.ClientResponse, call: Call, sink: Sink, headers: dict[str, str]
) -> Reply:
    """The pieces of a streamed answer, as they come; its tail is kept for its facts."""
    call.has_passed = True
    await _to_client(sink.start(response.status, headers))
    tail = b""
    try:
        async for piece in response.content.iter_any():
            await _to_client(sink.write(piece))
            tail = (tail + piece)[-(1 << 16) :]
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BrokenStream(f"{type(error).__name__}: {error}") from None
    return Reply(status=response.status, content=tail, headers=headers, is_streamed=True)


async def _to_client(writing: Awaitable[None]) -> None:
    """Write to the client. aiohttp tells of its end in the same errors as of a replica's, which
    must not be mixed up: one that nobody listens to is not dead."""
    try:
        await writing
    except (aiohttp.ClientError, OSError) as error:
        raise ClientGone(f"{type(error).__name__}: {error}") from None
