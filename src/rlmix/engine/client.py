"""The client of one engine replica or of the router; both speak the same `/generate`.

Invariant: a request is sent again only when the server said that it did not start it (409, 503),
so no sampled token is ever lost or counted twice. Everything else is an error for the caller.
"""

import asyncio
import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from rlmix.core.errors import EngineError
from rlmix.engine.answers import parse_document, parse_frame
from rlmix.engine.protocol import (
    GENERATION_TYPE,
    GROUP_HEADER,
    MIN_VERSION_HEADER,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    TIMEOUT_HEADER,
    EngineRefused,
    GenerateRequest,
    Generation,
    request_body,
)

STALE_RETRY_S = 0.05
"""First wait after a 409; the replica is loading the wanted version. Doubles up to the next."""
RECONNECT_LIMIT_S = 15.0
"""How long a refused connection is tried again: a router that died is back within a few seconds."""

MAX_RETRY_S = 1.0
"""Longest wait between two tries, whatever Retry-After says: a run has many replicas and room
appears at any moment."""
BODY_EXCERPT_CHARS = 300


class EngineClient:
    """Asks one base URL for generations. Create and use it inside one running event loop."""

    def __init__(self, base_url: str, *, token: str | None = None, timeout_s: float) -> None:
        self._base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None

    @property
    def base_url(self) -> str:
        return self._base_url

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                # The only limit is the whole request's, kept by generate().
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn.

        Raises:
            EngineRefused: the request is wrong (400).
            GenerationAborted: the engine ended it early; nothing may be stored.
            EngineError: no answer within the limit, a lost connection, a server error, or an
                answer that contradicts itself.
        """
        body = orjson.dumps(request_body(request))
        headers = {
            **self._headers,
            "Accept": f"{GENERATION_TYPE}, application/json;q=0.5",
            SESSION_HEADER: request.session_id,
            REQUEST_ID_HEADER: request.request_id,
        }
        if request.group_id:
            headers[GROUP_HEADER] = request.group_id
        if request.min_version is not None:
            headers[MIN_VERSION_HEADER] = str(request.min_version)
        waiting_for = "an answer"
        started_s = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s):
                tries = 0
                while True:
                    left_s = self._timeout_s - (time.monotonic() - started_s)
                    headers[TIMEOUT_HEADER] = f"{max(left_s, 0.0):.3f}"
                    try:
                        status, raw, answer_headers = await self._send(
                            "POST", "/generate", body, headers
                        )
                    except _NotSent as error:
                        # Nothing reached it, so asking again is safe; it may be restarting.
                        if time.monotonic() - started_s > RECONNECT_LIMIT_S:
                            raise
                        waiting_for = f"a connection ({error})"
                        await asyncio.sleep(_retry_wait_s({}, tries))
                        tries += 1
                        continue
                    if status == 200:
                        return self._generation(raw, request, answer_headers)
                    if status == 409:
                        waiting_for = f"weight version {request.min_version} (409)"
                    elif status == 503:
                        waiting_for = "room (503)"
                    else:
                        _raise_for(status, raw, where=f"{self._base_url}/generate")
                    await asyncio.sleep(_retry_wait_s(answer_headers, tries))
                    tries += 1
        except TimeoutError as error:
            raise EngineError(
                f"engine: {self._base_url}: {request.request_id} got no result within "
                f"{self._timeout_s:g} s while waiting for {waiting_for}"
            ) from error

    def _generation(
        self, raw: bytes, request: GenerateRequest, headers: Mapping[str, str]
    ) -> Generation:
        if headers.get("Content-Type", "").startswith(GENERATION_TYPE):
            generation = parse_frame(raw, request, headers)
        else:
            document = _decode(raw, where=f"{self._base_url}/generate")
            generation = parse_document(document, request, headers)
        return replace(generation, wire_bytes=len(raw))

    async def release(self, session_id: str) -> None:
        """Tell the router that a session is over. Never fails: the router also forgets by age."""
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._http().delete(
                    URL(f"{self._base_url}/sessions/{quote(session_id, safe='')}", encoded=True),
                    headers=self._headers,
                ) as response,
            ):
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return

    async def get_json(self, path: str) -> dict[str, Any]:
        """A GET endpoint's document, e.g. `/v1/loads`.

        Raises:
            EngineError: no connection, not 200, not JSON, or no answer within the limit.
        """
        return await self._ask("GET", path, None)

    async def post_json(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A POST endpoint's document; an answer without one is `{}`. Not retried.

        Raises:
            EngineRefused: 400.
            EngineError: as for `get_json`.
        """
        return await self._ask("POST", path, orjson.dumps(body))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        where = f"{self._base_url}{path}"
        try:
            async with asyncio.timeout(self._timeout_s):
                status, raw, headers = await self._send(method, path, body, self._headers)
        except TimeoutError as error:
            raise EngineError(f"engine: {where}: no answer in {self._timeout_s:g} s") from error
        if status != 200:
            _raise_for(status, raw, where=where)
        is_json = headers.get("Content-Type", "").startswith("application/json")
        return _decode(raw, where=where) if is_json else {}

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes, Mapping[str, str]]:
        try:
            async with self._http().request(
                method, f"{self._base_url}{path}", data=body, headers=headers
            ) as response:
                return response.status, await response.read(), response.headers
        except (aiohttp.ClientError, OSError) as error:
            # TimeoutError is an OSError: let the one limit of the caller report itself.
            if isinstance(error, TimeoutError):
                raise
            kind = _NotSent if isinstance(error, aiohttp.ClientConnectorError) else EngineError
            raise kind(
                f"engine: {self._base_url}{path}: connection lost: {type(error).__name__}: {error}"
            ) from error


class _NotSent(EngineError):
    """No connection was made: the request reached nobody."""


def _retry_wait_s(headers: Mapping[str, str], tries: int) -> float:
    try:
        asked_s = float(headers["Retry-After"])
    except (KeyError, ValueError):
        asked_s = STALE_RETRY_S * 2 ** min(tries, 10)
    # Spread out, so that a crowd that was turned away together does not come back together.
    return min(asked_s, MAX_RETRY_S) * (0.5 + random.random())


def _decode(raw: bytes, *, where: str) -> dict[str, Any]:
    try:
        document = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise EngineError(f"engine: {where} answered 200 with broken JSON: {error}") from error
    if not isinstance(document, dict):
        raise EngineError(f"engine: {where} answered a {type(document).__name__}, not an object")
    return document


def _raise_for(status: int, raw: bytes, *, where: str) -> None:
    try:
        document = orjson.loads(raw)
        error = document.get("error", document)
        message = error.get("message", error) if isinstance(error, dict) else error
    except (orjson.JSONDecodeError, AttributeError):
        message = raw.decode("utf-8", errors="replace")
    text = f"engine: {where} answered {status}: {str(message)[:BODY_EXCERPT_CHARS]}"
    if status == 400:
        raise EngineRefused(text)
    raise EngineError(text)
