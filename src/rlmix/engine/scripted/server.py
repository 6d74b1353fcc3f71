"""The scripted engine's HTTP server: the real shapes, a script's tokens, faults on request."""

import asyncio
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

from rlmix.core.candidates import Candidates
from rlmix.core.numerics_key import NumericsKey
from rlmix.core.trajectory import VersionSpan
from rlmix.engine import wire
from rlmix.engine.http import Call, Handler, JsonServer, RequestError, reply_json, reply_text
from rlmix.engine.negotiation import reply_answer
from rlmix.engine.protocol import MIN_VERSION_HEADER, SESSION_HEADER
from rlmix.engine.pushes import PushEndpoints
from rlmix.engine.scripted.faults import (
    FAULTS,
    SLOW_S,
    UPDATE_FAULTS,
    change_a_byte,
    cut,
    refuse,
    send_half,
    spoil,
)
from rlmix.engine.scripted.policies import Policy, ScriptedCall, ScriptedReply
from rlmix.engine.scripted.tensors import checksum, digest, folder_digests

if TYPE_CHECKING:
    from torch import Tensor


DRAIN_POLL_S = 0.002


class ScriptedEngine:
    """The fake server. `async with ScriptedEngine(policy) as engine: ... engine.url`."""

    def __init__(
        self,
        policy: Policy,
        *,
        numerics: NumericsKey | None = None,
        pool: str = "scripted",
        replica: str = "scripted-0",
        weight_version: int = 0,
        max_running: int = 16,
        latency_s: float = 0.0,
        token_s: float = 0.0,
        json_only: bool = False,
        model_path: str = "",
        context_length: int = 1 << 16,
        key: str | None = None,
    ) -> None:
        """`latency_s` passes before the first token, `token_s` before every further one;
        `json_only` answers as the real server does, whatever the client reads; `key` is what
        every request must carry."""
        self._policy = policy
        self._numerics = numerics or NumericsKey(
            accelerator="none",
            weights="bf16",
            activations="bf16",
            kv="bf16",
            attention="none",
            engine="scripted",
        )
        self._pool, self._replica = pool, replica
        self._max_running = max_running
        self._latency_s, self._token_s = latency_s, token_s
        self._json_only = json_only
        self._room = asyncio.Semaphore(max_running)
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._aborts: dict[str, asyncio.Event] = {}
        self._faults: deque[str] = deque()
        self._update_faults: deque[str] = deque()
        self._pause_mode = ""
        self._drained = asyncio.Event()
        self._drained.set()
        self._context_length = context_length
        self._pushes = PushEndpoints(self._take_pushed)
        self._turns: Counter[str] = Counter()
        self._rids = (f"scripted-{number}" for number in itertools.count())
        self._server = JsonServer(self._routes(), key=key)
        self.weight_version = weight_version
        self.model_path = model_path
        self._digests = folder_digests(Path(model_path)) if model_path else {}
        self.num_requests = 0
        self.num_tokens = 0
        self.num_waiting = 0

    def _routes(self) -> dict[tuple[str, str], Handler]:
        return {
            ("POST", "/generate"): self._generate,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/update_weights_from_disk"): self._update,
            ("POST", "/flush_cache"): self._flush,
            ("POST", "/weights_checker"): self._checksum,
            ("POST", "/faults"): self._add_faults,
            ("GET", "/flush_cache"): self._flush,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/ping"): self._ping,
            ("GET", "/health"): self._ping,
            ("GET", "/ready"): self._ready,
            ("GET", "/server_info"): self._info,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/v1/loads"): self._loads,
            **self._pushes.routes(),
        }

    async def __aenter__(self) -> "ScriptedEngine":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, *, host: str = "127.0.0.1", port: int = 0) -> None:
        await self._server.start(host=host, port=port)

    async def stop(self) -> None:
        for event in self._aborts.values():
            event.set()
        self._resumed.set()
        await self._server.stop()

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def port(self) -> int:
        return self._server.port

    @property
    def num_running(self) -> int:
        return len(self._aborts)

    def fail_next(self, fault: str, *, times: int = 1) -> None:
        """Answer the next `times` generate calls with a fault out of FAULTS."""
        if fault not in FAULTS:
            raise ValueError(f"fault {fault!r} is unknown; faults: {', '.join(FAULTS)}")
        queue = self._update_faults if fault in UPDATE_FAULTS else self._faults
        queue.extend([fault] * times)

    async def _generate(self, call: Call) -> web.StreamResponse:
        started_s = time.monotonic()
        body = await call.json()
        fault = self._faults.popleft() if self._faults else ""
        minimum = int(call.headers.get(MIN_VERSION_HEADER, "0"))
        if self.weight_version < minimum:
            raise RequestError(409, f"version {self.weight_version} is older than {minimum}")
        refuse(fault, version=self.weight_version)
        if fault == "exit":
            os._exit(1)
        if fault == "hang":
            await asyncio.Event().wait()  # Ends when the client leaves or the server stops.
        if fault == "cut":
            return cut(call.request)
        if fault == "slow":
            await asyncio.sleep(SLOW_S)
        rid = body.get("rid") or next(self._rids)
        self._refuse_wrong(body)
        session_id = call.headers.get(SESSION_HEADER, rid)
        answer = await self._answer(rid, session_id, body, started_s)
        headers = wire.identity_headers(
            pool=self._pool, replica=self._replica, numerics=self._numerics
        )
        answer = spoil(answer, fault)
        if self._json_only:
            response = reply_json(wire.generate_document(answer), headers=headers)
        else:
            response = reply_answer(call, answer, headers=headers)
        if fault == "truncate":
            return await send_half(call.request, response)
        return change_a_byte(response) if fault == "changed" else response

    def _refuse_wrong(self, body: Mapping[str, Any]) -> None:
        ids = body.get("input_ids")
        if not isinstance(ids, list) or not ids:
            raise RequestError(400, "input_ids must be a list of at least one token id")
        total = len(ids) + int(body["sampling_params"]["max_new_tokens"])
        if total > self._context_length:
            raise RequestError(400, f"{total} tokens in all; the context is {self._context_length}")

    async def _answer(
        self, rid: str, session_id: str, body: Mapping[str, Any], started_s: float
    ) -> wire.Answer:
        aborted = asyncio.Event()
        versions: list[int] = []
        self.num_waiting += 1
        try:
            await self._resumed.wait()
            await self._drained.wait()
            await self._room.acquire()
        finally:
            self.num_waiting -= 1
        self._aborts[rid] = aborted
        try:
            reply = self._policy(
                ScriptedCall(
                    session_id=session_id,
                    request_id=rid,
                    input_ids=tuple(body["input_ids"]),
                    sampling=body["sampling_params"],
                    version=self.weight_version,
                    turn=self._turns[session_id],
                )
            )
            for index in range(len(reply.output_ids)):
                delay_s = self._token_s if index else self._latency_s
                if delay_s and await _is_set_within(aborted, delay_s):
                    break
                await self._resumed.wait()
                if aborted.is_set():
                    break
                versions.append(self.weight_version)
                self.num_tokens += 1
        finally:
            del self._aborts[rid]
            self._room.release()
        self._turns[session_id] += 1
        self.num_requests += 1
        return self._recorded(rid, body, reply, versions, started_s)

    def _recorded(
        self,
        rid: str,
        body: Mapping[str, Any],
        reply: ScriptedReply,
        versions: list[int],
        started_s: float,
    ) -> wire.Answer:
        count = len(versions)
        finish: dict[str, Any] = {"type": "length", "length": count}
        if reply.finish == "stop":
            finish = {"type": "stop", "matched": reply.output_ids[-1]}
        if count < len(reply.output_ids):
            finish = {"type": "abort", "message": "Aborted"}
        ids = np.array(reply.output_ids[:count], dtype=np.int32)
        kept = sampling_logprobs = head = None
        if body.get("return_sampling_mask"):
            kept = reply.kept.slice(0, count)
            sampling_logprobs = kept.logprobs[kept.find(ids)[0]]
        if head_k := body.get("top_logprobs_num", 0):
            head = _likeliest(reply.full.slice(0, count), head_k)
        return wire.Answer(
            rid=rid,
            output_ids=reply.output_ids[:count],
            finish_reason=finish,
            num_prompt_tokens=len(body["input_ids"]),
            num_cached_tokens=0,
            spans=version_spans(versions),
            weight_version=self.weight_version,
            latency_s=time.monotonic() - started_s,
            logprobs=np.array(reply.logprobs[:count], dtype=np.float32)
            if body.get("return_logprob")
            else None,
            sampling_logprobs=sampling_logprobs,
            kept=kept,
            tells_support=body.get("sampling_logprobs_mode") == "support",
            head=head,
        )

    async def _pause(self, call: Call) -> web.Response:
        mode = (await call.json()).get("mode", "abort")
        if mode == "abort":
            self._abort_all()
        self._pause_mode = mode
        self._resumed.clear()
        return reply_json({"status": "ok", "message": f"Generation paused ({mode})."})

    async def _continue(self, call: Call) -> web.Response:
        self._resumed.set()
        return reply_json({"status": "ok", "message": "Generation continued."})

    async def _abort(self, call: Call) -> web.Response:
        body = await call.json()
        for rid, event in self._aborts.items():
            if body.get("abort_all") or rid == body.get("rid"):
                event.set()
        return reply_text()

    def _abort_all(self) -> None:
        for event in self._aborts.values():
            event.set()

    async def _update(self, call: Call) -> web.Response:
        body = await call.json()
        path = Path(body["model_path"])
        if not path.is_dir():
            return _update_reply(success=False, message=f"{path} is not a folder")
        return await self._replace(folder_digests(path), body=body, model_path=str(path))

    async def _take_pushed(
        self, received: "dict[str, Tensor]", *, body: dict[str, Any], source: str
    ) -> web.Response:
        import torch

        digests = {
            name: digest(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, tensor in received.items()
        }
        return await self._replace({**self._digests, **digests}, body=body)

    async def _replace(
        self, digests: dict[str, str], *, body: Mapping[str, Any], model_path: str | None = None
    ) -> web.Response:
        """Serve other weights, or what the next update fault makes of it."""
        fault = self._update_faults.popleft() if self._update_faults else ""
        if body.get("abort_all_requests"):
            self._abort_all()
        if self._resumed.is_set():
            await self._drain()
        if fault == "stale_update":
            return _update_reply(success=True, message="Succeeded to update.")
        if fault in UPDATE_FAULTS and digests:
            last = max(digests)
            digests = {**digests, last: self._digests.get(last, "")}
        self._digests = digests
        if model_path is not None:
            self.model_path = model_path
        if fault == "failed_update":
            return _update_reply(success=False, message="scripted failure in mid-update")
        if body.get("weight_version") is not None:
            self.weight_version = int(body["weight_version"])
        if self._aborts and self._pause_mode == "in_place" and body.get("flush_cache", True):
            return _update_reply(
                success=False, message="Weights were updated, but cache was not flushed."
            )
        return _update_reply(success=True, message="Succeeded to update.")

    async def _drain(self) -> None:
        """Wait for the running requests; those that arrive meanwhile wait behind the update."""
        self._drained.clear()
        try:
            while self._aborts and self._resumed.is_set():
                await asyncio.sleep(DRAIN_POLL_S)
        finally:
            self._drained.set()

    async def _flush(self, call: Call) -> web.Response:
        if self._aborts:
            raise RequestError(400, f"cache not flushed: {len(self._aborts)} requests run")
        return reply_text("Cache flushed.\n")

    async def _checksum(self, call: Call) -> web.Response:
        action = (await call.json()).get("action")
        if action != "checksum":
            raise RequestError(400, f"action={action!r}; the scripted engine knows checksum")
        return reply_json(
            {
                "success": True,
                "message": "ok",
                "per_engine_checksum": checksum(self._digests),
                "ranks": [],
            }
        )

    async def _metrics(self, call: Call) -> web.Response:
        values = {
            "num_running_reqs": self.num_running,
            "num_queue_reqs": self.num_waiting,
            "generation_tokens_total": self.num_tokens,
            "num_requests_total": self.num_requests,
        }
        return reply_text("".join(f"sglang:{name} {value}\n" for name, value in values.items()))

    async def _add_faults(self, call: Call) -> web.Response:
        body = await call.json()
        try:
            self.fail_next(body["fault"], times=int(body.get("times", 1)))
        except ValueError as error:
            raise RequestError(400, str(error)) from error
        return reply_json({"queued": len(self._faults) + len(self._update_faults)})

    async def _ping(self, call: Call) -> web.Response:
        return reply_text()

    async def _ready(self, call: Call) -> web.Response:
        return reply_text(status=200 if self._resumed.is_set() else 503)

    async def _info(self, call: Call) -> web.Response:
        return reply_json(
            wire.server_info_document(
                model_path=self.model_path,
                weight_version=self.weight_version,
                max_total_tokens=1 << 20,
                max_running=self._max_running,
                context_length=self._context_length,
                pool=self._pool,
                replica=self._replica,
                numerics=self._numerics,
                startup_s=0.0,
                seed=0,
            )
        )

    async def _model_info(self, call: Call) -> web.Response:
        return reply_json(
            {
                "model_path": self.model_path,
                "weight_version": str(self.weight_version),
                "is_generation": True,
            }
        )

    async def _loads(self, call: Call) -> web.Response:
        return reply_json(
            wire.loads_document(
                engine_version=self._numerics.engine_version,
                accelerator=self._numerics.accelerator,
                num_running=self.num_running,
                num_waiting=self.num_waiting,
                num_waiting_uncached_tokens=0,
                num_used_tokens=0,
                num_cached_tokens=0,
                max_total_tokens=1 << 20,
                max_running=self._max_running,
                gen_throughput=0.0,
                cache_hit_frac=0.0,
                total_prefill_uncached_tokens=0,
                total_prefill_busy_us=0,
                decode_moments=(self.num_tokens, *(0,) * 5),
                num_paused=0 if self._resumed.is_set() else self.num_running,
                num_retracted=0,
                weight_bytes=0,
                kv_bytes=0,
                is_paused=not self._resumed.is_set(),
                weight_version=self.weight_version,
                total_generated_tokens=self.num_tokens,
                total_requests=self.num_requests,
            )
        )


def _update_reply(*, success: bool, message: str) -> web.Response:
    document = wire.update_document(success=success, message=message, num_paused=0)
    return reply_json(document, status=200 if success else 400)


def _likeliest(candidates: Candidates, count: int) -> Candidates:
    """The `count` likeliest members of each set, likeliest first."""
    order_M = np.lexsort((-candidates.logprobs, candidates.tokens))
    ranks_M = np.arange(len(order_M)) - candidates.offsets[candidates.tokens]
    chosen = order_M[ranks_M < count]
    return Candidates(
        offsets=np.concatenate(([0], np.minimum(candidates.sizes, count).cumsum())),
        ids=candidates.ids[chosen],
        logprobs=candidates.logprobs[chosen],
    )


def version_spans(versions: Sequence[int]) -> list[VersionSpan]:
    """Half-open spans from one version per token."""
    spans: list[VersionSpan] = []
    for version, group in itertools.groupby(versions):
        start = spans[-1].end if spans else 0
        end = start + sum(1 for _ in group)
        spans.append(VersionSpan(version=version, start=start, end=end))
    return spans


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return False
    return True
