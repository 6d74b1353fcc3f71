"""Weights that come through a process group: begin, one push or several, end, as in SGLang.

As in the real server, requests go on while an update is open, each push is served as soon as it has
arrived, and the version is that of the push, not of the end. Invariant: what is done with a bucket
is the server's affair, and it gets whole buckets only.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import web

from rlmix.core.errors import WeightSyncError
from rlmix.engine.http import Call, Handler, RequestError, reply_json

if TYPE_CHECKING:
    from torch import Tensor

    from rlmix.engine.receiver import WeightGroups

DEFAULT_GROUP = "weight_update_group"
BACKENDS = ("gloo",)
LOAD_FORMATS = (None, "flattened_bucket")


class Take(Protocol):
    """Serves the tensors of one bucket and answers the request that brought them."""

    async def __call__(
        self, received: "dict[str, Tensor]", *, body: dict[str, Any], source: str
    ) -> web.Response: ...


class PushEndpoints:
    """The routes of one server, and whether an update is open."""

    def __init__(self, take: Take) -> None:
        self._take = take
        self._joined: WeightGroups | None = None
        self._is_open = False

    @property
    def _groups(self) -> "WeightGroups":
        """Made at the first use, because it imports torch."""
        if self._joined is None:
            from rlmix.engine.receiver import WeightGroups

            self._joined = WeightGroups()
        return self._joined

    def routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("POST", "/init_weights_update_group"): self._init_group,
            ("POST", "/destroy_weights_update_group"): self._destroy_group,
            ("POST", "/begin_weight_update"): self._begin,
            ("POST", "/update_weights_from_distributed"): self._push,
            ("POST", "/end_weight_update"): self._end,
        }

    async def _init_group(self, call: Call) -> web.Response:
        body = await call.json()
        backend = body.get("backend", "nccl")
        if backend not in BACKENDS:
            return _refusal(f"backend={backend!r}; a CPU joins {', '.join(BACKENDS)}")
        try:
            await asyncio.to_thread(
                self._groups.join,
                _group(body),
                address=str(body["master_address"]),
                port=int(body["master_port"]),
                rank=int(body["rank_offset"]),
                world_size=int(body["world_size"]),
            )
        except WeightSyncError as error:
            return _refusal(str(error))
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError(400, f"the group lacks or misplaces a field: {error!r}") from error
        return _success(f"joined {_group(body)}")

    async def _destroy_group(self, call: Call) -> web.Response:
        name = _group(await call.json())
        if name not in self._groups:
            return _refusal(f"group {name!r} is unknown")
        self._groups.leave(name)
        return _success(f"left {name}")

    async def _begin(self, call: Call) -> web.Response:
        if self._is_open:
            return _refusal("an update is open; end it first")
        self._is_open = True
        return _success("an update is open")

    async def _end(self, call: Call) -> web.Response:
        if not self._is_open:
            return _refusal("no update is open")
        self._is_open = False
        return _success("the update is over")

    async def _push(self, call: Call) -> web.Response:
        body = await call.json()
        group, load_format = _group(body), body.get("load_format")
        if not self._is_open:
            return _refusal("no update is open; send /begin_weight_update first")
        if group not in self._groups:
            return _refusal(f"group {group!r} is unknown; send /init_weights_update_group first")
        if load_format not in LOAD_FORMATS:
            return _refusal(f"load_format={load_format!r}; allowed: null, flattened_bucket")
        try:
            received = await asyncio.to_thread(
                self._groups.receive,
                group,
                names=body["names"],
                dtypes=body["dtypes"],
                shapes=body["shapes"],
                load_format=load_format,
            )
        except KeyError as error:
            raise RequestError(400, f"the push lacks {error}") from error
        except WeightSyncError as error:
            return _refusal(str(error))
        return await self._take(
            received, body=body, source=f"{len(received)} tensors of group {group}"
        )


def _group(body: dict[str, Any]) -> str:
    return str(body.get("group_name") or DEFAULT_GROUP)


def _success(message: str) -> web.Response:
    return reply_json({"success": True, "message": message})


def _refusal(message: str) -> web.Response:
    return reply_json({"success": False, "message": message}, status=400)
