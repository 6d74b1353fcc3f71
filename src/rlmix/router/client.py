"""Talks to a router as its operator: registers replicas and reads what it knows."""

import asyncio
from typing import Any

import aiohttp
import orjson

from rlmix.core.errors import EngineError

ATTEMPTS = 3
"""A router that is being replaced is back in a moment; registration is idempotent."""


class RouterAdmin:
    """The operator's client. One per event loop; close it."""

    def __init__(self, url: str, *, token: str | None = None, timeout_s: float = 5.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout_s = timeout_s
        self._http: aiohttp.ClientSession | None = None

    async def put_replica(self, name: str, **fields: Any) -> dict[str, Any]:
        """Register a replica, or change fields of a known one.

        Args:
            fields: pool, url, numerics_key, speed, max_running, version, state; all of them the
                first time, later only what changed.
        Raises:
            EngineError: the router refused, or could not be reached within the limit.
        """
        return await self._ask("PUT", f"/replicas/{name}", fields)

    async def delete_replica(self, name: str) -> bool:
        """Forget a replica; its sessions move on. False when it was not known."""
        return bool((await self._ask("DELETE", f"/replicas/{name}"))["removed"])

    async def replicas(self) -> list[dict[str, Any]]:
        return list((await self._ask("GET", "/replicas"))["replicas"])

    async def pools(self) -> dict[str, Any]:
        return await self._ask("GET", "/pools")

    async def sessions(self) -> dict[str, Any]:
        return await self._ask("GET", "/sessions")

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._timeout_s)
            )
        data = None if body is None else orjson.dumps(body)
        for attempt in range(ATTEMPTS):
            try:
                async with self._http.request(method, self.url + path, data=data) as response:
                    content = await response.read()
                    if response.status == 200:
                        return dict(orjson.loads(content))
                    raise EngineError(
                        f"router: {method} {path} was answered {response.status}: "
                        f"{content[:300].decode(errors='replace')}"
                    )
            except (aiohttp.ClientError, TimeoutError) as error:
                if attempt == ATTEMPTS - 1:
                    raise EngineError(
                        f"router: {method} {self.url}{path} failed {ATTEMPTS} times: "
                        f"{type(error).__name__}: {error}"
                    ) from None
                await asyncio.sleep(0.1 * (attempt + 1))
        raise AssertionError("unreachable")
