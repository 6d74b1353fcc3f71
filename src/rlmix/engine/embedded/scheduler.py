"""Continuous batching: which requests share the next forward, and what becomes of its logits.

Synchronous and single-threaded: the server calls `step` while there is work, everything else
between two steps. Invariant: running requests lie in slots 0..n-1, those that decode before those
whose prompt is still being computed; a request finishes exactly once.
"""

import time
from collections import deque

import numpy as np
import torch

from rlmix.engine.embedded.attention import Chunk
from rlmix.engine.embedded.exact import ONE_PROCESS, ExactForward
from rlmix.engine.embedded.forward import Forward, Step
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.prefix import PrefixCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import Request
from rlmix.engine.embedded.routes import RouteCache
from rlmix.engine.embedded.sampler import Sampler
from rlmix.engine.embedded.shape import ModelShape
from rlmix.engine.embedded.stats import EngineStats
from rlmix.engine.embedded.weights import ModelWeights
from rlmix.numerics.consistent.shard import Layout

PREFILL_TOKENS = 512
"""Prompt tokens in one step at most, so that a long prompt does not stop the decoding requests."""

SHARED_PREFIX_TOKENS = 16
"""A request waits a step when a prompt that is being computed right now shares at least so many
tokens that the cache does not have yet: siblings of a group then compute their prompt once."""

PAUSE_MODES = ("abort", "retract", "in_place")


