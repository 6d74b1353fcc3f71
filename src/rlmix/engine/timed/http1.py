"""HTTP/1.1 for a server that must cost almost nothing: one protocol object per connection.

Reads requests with a length or in chunks, answers in order, keeps connections. Nothing else: no
upgrade, no pipelining beyond reading ahead, no compression. Invariant: a handler is told when its
client goes away before it was answered.
"""

import asyncio
from collections.abc import Callable

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 409: "Conflict",
           500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


class Message:
    """One request. `head` is the head as sent; names are compared in lower case."""

    __slots__ = ("body", "head", "method", "path")

    def __init__(self, method: str, path: str, head: bytes, body: bytes) -> None:
        self.method = method
        self.path = path
        self.head = head
        self.body = body

    def header(self, name: str) -> str | None:
        """Value of a header by its name in lower case; None when it was not sent."""
        return _header(self.head, name.encode())


def _header(head: bytes, name: bytes) -> str | None:
    at = head.lower().find(b"\r\n" + name + b":")
    if at < 0:
        return None
    start = at + len(name) + 3
    end = head.find(b"\r\n", start)
    return head[start : end if end >= 0 else len(head)].strip().decode("latin-1")


class Connection(asyncio.Protocol):
    """One client's connection."""

    def __init__(
        self,
        handle: "Callable[[Connection, Message], None]",
        opened: "Callable[[Connection], None]",
        closed: "Callable[[Connection], None]",
    ) -> None:
        self._handle, self._opened, self._closed = handle, opened, closed
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._need = 0
        self._is_busy = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._opened(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._is_busy and len(self._buffer) >= self._need:
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._closed(self)

    def reply(
        self,
        status: int,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: str = "",
    ) -> None:
        """Answer the request under way. Further header lines end with CRLF each."""
        self._is_busy = False
        if self.transport is None:
            return
        head = (
            f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\n{headers}\r\n"
        )
        self.transport.write(head.encode("latin-1") + body)
        if self._buffer:
            self._next()

    def start_events(self, headers: str = "") -> None:
        """Begin an answer of server-sent events; `send_event` and `end_events` follow."""
        if self.transport is not None:
            head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            head += f"Transfer-Encoding: chunked\r\n{headers}\r\n"
            self.transport.write(head.encode("latin-1"))

    def send_event(self, data: bytes) -> None:
        if self.transport is not None:
            text = b"data: " + data + b"\n\n"
            self.transport.write(f"{len(text):x}\r\n".encode() + text + b"\r\n")

    def end_events(self) -> None:
        self._is_busy = False
        if self.transport is not None:
            self.transport.write(b"0\r\n\r\n")
            if self._buffer:
                self._next()

    def abort(self) -> None:
        """Cut the connection: what a killed process leaves behind."""
        if self.transport is not None:
            self.transport.abort()

    def _next(self) -> None:
        buffer = self._buffer
        end = buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(buffer[:end])
        start = end + 4
        length = _header(head, b"content-length")
        if length is not None:
            self._need = start + int(length)
            if len(buffer) < self._need:
                return
            body = bytes(memoryview(buffer)[start : self._need])
            consumed = self._need
        elif "chunked" in (_header(head, b"transfer-encoding") or "").lower():
            found = _unchunk(buffer, start)
            if found is None:
                return
            body, consumed = found
        else:
            body, consumed = b"", start
        self._need = 0
        del buffer[:consumed]
        method, path, _ = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ", 2)
        self._is_busy = True
        self._handle(self, Message(method, path.split("?", 1)[0], head, body))


def _unchunk(buffer: bytearray, start: int) -> tuple[bytes, int] | None:
    """(body, where it ends), or None while it is not complete."""
    parts: list[bytes] = []
    while True:
        line_end = buffer.find(b"\r\n", start)
        if line_end < 0:
            return None
        size = int(bytes(buffer[start:line_end]).split(b";")[0], 16)
        start = line_end + 2
        if len(buffer) < start + size + 2:
            return None
        if size == 0:
            return b"".join(parts), start + 2
        parts.append(bytes(buffer[start : start + size]))
        start += size + 2
