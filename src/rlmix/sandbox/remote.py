"""The `remote` backend: sandboxes of other machines, through their `server`.

Invariant: a command is sent once and never again, since nobody knows what a lost answer had done;
making and destroying a sandbox can be repeated without harm and are.
"""

import asyncio
import contextlib
import marshal
import os
import secrets
import time
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import aiohttp

from rlmix.core.errors import ConfigError, SandboxError
from rlmix.core.task import Repository
from rlmix.sandbox import wire
from rlmix.sandbox.protocol import (
    CommandResult,
    PythonResult,
    SandboxLimits,
    Template,
    WorkTreeError,
)
from rlmix.sandbox.session import CAPTURE_TIMEOUT_S, CREATE_TIMEOUT_S, MAX_DIFF_BYTES

NETWORK_S = 30.0
"""Beyond a call's own limit: the way there and back, and a server under load."""
OPEN_TIMEOUT_S = 60.0
DESTROY_ATTEMPTS = 3
REST_S = 20.0
"""For a server that did not answer, before it is asked for new sandboxes again."""
_FULL = 429
_NO_TEMPLATE = 404


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteTemplate:
    """A repository; each server builds it when it is first asked for it."""

    repository: Repository
    base_commit: str


@dataclass(kw_only=True, slots=True)
class _Server:
    """One server, as this worker knows it."""

    url: str
    client: str = ""
    lease_s: float = 0.0
    answer: dict[str, Any] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    """Base commit -> the server's name for the template."""
    num_live: int = 0
    rests_until_s: float = 0.0