class Scheduler:
    """Owns the running batch, the queue, the KV cache and the weights."""

    def __init__(
        self,
        shape: ModelShape,
        profile: Profile,
        weights: ModelWeights,
        *,
        version: int,
        max_running: int,
        context_length: int,
        max_total_tokens: int,
        mask_cap: int,
        records_routes: bool = False,
        layout: Layout = ONE_PROCESS,
        niceness: int = 0,
    ) -> None:
        """
        Args:
            records_routes: remember the experts of every position, for requests that ask.
            layout: processes that share an exact model.
            niceness: added to the priority number of those processes.
        """
        self.shape = shape
        self.weights = weights
        self.version = version
        self.max_running = max_running
        self.max_total_tokens = max_total_tokens
        self.exact: ExactForward | None = None
        """Owns the processes of an exact model."""
        self.cache: KvCache
        if profile.is_exact:
            self.exact = ExactForward(
                shape,
                profile,
                weights,
                num_slots=max_running,
                context_length=context_length,
                layout=layout,
                niceness=niceness,
            )
            self.cache = self.exact.cache
        else:
            self.cache = KvCache(shape, num_slots=max_running, context_length=context_length)
        dtype = torch.float32 if profile.kv == "fp32" else torch.bfloat16
        self._routes: RouteCache | None = None
        if records_routes:
            self._routes = RouteCache(shape, num_slots=max_running, capacity=self.cache.capacity)
        self.prefixes = PrefixCache(self.cache, dtype=dtype, routes=self._routes)
        self.stats = EngineStats()
        self.is_paused = False
        self.is_holding = False
        """True while an update waits for the running requests: nobody new is admitted."""
        self._forward: Forward | ExactForward
        if self.exact is not None:
            self.exact.routes = self._routes
            self._forward = self.exact
        else:
            self._forward = Forward(shape, profile, self.cache, routes=self._routes)
        self._sampler = Sampler(mask_cap=mask_cap, is_exact=profile.is_exact)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._num_decoding = 0
        self._committed_tokens = 0

    def close(self) -> None:
        """End the processes that share the model."""
        if self.exact is not None:
            self.exact.model.close()

    @property
    def has_work(self) -> bool:
        if self.is_paused:
            return False
        return bool(self._running or (self._waiting and not self.is_holding))

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_used_tokens(self) -> int:
        """Tokens whose keys and values running requests hold."""
        return sum(request.num_computed for request in self._running)

    def num_waiting_uncached_tokens(self) -> int:
        return sum(
            request.length - self.prefixes.match(request.ids(0, request.length), salt=request.salt)
            for request in self._waiting
        )

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def abort(self, rid: str | None, *, message: str = "Aborted") -> None:
        """End the requests of one id, or all with None; an unknown id is nobody's fault."""
        for request in [*self._waiting, *self._running]:
            if rid is None or request.rid == rid:
                self.drop(request, message=message)

    def drop(self, request: Request, *, message: str) -> None:
        """End one request now, wherever it is; nothing happens when it has ended."""
        if request in self._waiting:
            self._waiting.remove(request)
            message = "Abort in waiting queue"
        elif request in self._running:
            self._leave(request)
        else:
            return
        self._finish(request, {"type": "abort", "message": message})

    def pause(self, mode: str) -> None:
        """Stop stepping. `abort` ends all requests, `retract` sends the running ones back to the
        queue without their keys and values, `in_place` keeps everything."""
        if mode == "abort":
            self.abort(None)
        elif mode == "retract":
            for slot, request in reversed(list(enumerate(self._running))):
                self._take_routes(request, slot)
                request.num_computed = 0
                request.num_retractions += 1
                self._waiting.appendleft(request)
            self.stats.num_retracted += len(self._running)
            self._running.clear()
            self._num_decoding = self._committed_tokens = 0
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    def replace_weights(self, weights: ModelWeights, *, version: int) -> None:
        """Serve other weights from the next step on. No prefix survives; the keys and values of
        requests that are still in their slots do (`in_place`)."""
        self.weights = weights
        self.version = version
        self.prefixes.clear()

    def step(self) -> None:
        """One forward over everything that can advance."""
        started_s = time.perf_counter()
        self._admit()
        if not self._running:
            return
        step, ending = self._plan_step()
        logits_RV = self._forward.logits(self.weights, step)
        for chunk in step.chunks:
            self._running[chunk.slot].num_computed += chunk.num_tokens
        for request in self._running[: self._num_decoding]:
            request.num_computed += 1
        sampled = self._running[: self._num_decoding + ending]
        self._num_decoding += ending
        if sampled:
            self._sampler.sample(sampled, logits_RV, version=self.version)
            for slot, request in enumerate(sampled):
                if request.is_broken:
                    self.cache.clear(slot, num_tokens=request.num_computed)
                elif slot >= step.num_decoding:
                    self._remember(request, slot)
            self._collect(sampled)
        self.stats.add_step(
            num_decoding=step.num_decoding,
            num_prefill=len(step.token_ids_T) - step.num_decoding,
            num_sampled=len(sampled),
            us=round((time.perf_counter() - started_s) * 1e6),
        )

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running and not self.is_holding:
            request = self._waiting[0]
            if self._committed_tokens + request.max_length > self.max_total_tokens:
                return
            ids = request.ids(0, request.length)
            if self._shares_running_prompt(request, ids):
                return
            self._waiting.popleft()
            cached = self.prefixes.load(len(self._running), ids, salt=request.salt)
            request.num_computed = cached
            request.kv_version = self.version
            if request.num_retractions == 0:
                request.num_cached = cached
                self.stats.prompt_tokens += len(request.prompt)
                self.stats.cached_tokens += cached
            self._running.append(request)
            self._committed_tokens += request.max_length
            self.prefixes.shrink(self.max_total_tokens - self._committed_tokens)

    def _shares_running_prompt(self, request: Request, ids: np.ndarray) -> bool:
        prefilling = self._running[self._num_decoding :]
        if not prefilling:
            return False
        cached = self.prefixes.match(ids, salt=request.salt)
        for other in prefilling:
            shorter = min(other.length, len(ids) - 1)
            differ = other.ids(0, shorter) != ids[:shorter]
            common = int(differ.argmax()) if differ.any() else shorter
            if other.salt == request.salt and common >= cached + SHARED_PREFIX_TOKENS:
                return True
        return False

    def _plan_step(self) -> tuple[Step, int]:
        """The next step and how many prompts end in it."""
        decoding = self._running[: self._num_decoding]
        token_ids = [np.array([request.output_ids[-1] for request in decoding], dtype=np.int64)]
        positions = [np.array([request.num_computed for request in decoding], dtype=np.int64)]
        chunks: list[Chunk] = []
        budget = PREFILL_TOKENS
        for offset, request in enumerate(self._running[self._num_decoding :]):
            if budget == 0:
                break
            start = request.num_computed
            count = min(budget, request.length - start)
            budget -= count
            token_ids.append(request.ids(start, start + count))
            positions.append(np.arange(start, start + count))
            is_last = start + count == request.length
            chunks.append(
                Chunk(
                    slot=self._num_decoding + offset,
                    start=start,
                    num_tokens=count,
                    needs_logits=is_last,
                )
            )
        step = Step(
            token_ids_T=torch.from_numpy(np.concatenate(token_ids)),
            positions_T=torch.from_numpy(np.concatenate(positions)),
            num_decoding=len(decoding),
            longest_decoding=int(positions[0].max()) + 1 if decoding else 0,
            chunks=tuple(chunks),
        )
        return step, sum(chunk.needs_logits for chunk in chunks)

    def _collect(self, sampled: list[Request]) -> None:
        """Let finished requests go."""
        now_s = time.monotonic()
        for request in sampled:
            if len(request.output_ids) == 1:
                request.first_token_s = now_s
        for request in [r for r in sampled if r.finish_reason is not None]:
            assert request.finish_reason is not None
            slot = self._running.index(request)
            self._remember(request, slot)
            self._leave(request)
            self._finish(request, request.finish_reason)

    def _remember(self, request: Request, slot: int) -> None:
        """Keep a request's keys and values for whoever continues its context. Those that other
        weights computed are of no use, nor are those that gave NaN."""
        if request.kv_version == self.version and not request.is_broken:
            ids = request.ids(0, request.num_computed)
            self.prefixes.store(slot, ids, salt=request.salt)
            self.prefixes.shrink(self.max_total_tokens - self._committed_tokens)

    def _leave(self, request: Request) -> None:
        """Take a request out of its slot and close the gap: the last decoding request moves into
        it, and the last prompt into that one's place."""
        slot = self._running.index(request)
        self._take_routes(request, slot)
        self._committed_tokens -= request.max_length
        if slot < self._num_decoding:
            self._num_decoding -= 1
            self._move(self._num_decoding, slot)
            slot = self._num_decoding
        self._move(len(self._running) - 1, slot)
        self._running.pop()

    def _take_routes(self, request: Request, slot: int) -> None:
        """Give a request that leaves its slot the routes of what it has computed there.

        Those it took along from an earlier slot stay as they are: each position keeps the route
        that it had when the token after it was sampled, not that of a later recomputation. While a
        prompt is not complete nothing was sampled, and a recomputation replaces all of it.
        """
        if self._routes is None or request.routes_start is None:
            return
        if request.output_ids:
            start = 0 if request.routes is None else len(request.routes)
            more = self._routes.read(slot, start, max(start, request.num_computed))
            request.routes = more if request.routes is None else request.routes.followed_by(more)

    def _move(self, source: int, target: int) -> None:
        if source != target:
            request = self._running[source]
            self.cache.move(source, target, num_tokens=request.num_computed)
            if self._routes is not None:
                self._routes.move(source, target, num_tokens=request.num_computed)
            self._running[target] = request

    def _finish(self, request: Request, reason: dict[str, object]) -> None:
        request.finish_reason = reason
        request.finished_s = time.monotonic()
        self.stats.num_requests += 1
        self.stats.num_aborted += reason["type"] == "abort"
        self.stats.latency_s += request.finished_s - request.arrived_s
        if request.first_token_s:
            self.stats.first_token_s += request.first_token_s - request.arrived_s
        if request.done is not None and not request.done.done():
            request.done.set_result(request)
