"""The control endpoint of a running run: pools, scale operations, settings. HTTP with a key.

It listens on `net.bind` beside the other servers of the run and does nothing by itself: the scaler
does the work. Invariant: no answer without the key of `control.json`.
"""

import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from rlmix.core.bearer import is_bearer
from rlmix.core.errors import RlmixError
from rlmix.scaling.control import CONTROL_FILE, write_control_file
from rlmix.scaling.history import operation_to_dict
from rlmix.scaling.operation import Operation

MAX_BODY_BYTES = 1 << 20
ANY_ADDRESS = ("0.0.0.0", "::")

Leave = Callable[[str, float | None, str], Awaitable[Operation]]
"""(machine, seconds that its sessions have, reason) -> the operation that drains it."""
Ask = Callable[[Mapping[str, int], str, str], Awaitable[Operation]]
"""(targets, id, reason) -> the operation."""


class ControlServer:
    """Start it once the pools serve; `stop` removes `control.json`."""

    def __init__(
        self,
        folder: Path,
        *,
        bind: str,
        describe: Callable[[], Mapping[str, Any]],
        show: Callable[[], Mapping[str, Any]],
        ask: Ask,
        find: Callable[[str], Operation],
        cancel: Callable[[str, str], Operation],
        change: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        leave: Leave,
        stay: Callable[[str, str], Awaitable[Operation | None]],
    ) -> None:
        """
        Args:
            describe: the document of `GET /pools`.
            show: what the live view shows, as `observe.live_state.state_to_dict` writes it.
            change: puts settings into the run; returns them.
        """
        self._folder = folder
        self._bind = bind
        self._describe = describe
        self._show = show
        self._ask = ask
        self._find = find
        self._cancel = cancel
        self._change = change
        self._leave = leave
        self._stay = stay
        self._key = secrets.token_urlsafe(24)
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(middlewares=[self._guarded], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/pools", self._pools),
                web.get("/view", self._view),
                web.post("/operations", self._begin),
                web.get("/operations/{id}", self._operation),
                web.post("/operations/{id}/cancel", self._undo),
                web.post("/settings", self._settings),
                web.post("/machines/leave", self._machine_leaves),
                web.post("/machines/stay", self._machine_stays),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in self._bind else socket.AF_INET
        listener = socket.socket(family)
        listener.bind((self._bind, 0))
        await web.SockSite(self._runner, listener).start()
        host = socket.gethostname() if self._bind in ANY_ADDRESS else self._bind
        host = f"[{host}]" if ":" in host else host
        self.url = f"http://{host}:{listener.getsockname()[1]}"
        write_control_file(self._folder, url=self.url, key=self._key)

    async def stop(self) -> None:
        (self._folder / CONTROL_FILE).unlink(missing_ok=True)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if not is_bearer(request.headers, self._key):
            return _reply({"error": "control: the key is missing or wrong"}, status=401)
        try:
            answer: web.StreamResponse = await handler(request)
            return answer
        except (RlmixError, ValueError, KeyError, TypeError) as error:
            text = str(error) if isinstance(error, RlmixError) else f"control: {error!r}"
            return _reply({"error": text}, status=400)

    async def _pools(self, request: web.Request) -> web.Response:
        return _reply(self._describe())

    async def _view(self, request: web.Request) -> web.Response:
        return _reply(self._show())

    async def _begin(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        targets = {str(pool): int(number) for pool, number in body["targets"].items()}
        operation = await self._ask(targets, str(body["id"]), str(body.get("reason", "asked for")))
        return _reply(operation_to_dict(operation))

    async def _operation(self, request: web.Request) -> web.Response:
        return _reply(operation_to_dict(self._find(request.match_info["id"])))

    async def _undo(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read() or b"{}")
        operation = self._cancel(request.match_info["id"], str(body.get("reason", "cancelled")))
        return _reply(operation_to_dict(operation))

    async def _settings(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        return _reply({"settings": self._change(dict(body["settings"]))})

    async def _machine_leaves(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        within_s = body.get("within_s")
        limit_s = None if within_s is None else float(within_s)
        reason = str(body.get("reason", "asked for"))
        return _reply(operation_to_dict(await self._leave(str(body["machine"]), limit_s, reason)))

    async def _machine_stays(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        operation = await self._stay(str(body["machine"]), str(body.get("reason", "asked for")))
        return _reply({} if operation is None else operation_to_dict(operation))


def _reply(document: Mapping[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(
        body=orjson.dumps(dict(document)), status=status, content_type="application/json"
    )
