"""Lends sandboxes of this machine to workers elsewhere, over HTTP.

    RLMIX_SANDBOX_TOKEN=... python -m rlmix.sandbox.server --host 10.0.0.7 --port 7070

A worker opens a *client* here (its run, its limits), which is a sandbox backend of its own. Every
request of a client renews its lease; a client whose lease ended is closed with everything in it, so
a worker that died leaves nothing for longer than that.

Who feeds it: HTTP requests, each with the token. What ends it: SIGTERM or SIGINT, which close every
client first.

Invariant: no request without the token reaches a handler; one sandbox runs one call at a time.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from rlmix.core.bearer import is_bearer
from rlmix.core.errors import ConfigError, ExitCode, RlmixError, SandboxError
from rlmix.sandbox import wire
from rlmix.sandbox.backend import LOCAL_BACKENDS, open_backend
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.protocol import WorkTreeError
from rlmix.sandbox.reap import reap_folders
from rlmix.sandbox.repository import RepositoryTemplate
from rlmix.sandbox.session import MAX_DIFF_BYTES, ShellSandbox

LEASE_S = 60.0
MAX_BODY_BYTES = 256 << 20
_LOOK_S = 1.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSpec:
    scratch: Path
    token: str = field(repr=False)
    backend: str
    allow_weak: bool
    max_sandboxes: int
    lease_s: float


@dataclass(kw_only=True, slots=True)
class _Client:
    run_id: str
    backend: LaunchedBackend
    memory_mib: int
    expires_s: float
    templates: dict[str, RepositoryTemplate] = field(default_factory=dict)
    sandboxes: dict[str, ShellSandbox] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)


class _Full(RlmixError):
    pass


class SandboxServer:
    """The application and its clients."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._clients: dict[str, _Client] = {}
        self._starting = 0

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        one, box = "/v1/clients/{client}", "/v1/clients/{client}/sandboxes/{sandbox}"
        app.add_routes(
            [
                web.get("/v1/clients", self._list),
                web.post("/v1/clients", self._open),
                web.put(one, self._renew),
                web.delete(one, self._close),
                web.delete("/v1/runs/{run}", self._reap_run),
                web.post(f"{one}/templates", self._prepare),
                web.put(box, self._create),
                web.post(f"{box}/run", self._run),
                web.post(f"{box}/python", self._python),
                web.post(f"{box}/diff", self._diff),
                web.delete(box, self._destroy),
            ]
        )
        app.cleanup_ctx.append(self._keep_leases)
        return app

    # --- around every request

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if not is_bearer(request.headers, self._spec.token):
            return _problem(401, wire.KIND_SANDBOX, "the token is wrong or missing")
        try:
            return await handler(request)
        except WorkTreeError as error:
            return _problem(409, wire.KIND_WORK_TREE, str(error))
        except _Full as error:
            return _problem(429, wire.KIND_FULL, str(error))
        except RlmixError as error:
            return _problem(503, wire.KIND_SANDBOX, str(error))
        except (KeyError, TypeError, ValueError) as error:
            return _problem(400, wire.KIND_SANDBOX, f"the request is wrong: {error!r}")

    async def _keep_leases(self, app: web.Application) -> Any:
        task = asyncio.create_task(self._end_leases(), name="leases")
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await asyncio.gather(*(self._end(name) for name in list(self._clients)))

    async def _end_leases(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            now_s = time.monotonic()
            for name, client in list(self._clients.items()):
                if client.expires_s < now_s and not client.busy:
                    await self._end(name)

    async def _end(self, name: str) -> None:
        client = self._clients.pop(name, None)
        if client is not None:
            await client.backend.close()

    def _client(self, request: web.Request) -> _Client:
        client = self._clients.get(request.match_info["client"])
        if client is None:
            raise SandboxError("no such client; its lease ended or the server was started anew")
        client.expires_s = time.monotonic() + self._spec.lease_s
        return client

    @contextlib.contextmanager
    def _sandbox(self, request: web.Request) -> Any:
        """The sandbox of a request, for this request alone."""
        client, name = self._client(request), request.match_info["sandbox"]
        sandbox = client.sandboxes.get(name)
        if sandbox is None:
            raise SandboxError(f"no sandbox {name}; it was destroyed")
        if name in client.busy:
            raise SandboxError(f"sandbox {name} is busy; one call at a time")
        client.busy.add(name)
        try:
            yield sandbox
        finally:
            client.busy.discard(name)
            client.expires_s = time.monotonic() + self._spec.lease_s

    # --- clients

    async def _open(self, request: web.Request) -> web.Response:
        asked = wire.load(await request.read())
        if asked["version"] != wire.VERSION or asked["python"] != wire.PYTHON:
            raise SandboxError(
                f"sandbox server speaks protocol {wire.VERSION} with {wire.PYTHON}, the worker "
                f"{asked['version']} with {asked['python']}; install the same rlmix and Python"
            )
        limits = wire.load_limits(asked["limits"])
        run_id = str(asked["run_id"])
        backend = await open_backend(
            self._spec.backend,
            limits,
            self._spec.scratch,
            run_id,
            allow_weak=self._spec.allow_weak and bool(asked["allow_weak"]),
        )
        assert isinstance(backend, LaunchedBackend)
        name = secrets.token_hex(12)
        self._clients[name] = _Client(
            run_id=run_id,
            backend=backend,
            memory_mib=limits.memory_mib,
            expires_s=time.monotonic() + self._spec.lease_s,
        )
        return _answer(
            {
                "client": name,
                "lease_s": self._spec.lease_s,
                "backend": backend.name,
                "is_isolated": backend.is_isolated,
                "warnings": list(backend.warnings),
            }
        )

    async def _list(self, request: web.Request) -> web.Response:
        now_s = time.monotonic()
        rows = [
            {
                "client": name,
                "run_id": client.run_id,
                "sandboxes": len(client.sandboxes),
                "lease_left_s": round(client.expires_s - now_s, 1),
            }
            for name, client in self._clients.items()
        ]
        return _answer({"clients": rows, "max_sandboxes": self._spec.max_sandboxes})

    async def _renew(self, request: web.Request) -> web.Response:
        self._client(request)
        return _answer({})

    async def _close(self, request: web.Request) -> web.Response:
        await self._end(request.match_info["client"])
        return _answer({})

    async def _reap_run(self, request: web.Request) -> web.Response:
        run_id = request.match_info["run"]
        names = [name for name, client in self._clients.items() if client.run_id == run_id]
        await asyncio.gather(*map(self._end, names))
        return _answer({"closed": len(names)})

    # --- sandboxes

    async def _prepare(self, request: web.Request) -> web.Response:
        client = self._client(request)
        repository = wire.load_repository(wire.load(await request.read()))
        template = await client.backend.prepare(repository)
        name = template.path.name
        client.templates[name] = template
        return _answer({"template": name, "base_commit": template.base_commit})

    async def _create(self, request: web.Request) -> web.Response:
        # The client chooses the name, so that asking twice makes one sandbox.
        client, name = self._client(request), request.match_info["sandbox"]
        if name in client.sandboxes:
            return _answer({})
        template = client.templates.get(str(wire.load(await request.read())["template"]))
        if template is None or not template.path.is_dir():
            return _problem(404, wire.KIND_SANDBOX, "no such template; prepare it again")
        self._admit(client)
        self._starting += 1
        try:
            client.sandboxes[name] = await client.backend.create(template)
        finally:
            self._starting -= 1
        return _answer({})

    def _admit(self, client: _Client) -> None:
        live = self._starting + sum(len(one.sandboxes) for one in self._clients.values())
        if live >= self._spec.max_sandboxes:
            raise _Full(f"{live} sandboxes are live, --max-sandboxes={self._spec.max_sandboxes}")
        free_mib = available_mib()
        if free_mib is not None and free_mib < client.memory_mib:
            raise _Full(f"{free_mib} MiB of memory are free, one may take {client.memory_mib}")

    async def _run(self, request: web.Request) -> web.Response:
        asked = wire.load(await request.read())
        with self._sandbox(request) as sandbox:
            result = await sandbox.run(asked["command"], asked["timeout_s"], asked["output_chars"])
        return _answer(wire.dump_result(result))

    async def _python(self, request: web.Request) -> web.Response:
        payload = await request.read()
        with self._sandbox(request) as sandbox:
            result = await sandbox.run_payload(payload, float(request.query["timeout_s"]))
        return _answer(wire.dump_python_result(result))

    async def _diff(self, request: web.Request) -> web.Response:
        max_bytes = min(MAX_DIFF_BYTES, int(request.query["max_bytes"]))
        with self._sandbox(request) as sandbox:
            diff = await sandbox.capture_diff(max_bytes)
        return web.Response(body=diff)

    async def _destroy(self, request: web.Request) -> web.Response:
        client = self._client(request)
        sandbox = client.sandboxes.pop(request.match_info["sandbox"], None)
        if sandbox is not None:
            await sandbox.destroy()
        return _answer({})


def _answer(value: dict[str, Any]) -> web.Response:
    return web.Response(body=wire.dump(value), content_type="application/json")


def _problem(status: int, kind: str, message: str) -> web.Response:
    body = wire.dump({"kind": kind, "error": message})
    return web.Response(status=status, body=body, content_type="application/json")


def available_mib() -> int | None:
    """Memory that this machine could still give; None when it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) >> 10
    return None


def read_token(environment: dict[str, str]) -> str:
    """The token that every request must carry.

    Raises:
        ConfigError: none is set, or it is too short to be one.
    """
    token = environment.get(wire.TOKEN_VARIABLE, "")
    if len(token) < wire.MIN_TOKEN_CHARS:
        raise ConfigError(
            f"sandbox server: {wire.TOKEN_VARIABLE} has {len(token)} characters; at least "
            f"{wire.MIN_TOKEN_CHARS} are needed. Make one: python -c 'import secrets; "
            "print(secrets.token_urlsafe(32))'"
        )
    return token


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rlmix.sandbox.server")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="0 lets the system choose")
    parser.add_argument("--ready-file", type=Path, help="written as JSON {url, pid} when serving")
    parser.add_argument("--backend", default="auto", choices=LOCAL_BACKENDS)
    parser.add_argument("--allow-weak", action="store_true", help="let `auto` take `weak`")
    parser.add_argument("--max-sandboxes", type=int, default=256)
    parser.add_argument("--lease-s", type=float, default=LEASE_S)
    parser.add_argument("--scratch", type=Path, help="folder of this server alone")
    return parser.parse_args(argv)


async def serve(options: argparse.Namespace, token: str, scratch: Path) -> None:
    spec = ServerSpec(
        scratch=scratch,
        token=token,
        backend=options.backend,
        allow_weak=options.allow_weak,
        max_sandboxes=options.max_sandboxes,
        lease_s=options.lease_s,
    )
    runner = web.AppRunner(SandboxServer(spec).application(), access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        ready = {"url": f"http://{host}:{port}", "pid": os.getpid()}
        if options.ready_file is not None:
            temporary = options.ready_file.with_suffix(".new")
            temporary.write_text(json.dumps(ready))
            temporary.rename(options.ready_file)
        print(f"sandboxes at {ready['url']}", flush=True)
        await until_told_to_stop()
    finally:
        await runner.cleanup()


async def until_told_to_stop() -> None:
    import signal

    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    await told.wait()


def main(argv: list[str]) -> int:
    options = parse_arguments(argv)
    try:
        token = read_token(dict(os.environ))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return ExitCode.BAD_REQUEST
    os.environ.pop(wire.TOKEN_VARIABLE)
    with contextlib.ExitStack() as stack:
        if options.scratch is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rlmix_server_"))
            scratch = Path(folder)
        else:
            scratch = options.scratch
            scratch.mkdir(parents=True, exist_ok=True)
        lock = stack.enter_context(open(scratch / "lock", "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"sandbox server: another one works in {scratch}", file=sys.stderr)
            return ExitCode.BAD_REQUEST
        reap_folders(scratch)  # Of a server that was killed.
        asyncio.run(serve(options, token, scratch))
    return ExitCode.GOOD


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
