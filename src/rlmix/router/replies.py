"""Turns replies into HTTP: whole, kept alive with blanks, or as server-sent events."""

import asyncio
import contextlib
from collections.abc import Awaitable

import orjson
from aiohttp import web

from rlmix.router.forward import EVENTS_TYPE, JSON_TYPE, Reply

EVENTS_KEEP_ALIVE_S = 10.0
"""A comment at least this often in a stream of events, unless the client asks for another pace."""


def to_response(reply: Reply) -> web.Response:
    return web.Response(body=reply.content, status=reply.status, headers=reply.headers)


async def keep_alive_reply(
    request: web.Request, answer: Awaitable[Reply], *, every_s: float
) -> web.StreamResponse:
    """A JSON answer with blanks in front while it is being made; JSON allows them. The first blank
    commits the status to 200, so an error after it carries its status in the body."""
    task = asyncio.ensure_future(answer)
    every_s = max(every_s, 0.01)
    try:
        done, _ = await asyncio.wait((task,), timeout=every_s)
        if done:
            return to_response(task.result())
        response = web.StreamResponse(headers={"Content-Type": JSON_TYPE})
        await response.prepare(request)
        while not done:
            await response.write(b" ")
            done, _ = await asyncio.wait((task,), timeout=every_s)
        reply = task.result()
        content = reply.content
        if reply.status != 200:
            content = orjson.dumps({"status": reply.status, **_document(content)})
        await response.write(content)
        await response.write_eof()
        return response
    finally:
        task.cancel()


def _document(content: bytes) -> dict[str, object]:
    try:
        document = orjson.loads(content)
    except orjson.JSONDecodeError:
        return {"error": content[:300].decode(errors="replace")}
    return document if isinstance(document, dict) else {"error": document}


class EventSink:
    """Takes a streamed answer for one client, and keeps its connection alive meanwhile."""

    def __init__(self, request: web.Request, *, every_s: float | None = None) -> None:
        self._request = request
        self._every_s = max(EVENTS_KEEP_ALIVE_S if every_s is None else every_s, 0.01)
        self._response: web.StreamResponse | None = None
        self._wrote_at_s = 0.0
        self._is_between = True
        """Not amid an event, so that a comment may be put here."""

    @property
    def is_started(self) -> bool:
        return self._response is not None

    async def start(self, status: int, headers: dict[str, str]) -> None:
        if self._response is None:
            self._response = web.StreamResponse(
                status=status,
                headers={**headers, "Content-Type": EVENTS_TYPE, "Cache-Control": "no-cache"},
            )
            await self._response.prepare(self._request)

    async def write(self, piece: bytes) -> None:
        assert self._response is not None
        self._wrote_at_s = asyncio.get_running_loop().time()
        self._is_between = piece.endswith(b"\n\n")
        await self._response.write(piece)

    async def event(self, document: object) -> None:
        await self.write(b"data: " + orjson.dumps(document) + b"\n\n")

    async def close(self) -> web.StreamResponse:
        assert self._response is not None
        with contextlib.suppress(ConnectionError):  # The client may have left.
            await self._response.write_eof()
        return self._response

    async def keep_alive(self, answer: Awaitable[Reply]) -> Reply:
        """The answer, with comments in the stream while it is being made. A client that asked for
        a stream has one from the first comment on, with status 200."""
        task = asyncio.ensure_future(answer)
        loop = asyncio.get_running_loop()
        try:
            while True:
                done, _ = await asyncio.wait((task,), timeout=self._every_s)
                if done:
                    return task.result()
                await self.start(200, {})
                if self._is_between and loop.time() - self._wrote_at_s >= self._every_s:
                    await self.write(b": keep-alive\n\n")
        finally:
            task.cancel()

    async def finish(self, answer: Awaitable[Reply]) -> web.StreamResponse:
        """Serve a `/generate` with `stream`: events pass as they come; an engine that answers
        whole turns only becomes one event; an error after the start is an event, too."""
        reply = await self.keep_alive(answer)
        if not self.is_started:
            if reply.status != 200:
                return to_response(reply)
            await self.start(200, reply.headers)
        if not reply.is_streamed:
            document = _document(reply.content)
            if reply.status != 200:
                document = {"status": reply.status, **document}
            if not self._is_between:
                await self.write(b"\n\n")  # Ends what was broken off amid an event.
            await self.event(document)
            await self.write(b"data: [DONE]\n\n")
        return await self.close()