class RemoteBackend:
    """Satisfies `protocol.SandboxBackend` over one or several servers."""

    name = "remote"

    def __init__(
        self,
        *,
        urls: tuple[str, ...],
        token: str,
        limits: SandboxLimits,
        run_id: str,
        allow_weak: bool,
    ) -> None:
        self._servers = [_Server(url=url.rstrip("/")) for url in urls]
        self._headers = {"Authorization": f"Bearer {token}"}
        self._limits = limits
        self._run_id = run_id
        self._allow_weak = allow_weak
        self._http: aiohttp.ClientSession | None = None
        self._beating: asyncio.Task[None] | None = None
        self.warnings: tuple[str, ...] = ()
        self.is_isolated = True

    async def open(self) -> None:
        """Say hello to every server; all must answer now, later some may fail."""
        self._http = aiohttp.ClientSession(
            headers=self._headers, connector=aiohttp.TCPConnector(limit=0)
        )
        hello = {
            "version": wire.VERSION,
            "python": wire.PYTHON,
            "run_id": self._run_id,
            "limits": wire.dump_limits(self._limits),
            "allow_weak": self._allow_weak,
        }
        for server in self._servers:
            answer = await self._json(server, "POST", "/v1/clients", hello, OPEN_TIMEOUT_S)
            server.client, server.lease_s = answer["client"], float(answer["lease_s"])
            server.answer = answer
            self.is_isolated = self.is_isolated and bool(answer["is_isolated"])
            self.warnings += tuple(f"{server.url}: {text}" for text in answer["warnings"])
        self._beating = asyncio.create_task(self._beat(), name="sandbox leases")

    async def _beat(self) -> None:
        """Keep the leases while commands are rare; a third of the shortest lease apart."""
        pause_s = min(server.lease_s for server in self._servers) / 3
        while True:
            await asyncio.sleep(pause_s)
            for server in self._servers:
                with contextlib.suppress(SandboxError):
                    await self._json(server, "PUT", _client_path(server), {}, NETWORK_S)

    async def prepare(self, repository: Repository) -> RemoteTemplate:
        server = self._order()[0]
        return await self._prepare_on(server, repository)

    async def _prepare_on(self, server: _Server, repository: Repository) -> RemoteTemplate:
        answer = await self._json(
            server,
            "POST",
            f"{_client_path(server)}/templates",
            wire.dump_repository(repository),
            CREATE_TIMEOUT_S + NETWORK_S,
        )
        server.templates[answer["base_commit"]] = answer["template"]
        return RemoteTemplate(repository=repository, base_commit=answer["base_commit"])

    def _order(self) -> list[_Server]:
        """Servers to try, best first: those that answer, then those with the fewest of ours."""
        now_s = time.monotonic()
        return sorted(
            self._servers, key=lambda server: (server.rests_until_s > now_s, server.num_live)
        )

    async def create(self, template: Template) -> "RemoteSandbox":
        assert isinstance(template, RemoteTemplate)
        errors = []
        for server in self._order():
            name = secrets.token_hex(12)
            server.num_live += 1  # Before the wait, so that a burst spreads.
            try:
                await self._create_on(server, template, name)
                return RemoteSandbox(self, server, name, self._limits)
            except SandboxError as error:
                server.num_live -= 1
                server.rests_until_s = time.monotonic() + REST_S
                errors.append(str(error))
            except BaseException:
                server.num_live -= 1
                raise
        raise SandboxError("; ".join(errors))

    async def _create_on(self, server: _Server, template: RemoteTemplate, name: str) -> None:
        path = f"{_client_path(server)}/sandboxes/{name}"
        for attempt in range(2):
            if template.base_commit not in server.templates or attempt:
                await self._prepare_on(server, template.repository)
            body = {"template": server.templates[template.base_commit]}
            status, data = await self._call(
                server, "PUT", path, wire.dump(body), CREATE_TIMEOUT_S + NETWORK_S
            )
            if status != _NO_TEMPLATE:
                break
        _raise_for(server, status, data)

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        if self._http is None:
            return
        for server in self._servers:
            if server.client:
                with contextlib.suppress(SandboxError):
                    await self._json(server, "DELETE", _client_path(server), {}, NETWORK_S)
        await self._http.close()

    @property
    def num_live(self) -> int:
        return sum(server.num_live for server in self._servers)

    # --- HTTP

    async def _json(
        self, server: _Server, method: str, path: str, body: dict[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        status, data = await self._call(server, method, path, wire.dump(body), timeout_s)
        _raise_for(server, status, data)
        return wire.load(data)

    async def _call(
        self, server: _Server, method: str, path: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        assert self._http is not None, "open() first"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._http.request(
                method, server.url + path, data=body, timeout=timeout, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except TimeoutError:
            raise SandboxError(
                f"sandbox server {server.url}: no answer to {method} {path} in {timeout_s:g} s"
            ) from None
        except aiohttp.ClientError as error:
            raise SandboxError(f"sandbox server {server.url}: {error}") from None


class RemoteSandbox:
    """Satisfies `protocol.Sandbox`."""

    def __init__(
        self, backend: RemoteBackend, server: _Server, name: str, limits: SandboxLimits
    ) -> None:
        self._backend = backend
        self._server = server
        self._limits = limits
        self._path = f"{_client_path(server)}/sandboxes/{name}"
        self._is_destroyed = False

    async def run(
        self, command: str, timeout_s: float | None = None, output_chars: int | None = None
    ) -> CommandResult:
        limit_s = self._limits.command_timeout_s if timeout_s is None else timeout_s
        body = {"command": command, "timeout_s": limit_s, "output_chars": output_chars}
        row = await self._backend._json(
            self._server, "POST", f"{self._path}/run", body, limit_s + NETWORK_S
        )
        return wire.load_result(row)

    async def run_python(
        self, code: CodeType, data: dict[str, object], timeout_s: float
    ) -> PythonResult:
        payload = marshal.dumps((marshal.dumps(code), data))
        path = f"{self._path}/python?timeout_s={timeout_s!r}"
        status, answer = await self._backend._call(
            self._server, "POST", path, payload, timeout_s + NETWORK_S
        )
        _raise_for(self._server, status, answer)
        return wire.load_python_result(wire.load(answer))

    async def capture_diff(self, max_bytes: int = MAX_DIFF_BYTES) -> bytes:
        path = f"{self._path}/diff?max_bytes={max_bytes}"
        status, data = await self._backend._call(
            self._server, "POST", path, b"", 2 * CAPTURE_TIMEOUT_S + NETWORK_S
        )
        _raise_for(self._server, status, data)
        return data

    async def destroy(self) -> None:
        if self._is_destroyed:
            return
        self._is_destroyed = True
        self._server.num_live -= 1
        for attempt in range(DESTROY_ATTEMPTS):
            try:
                await self._backend._json(self._server, "DELETE", self._path, {}, NETWORK_S)
                return
            except SandboxError:
                # The lease ends it if nobody answers.
                await asyncio.sleep(0.1 * 2**attempt)


def _client_path(server: _Server) -> str:
    return f"/v1/clients/{server.client}"


def _raise_for(server: _Server, status: int, data: bytes) -> None:
    if status < 400:
        return
    try:
        problem = wire.load(data)
        kind, message = problem.get("kind"), problem.get("error")
    except SandboxError:
        kind, message = None, data[:200].decode(errors="replace")
    if kind == wire.KIND_WORK_TREE:
        raise WorkTreeError(str(message))
    raise SandboxError(f"sandbox server {server.url}: {message} (HTTP {status})")


def token_from_environment() -> str:
    """The token of the servers.

    Raises:
        ConfigError: the variable is not set.
    """
    token = os.environ.get(wire.TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(
            f"sandbox.backend=remote: set {wire.TOKEN_VARIABLE} to the token of the servers"
        )
    return token
