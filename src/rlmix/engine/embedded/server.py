"""HTTP of the embedded engine and the loop that decodes.

One thread: the loop runs a step, then lets whatever arrived or became ready in the meantime
happen, then runs the next. Handlers fill the scheduler's queue and wait on a future; `_decode`
resolves it. Nothing else touches the scheduler, so nothing is locked, and HTTP costs decoding only
the time that parsing takes.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from torch import Tensor

from rlmix.core.errors import WeightSyncError
from rlmix.core.numerics_key import NumericsKey
from rlmix.engine import wire
from rlmix.engine.embedded.metrics import prometheus_text
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import Request, parse_request
from rlmix.engine.embedded.scheduler import PAUSE_MODES, Scheduler
from rlmix.engine.embedded.weights import ModelWeights, load_weights, replace_tensors
from rlmix.engine.http import Call, Handler, JsonServer, RequestError, reply_json, reply_text
from rlmix.engine.negotiation import reply_answer
from rlmix.engine.protocol import MIN_VERSION_HEADER
from rlmix.engine.pushes import PushEndpoints

DRAIN_LIMIT_S = 600.0
"""Longest that an update on an unpaused engine waits for the running requests."""
DRAIN_POLL_S = 0.002
HEALTH_LIMIT_S = 20.0
"""How long /health waits while paused before it answers 503, as the real server does."""
HTTP_TURNS = 3
"""Event loop turns between two steps: reading a request takes two, answering one. An idle turn
costs 10 us."""

log = logging.getLogger("rlmix.engine.embedded")


class EmbeddedServer:
    """Serves one replica."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        profile: Profile,
        numerics: NumericsKey,
        model_path: Path,
        context_length: int,
        pool: str,
        replica: str,
        seed: int,
        started_s: float,
        key: str | None = None,
    ) -> None:
        """
        Args:
            started_s: time.monotonic() at the start of the process.
            key: what every request must carry; None: nothing.
        """
        self._scheduler = scheduler
        self._profile = profile
        self._numerics = numerics
        self._model_path = str(model_path)
        self._context_length = context_length
        self._pool, self._replica = pool, replica
        self._seed = seed
        self._started_s = started_s
        self._startup_s = 0.0
        self._headers = wire.identity_headers(pool=pool, replica=replica, numerics=numerics)
        self._numbers = itertools.count()
        self._wake = asyncio.Event()
        self._updating = asyncio.Lock()
        self._pushes = PushEndpoints(self._take_pushed)
        self._http = JsonServer(self._routes(), key=key)

    def _routes(self) -> dict[tuple[str, str], Handler]:
        routes: dict[tuple[str, str], Handler] = {
            ("POST", "/generate"): self._generate,
            ("POST", "/update_weights_from_disk"): self._update_weights,
            ("POST", "/pause_generation"): self._pause,
            ("POST", "/continue_generation"): self._continue,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/weights_checker"): self._check_weights,
            ("GET", "/ping"): self._ping,
            ("GET", "/ready"): self._ready,
            ("GET", "/health"): self._health,
            ("GET", "/health_generate"): self._health,
            ("GET", "/server_info"): self._server_info,
            ("GET", "/model_info"): self._model_info,
            ("GET", "/v1/loads"): self._loads,
            ("GET", "/metrics"): self._metrics,
            **self._pushes.routes(),
        }
        for method in ("GET", "POST"):
            routes[method, "/flush_cache"] = self._flush
        return routes

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def port(self) -> int:
        return self._http.port

    async def run(
        self, *, host: str, port: int, stop: asyncio.Event, on_ready: Callable[[], None]
    ) -> None:
        """Serve until `stop` is set; calls `on_ready` once requests are accepted."""
        decoding = asyncio.create_task(self._decode())
        try:
            await self._http.start(host=host, port=port)
            self._startup_s = time.monotonic() - self._started_s
            on_ready()
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((stopping, decoding), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if decoding.done():
                decoding.result()  # Raises what ended the loop: the process must not outlive it.
        finally:
            decoding.cancel()
            self._scheduler.abort(None, message="server is stopping")
            await self._http.stop()

    async def _decode(self) -> None:
        """Step while there is work; woken by every handler that may have made some."""
        while True:
            while not self._scheduler.has_work:  # Also when woken: a request may come in a pause.
                self._wake.clear()
                await self._wake.wait()
            self._scheduler.step()
            for _ in range(HTTP_TURNS):
                await asyncio.sleep(0)

    async def _generate(self, call: Call) -> web.StreamResponse:
        scheduler = self._scheduler
        minimum = call.headers.get(MIN_VERSION_HEADER, "0")
        if not minimum.isdecimal():
            raise RequestError(400, f"{MIN_VERSION_HEADER}: {minimum!r} is not a decimal version")
        if scheduler.version < int(minimum):
            raise RequestError(409, f"version {scheduler.version} is older than {minimum}")
        body = await call.json()
        number = next(self._numbers)
        request = parse_request(
            body,
            rid=str(body.get("rid") or f"request-{number}"),
            default_seed=self._seed + number,
            vocab_size=scheduler.shape.vocab_size,
            context_length=self._context_length,
            max_total_tokens=scheduler.max_total_tokens,
            eos_ids=scheduler.shape.eos_ids,
        )
        done: asyncio.Future[Request] = asyncio.get_running_loop().create_future()
        request.done = done
        scheduler.submit(request)
        self._wake.set()
        try:
            await done
        except asyncio.CancelledError:
            scheduler.drop(request, message="the client left")
            raise
        answer = request.answer(weight_version=scheduler.version)
        return reply_answer(call, answer, headers=self._headers)

    async def _update_weights(self, call: Call) -> web.Response:
        body = await call.json()
        model_path = body.get("model_path")
        if not isinstance(model_path, str):
            raise RequestError(400, f"model_path={model_path!r}; give the view folder")
        folder = Path(model_path)
        scheduler, profile = self._scheduler, self._profile
        return await self._replace(
            lambda: load_weights(
                folder, shape=scheduler.shape, profile=profile, served=scheduler.weights.spec
            ),
            body=body,
            source=str(folder),
            folder=folder,
        )

    async def _take_pushed(
        self, received: dict[str, Tensor], *, body: dict[str, Any], source: str
    ) -> web.Response:
        scheduler, profile = self._scheduler, self._profile
        return await self._replace(
            lambda: replace_tensors(
                scheduler.weights, received, shape=scheduler.shape, profile=profile
            ),
            body=body,
            source=source,
        )

    async def _replace(
        self,
        make: Callable[[], ModelWeights],
        *,
        body: dict[str, Any],
        source: str,
        folder: Path | None = None,
    ) -> web.Response:
        """Serve other weights, made in a thread, as an update's `body` asks; `folder` is where
        they came from, None when they were pushed."""
        version = body.get("weight_version")
        if version is not None and not str(version).isdecimal():
            raise RequestError(400, f"weight_version={version!r}; give a decimal policy version")
        scheduler = self._scheduler
        async with self._updating:
            started_s = time.monotonic()
            # Who arrives from now on gets the new weights; who runs goes on while they are made.
            scheduler.is_holding = True
            try:
                weights = await asyncio.to_thread(make)
                if body.get("abort_all_requests"):
                    scheduler.abort(None)
                await self._drain()
            except WeightSyncError as error:
                log.warning("weights refused: %s", error)
                return self._update_reply(success=False, message=str(error))
            finally:
                scheduler.is_holding = False
                self._wake.set()
            num_stale = scheduler.num_running
            scheduler.replace_weights(
                weights, version=scheduler.version if version is None else int(version)
            )
            if folder is not None:
                self._model_path = str(folder)
            scheduler.stats.num_updates += 1
            scheduler.stats.update_s += time.monotonic() - started_s
            log.info("weights: version %d from %s", scheduler.version, source)
            if num_stale and body.get("flush_cache", True):
                # Shaped like the real server: the weights did change.
                return self._update_reply(
                    success=False,
                    message=f"Weights were updated, but cache was not flushed: {num_stale} "
                    "requests keep theirs (in_place); send flush_cache=false to say that this is "
                    "wanted",
                )
            return self._update_reply(success=True, message="Succeeded to update model weights.")

    def _update_reply(self, *, success: bool, message: str) -> web.Response:
        scheduler = self._scheduler
        document = wire.update_document(
            success=success,
            message=message,
            num_paused=scheduler.num_running if scheduler.is_paused else 0,
        )
        return reply_json(document, status=200 if success else 400)

    async def _drain(self) -> None:
        """Wait for the running requests, unless they are paused."""
        scheduler = self._scheduler
        try:
            async with asyncio.timeout(DRAIN_LIMIT_S):
                while scheduler.num_running and not scheduler.is_paused:
                    await asyncio.sleep(DRAIN_POLL_S)
        except TimeoutError:
            raise RequestError(
                503,
                f"{scheduler.num_running} requests still run after {DRAIN_LIMIT_S:g} s; "
                "pause generation before updating weights",
            ) from None

    async def _pause(self, call: Call) -> web.Response:
        mode = (await call.json()).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise RequestError(400, f"mode={mode!r}; allowed: {', '.join(PAUSE_MODES)}")
        self._scheduler.pause(mode)
        return reply_json({"status": "ok", "message": f"Generation paused ({mode})."})

    async def _continue(self, call: Call) -> web.Response:
        self._scheduler.resume()
        self._wake.set()
        return reply_json({"status": "ok", "message": "Generation continued."})

    async def _abort(self, call: Call) -> web.Response:
        body = await call.json()
        rid = body.get("rid")
        if not body.get("abort_all") and not rid:
            raise RequestError(400, "give rid, or abort_all=true")
        self._scheduler.abort(None if body.get("abort_all") else str(rid))
        return reply_text()

    async def _flush(self, call: Call) -> web.Response:
        scheduler = self._scheduler
        if scheduler.num_running or (scheduler.num_waiting and not scheduler.is_paused):
            raise RequestError(
                400,
                f"cache not flushed: {scheduler.num_running} requests run and "
                f"{scheduler.num_waiting} wait",
            )
        scheduler.prefixes.clear()
        return reply_text("Cache flushed.\n")

    async def _check_weights(self, call: Call) -> web.Response:
        action = (await call.json()).get("action")
        if action != "checksum":
            raise RequestError(400, f"action={action!r}; the embedded engine knows checksum")
        weights = self._scheduler.weights
        return reply_json(
            {
                "success": True,
                "message": "ok",
                "per_engine_checksum": weights.checksum,
                "ranks": [{"rank": 0, "checksum": weights.checksum}],
            }
        )

    async def _ping(self, call: Call) -> web.Response:
        return reply_text()

    async def _ready(self, call: Call) -> web.Response:
        return reply_text(status=503 if self._scheduler.is_paused else 200)

    async def _health(self, call: Call) -> web.Response:
        deadline_s = time.monotonic() + HEALTH_LIMIT_S
        while self._scheduler.is_paused:
            if time.monotonic() >= deadline_s:
                return reply_text(status=503)
            await asyncio.sleep(0.05)
        return reply_text()

    async def _server_info(self, call: Call) -> web.Response:
        scheduler = self._scheduler
        return reply_json(
            wire.server_info_document(
                model_path=self._model_path,
                weight_version=scheduler.version,
                max_total_tokens=scheduler.max_total_tokens,
                max_running=scheduler.max_running,
                context_length=self._context_length,
                pool=self._pool,
                replica=self._replica,
                numerics=self._numerics,
                startup_s=self._startup_s,
                seed=self._seed,
            )
        )

    async def _model_info(self, call: Call) -> web.Response:
        scheduler = self._scheduler
        document: dict[str, Any] = {
            "model_path": self._model_path,
            "weight_version": str(scheduler.version),
            "is_generation": True,
            "vocab_size": scheduler.shape.vocab_size,
            "context_length": self._context_length,
        }
        return reply_json(document)

    async def _loads(self, call: Call) -> web.Response:
        scheduler, stats = self._scheduler, self._scheduler.stats
        return reply_json(
            wire.loads_document(
                engine_version=self._numerics.engine_version,
                accelerator=self._numerics.accelerator,
                num_running=scheduler.num_running,
                num_waiting=scheduler.num_waiting,
                num_waiting_uncached_tokens=scheduler.num_waiting_uncached_tokens(),
                num_used_tokens=scheduler.num_used_tokens,
                num_cached_tokens=scheduler.prefixes.num_tokens,
                max_total_tokens=scheduler.max_total_tokens,
                max_running=scheduler.max_running,
                gen_throughput=stats.throughput(),
                cache_hit_frac=stats.cache_hit_frac,
                total_prefill_uncached_tokens=stats.prefill_tokens,
                total_prefill_busy_us=stats.prefill_us,
                decode_moments=stats.decode_moments,
                num_paused=scheduler.num_running if scheduler.is_paused else 0,
                num_retracted=stats.num_retracted,
                weight_bytes=scheduler.weights.num_bytes,
                kv_bytes=scheduler.cache.num_bytes,
                is_paused=scheduler.is_paused,
                weight_version=scheduler.version,
                total_generated_tokens=stats.generated_tokens,
                total_requests=stats.num_requests,
            )
        )

    async def _metrics(self, call: Call) -> web.Response:
        labels = {
            "pool": self._pool,
            "replica": self._replica,
            "accelerator": self._numerics.accelerator,
            "emulated": "true",
        }
        text = prometheus_text(
            self._scheduler, labels=labels, weight_bytes=self._scheduler.weights.num_bytes
        )
        return reply_text(text)
