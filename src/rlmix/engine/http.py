"""The HTTP side that every engine server of ours shares: JSON in, JSON out, one dispatch table.

Built on aiohttp's low-level server: a replica answers a few endpoints thousands of times, and
routing and middlewares would cost more than decoding a token. Invariant: a handler whose client
went away is cancelled, so a request that nobody waits for is aborted.
"""

import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from rlmix.engine.keys import is_let_in

MAX_BODY_BYTES = 256 * 2**20
"""A context of 256k tokens is 2 MB of JSON; the rest is head room."""

IDLE_CONNECTION_S = 600.0
"""Longer than clients keep an idle connection, so that the client closes it, not the server: a
server that closes first can lose a request that is already on its way."""


class RequestError(Exception):
    """Ends a request with an HTTP status and a message in SGLang's error shape."""

    def __init__(self, status: int, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


Handler = Callable[["Call"], Awaitable[web.StreamResponse]]


class Call:
    """One HTTP request."""

    def __init__(self, request: web.BaseRequest) -> None:
        self.request = request
        self.headers: Mapping[str, str] = request.headers
        self.query: Mapping[str, str] = request.query

    async def json(self) -> dict[str, Any]:
        """The body as an object; `{}` when there is none."""
        raw = await self.request.read()
        if not raw.strip():
            return {}
        try:
            document = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise RequestError(400, f"the body is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise RequestError(400, f"the body is a {type(document).__name__}; give an object")
        return document


def reply_json(
    document: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    """A JSON answer. numpy arrays are written as they are, float32 in its shortest exact form."""
    return web.Response(
        body=orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def reply_bytes(
    body: bytes, *, content_type: str, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(body=body, content_type=content_type, headers=headers)


def reply_text(text: str = "", *, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status)


class JsonServer:
    """Serves a table of handlers on one address."""

    def __init__(
        self, routes: Mapping[tuple[str, str], Handler], *, key: str | None = None
    ) -> None:
        """
        Args:
            routes: (method, path) -> handler; paths are compared literally.
            key: what every request must carry (`engine.keys`); None: nothing.
        """
        self._routes = dict(routes)
        self._key = key
        self._runner: web.ServerRunner | None = None
        self.port = 0
        self.host = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self, *, host: str, port: int = 0) -> None:
        """Listen; port 0 lets the system choose. Sets `port`."""
        server = web.Server(
            self._handle,
            request_factory=_large_request,
            handler_cancellation=True,
            keepalive_timeout=IDLE_CONNECTION_S,
            access_log=None,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        await site.start()
        self.host = host
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if not is_let_in(request.path, request.headers, self._key):
            message = "the key is wrong or missing (Authorization: Bearer ...)"
            return reply_json({"error": {"message": message, "code": 401}}, status=401)
        handler = self._routes.get((request.method, request.path))
        if handler is None:
            known = sorted({path for _, path in self._routes})
            status = 405 if request.path in known else 404
            message = f"{request.method} {request.path} is not served; paths: {', '.join(known)}"
            return reply_json({"error": {"message": message}}, status=status)
        try:
            return await handler(Call(request))
        except RequestError as error:
            headers = {}
            if error.retry_after_s is not None:
                headers["Retry-After"] = f"{error.retry_after_s:g}"
            return reply_json(
                {"error": {"message": str(error), "code": error.status}},
                status=error.status,
                headers=headers,
            )


def _large_request(message, payload, protocol, writer, task) -> web.BaseRequest:  # type: ignore[no-untyped-def]
    return web.BaseRequest(
        message, payload, protocol, writer, task, protocol._loop, client_max_size=MAX_BODY_BYTES
    )


def write_ready_file(path: Path, document: Mapping[str, Any]) -> None:
    """Say that the server can serve: `document` as JSON, complete from the first moment on."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(document))
    unfinished.replace(path)
