"""One timed replica: a listening socket, a scheduler, and what can go wrong with it."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from rlmix.core.numerics_key import NumericsKey
from rlmix.engine import wire
from rlmix.engine.timed.cache import BLOCK_BYTES, blocks_of
from rlmix.engine.timed.http1 import Connection, Message
from rlmix.engine.timed.prompts import (
    Asked,
    chat_reply,
    generate_reply,
    output_text,
    read_chat,
    read_generate,
    whole_text,
)
from rlmix.engine.timed.scheduler import Scheduler, Work
from rlmix.engine.timed.steps import StepTimes

BACKLOG = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSpec:
    """One replica."""

    name: str
    accelerator: str
    steps: StepTimes
    max_running: int
    kv_tokens: int
    context_length: int = 262_144
    version: int = 0
    time_scale: float = 1.0
    """A second of the accelerator takes this long here; `steps` is on the accelerator's clock."""


@dataclass(slots=True)
class Tally:
    """Counted since the start; survives kills."""

    received: int = 0
    answered: int = 0
    stale: int = 0
    """Refused with 409."""
    aborted: int = 0
    left: int = 0
    """Requests whose client went away first."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(eq=False, slots=True)
class _Open:
    """A request that was received and not answered."""

    connection: Connection
    asked: Asked
    work: Work
    rid: str


class TimedReplica:
    """Serves `spec` on one port until closed."""

    def __init__(self, spec: ReplicaSpec) -> None:
        self.spec = spec
        self.port = 0
        self.version = spec.version
        self.tally = Tally()
        self.is_hung = False
        self.is_stalled = False
        self._numerics = NumericsKey(
            accelerator=spec.accelerator, weights="none", activations="none", kv="none",
            attention="none", engine="timed",
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self._listening: asyncio.Server | None = None
        self._connections: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._boot()
        self._gets: dict[str, Callable[[], tuple[int, Any]]] = {
            "/ping": lambda: (200, {}),
            "/health": lambda: (200, {}),
            "/ready": lambda: (503 if self._scheduler.is_paused else 200, {}),
            "/server_info": lambda: (200, self._info()),
            "/get_server_info": lambda: (200, self._info()),
            "/model_info": lambda: (200, self._info()),
            "/get_model_info": lambda: (200, self._info()),
            "/v1/models": lambda: (200, {"object": "list", "data": [{"id": "timed"}]}),
            "/v1/loads": lambda: (200, self._loads()),
            "/get_load": lambda: (200, self._old_load()),
        }
        self._posts: dict[str, Callable[[dict[str, Any]], tuple[int, Any]]] = {
            "/update_weights_from_disk": self._update,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/abort_request": self._abort_request,
            "/flush_cache": self._flush,
        }

    def _boot(self) -> None:
        self._scheduler = Scheduler(
            self.spec.steps.scaled(self.spec.time_scale),
            max_running=self.spec.max_running,
            kv_tokens=self.spec.kv_tokens,
        )
        self._open: dict[Work, _Open] = {}
        self._by_connection: dict[Connection, _Open] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def in_flight(self) -> int:
        return len(self._open)

    async def listen(self) -> None:
        """Open the socket; the same port again after the first time."""
        self._listening = await self._loop.create_server(
            lambda: Connection(self._handle, self._connections.add, self._closed),
            "127.0.0.1", self.port, backlog=BACKLOG,
        )  # fmt: skip
        self.port = self._listening.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Be unreachable: no socket, no connections; what was under way is given up. Returns the
        number of requests that were lost."""
        lost = self.in_flight
        if self._listening is not None:
            self._listening.close()
            self._listening = None
        self._scheduler.drop_all()
        self._open.clear()
        self._by_connection.clear()
        self._settle([])
        for connection in list(self._connections):
            connection.abort()
        return lost

    async def restart(self) -> None:
        """Come back at the same address as a new process: an empty cache, the first version."""
        self.is_hung = self.is_stalled = False
        self.version = self.spec.version
        self._boot()
        if self._listening is None:
            await self.listen()

    def hang(self) -> int:
        """Accept connections and answer nothing any more; returns the requests that this hit."""
        self.is_hung = True
        return self.stall()

    def stall(self) -> int:
        """Sample nothing any more, but answer everything else; returns the requests it hit."""
        self.is_stalled = True
        self._settle(self._scheduler.pause(time.monotonic()))
        return self.in_flight

    def set_version(self, version: int, *, flush: bool = True) -> int:
        """Serve other weights from now on; returns the requests that were under way."""
        self._settle(self._scheduler.advance(time.monotonic()))
        self._scheduler.end_version(self.version)
        self.version = version
        if flush:
            self._scheduler.cache.clear()
        return self.in_flight

    def describe(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "url": self.url, "version": self.version, "in_flight": self.in_flight,
            "is_up": self._listening is not None, "is_hung": self.is_hung,
            "is_stalled": self.is_stalled, "received": tally.received, "answered": tally.answered,
            "stale": tally.stale, "aborted": tally.aborted, "left": tally.left,
            "prompt_tokens": tally.prompt_tokens, "cached_tokens": tally.cached_tokens,
            "output_tokens": tally.output_tokens,
        }  # fmt: skip

    def _handle(self, connection: Connection, message: Message) -> None:
        if self.is_hung:
            return
        try:
            if message.method == "POST" and message.path == "/generate":
                self._submit(connection, message, read_generate(message.body))
            elif message.method == "POST" and message.path == "/v1/chat/completions":
                self._submit(connection, message, read_chat(message.body))
            elif message.path == "/metrics":
                connection.reply(200, self._metrics(), content_type="text/plain")
            elif message.method == "GET" and message.path in self._gets:
                status, document = self._gets[message.path]()
                connection.reply(status, orjson.dumps(document))
            elif message.method == "POST" and message.path in self._posts:
                body = orjson.loads(message.body) if message.body else {}
                status, document = self._posts[message.path](body)
                connection.reply(status, orjson.dumps(document))
            else:
                _refuse(connection, 404, f"{message.method} {message.path} is not served")
        except (ValueError, KeyError, TypeError) as error:
            _refuse(connection, 400, f"{type(error).__name__}: {error}")

    def _submit(self, connection: Connection, message: Message, asked: Asked) -> None:
        self.tally.received += 1
        minimum = message.header("x-min-version")
        if minimum is not None and self.version < int(minimum):
            self.tally.stale += 1
            _refuse(connection, 409, f"version {self.version} is older than {minimum}")
            return
        if asked.prompt_tokens + asked.output_tokens > self.spec.context_length:
            _refuse(connection, 400, f"{asked.prompt_tokens} tokens do not fit the context")
            return
        work = Work(
            blocks=asked.blocks,
            prompt_tokens=asked.prompt_tokens,
            output_tokens=asked.output_tokens,
            block_tokens=asked.block_tokens(BLOCK_BYTES),
        )
        rid = asked.rid or f"{self.spec.name}-{self.tally.received}"
        entry = _Open(connection, asked, work, rid)
        self._open[work] = self._by_connection[connection] = entry
        if asked.stream:
            connection.start_events(self._identity())
        self._settle(self._scheduler.submit(work, time.monotonic()))

    def _closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        entry = self._by_connection.pop(connection, None)
        if entry is not None:
            self.tally.left += 1
            del self._open[entry.work]
            self._settle(self._scheduler.cancel(entry.work, time.monotonic()))

    def _tick(self) -> None:
        self._timer = None
        self._settle(self._scheduler.advance(time.monotonic()))

    def _settle(self, done: list[Work]) -> None:
        """Answer what is finished and set the alarm for what comes next."""
        for work in done:
            entry = self._open.get(work)
            if entry is not None:
                self._answer(entry, count=entry.asked.output_tokens, finish={"type": "stop"})
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        next_s = self._scheduler.next_s()
        if next_s is not None:
            self._timer = self._loop.call_at(next_s, self._tick)

    def _answer(self, entry: _Open, *, count: int, finish: dict[str, Any]) -> None:
        asked, work, connection = entry.asked, entry.work, entry.connection
        del self._open[work]
        del self._by_connection[connection]
        output = output_text(asked)
        text = whole_text(asked, output)
        start = len(work.blocks) * BLOCK_BYTES
        work.blocks += blocks_of(
            text, state=work.blocks[-1] if work.blocks else 0, start=start
        )  # fmt: skip
        self._scheduler.remember(work)
        tally = self.tally
        tally.answered += 1
        tally.prompt_tokens += asked.prompt_tokens
        tally.cached_tokens += work.cached_tokens
        tally.output_tokens += count
        meta = {
            "id": entry.rid,
            "finish_reason": finish,
            "prompt_tokens": asked.prompt_tokens,
            "completion_tokens": count,
            "cached_tokens": work.cached_tokens,
            "weight_version": str(self.version),
            "weight_versions": self._spans(work, count),
            "e2e_latency": time.monotonic() - work.arrived_s,
            "replica": self.spec.name,
        }
        if asked.is_chat:
            reply = chat_reply(asked, output, meta, count=count, created=int(time.time()))
            body = orjson.dumps(reply)
            if asked.stream:
                _stream_chat(connection, reply)
                return
        else:
            body = generate_reply(asked, output, meta, count=count)
            if asked.stream:
                connection.send_event(body)
                connection.send_event(b"[DONE]")
                connection.end_events()
                return
        connection.reply(200, body, headers=self._identity())

    def _spans(self, work: Work, count: int) -> list[dict[str, Any]]:
        spans, start = [], 0
        for version, end in [*work.spans, (self.version, count)]:
            if min(end, count) > start:
                spans.append({"version": str(version), "start": start, "end": min(end, count)})
                start = min(end, count)
        return spans

    def _identity(self) -> str:
        return f"X-Rlmix-Replica: {self.spec.name}\r\nX-Rlmix-Pool: {self.spec.accelerator}\r\n"

    def _update(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("abort_all_requests"):
            self._abort_all()
        version = int(body.get("weight_version") or self.version)
        under_way = self.set_version(version, flush=bool(body.get("flush_cache", True)))
        return 200, wire.update_document(success=True, message="ok", num_paused=under_way)

    def _pause(self, body: dict[str, Any]) -> tuple[int, Any]:
        mode = body.get("mode", "abort")
        self._settle(self._scheduler.pause(time.monotonic()))
        if mode == "abort":
            self._abort_all()
        elif mode == "retract":
            self._scheduler.retract()
        elif mode != "in_place":
            return 400, {"error": {"message": f"mode {mode!r}: use abort, retract or in_place"}}
        return 200, {"status": "ok", "message": f"Generation paused ({mode})."}

    def _continue(self, body: dict[str, Any]) -> tuple[int, Any]:
        del body
        if not self.is_stalled:
            self._scheduler.resume(time.monotonic())
            self._settle([])
        return 200, {"status": "ok", "message": "Generation continued."}

    def _abort_request(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("abort_all"):
            self._abort_all()
        else:
            for entry in [e for e in self._open.values() if e.rid == body.get("rid")]:
                self._abort(entry)
        return 200, {}

    def _abort_all(self) -> None:
        for entry in list(self._open.values()):
            self._abort(entry)

    def _abort(self, entry: _Open) -> None:
        now_s = time.monotonic()
        is_running = entry.work not in self._scheduler.waiting
        count = self._scheduler.sampled(entry.work) if is_running else entry.work.sampled_before
        self.tally.aborted += 1
        self._settle(self._scheduler.cancel(entry.work, now_s))
        if entry.work in self._open:
            finish = {"type": "abort", "message": "Aborted"}
            self._answer(entry, count=min(count, entry.asked.output_tokens), finish=finish)

    def _flush(self, body: dict[str, Any]) -> tuple[int, Any]:
        del body
        self._scheduler.cache.clear()
        return 200, {"message": "Cache flushed."}

    def _info(self) -> dict[str, Any]:
        spec = self.spec
        return wire.server_info_document(
            model_path="timed", weight_version=self.version, max_total_tokens=spec.kv_tokens,
            max_running=spec.max_running, context_length=spec.context_length,
            pool=spec.accelerator, replica=spec.name, numerics=self._numerics, startup_s=0.0,
            seed=0,
        )  # fmt: skip

    def _loads(self) -> dict[str, Any]:
        self._settle(self._scheduler.advance(time.monotonic()))
        scheduler, tally = self._scheduler, self.tally
        return wire.loads_document(
            engine_version=self._numerics.engine_version, accelerator=self.spec.accelerator,
            num_running=scheduler.num_running, num_waiting=len(scheduler.waiting),
            num_waiting_uncached_tokens=scheduler.waiting_uncached(),
            num_used_tokens=scheduler.used_tokens,
            num_cached_tokens=int(scheduler.cache.held_tokens),
            max_total_tokens=self.spec.kv_tokens, max_running=self.spec.max_running,
            gen_throughput=scheduler.tokens_per_s,
            cache_hit_frac=tally.cached_tokens / max(1, tally.prompt_tokens),
            total_prefill_uncached_tokens=scheduler.prefilled_tokens,
            total_prefill_busy_us=int(scheduler.prefill_us), decode_moments=scheduler.moments,
            num_paused=scheduler.num_running if scheduler.is_paused else 0, num_retracted=0,
            weight_bytes=0, kv_bytes=0,
            is_paused=scheduler.is_paused and not self.is_stalled, weight_version=self.version,
            total_generated_tokens=int(scheduler.generated_tokens),
            total_requests=tally.answered,
        )  # fmt: skip

    def _old_load(self) -> list[dict[str, int]]:
        """What SGLang answered before 0.5.23 dropped the endpoint; some routers still ask."""
        self._settle(self._scheduler.advance(time.monotonic()))
        waiting = len(self._scheduler.waiting)
        return [
            {
                "dp_rank": 0,
                "num_reqs": self._scheduler.num_running + waiting,
                "num_waiting_reqs": waiting,
                "num_tokens": self._scheduler.used_tokens
                + sum(work.prompt_tokens for work in self._scheduler.waiting),
            }
        ]

    def _metrics(self) -> bytes:
        values = {
            "num_running_reqs": self._scheduler.num_running,
            "num_queue_reqs": len(self._scheduler.waiting),
            "token_usage": self._scheduler.used_tokens / self.spec.kv_tokens,
            "gen_throughput": self._scheduler.tokens_per_s,
            "prompt_tokens_total": self.tally.prompt_tokens,
            "cached_tokens_total": self.tally.cached_tokens,
            "generation_tokens_total": self.tally.output_tokens,
            "num_requests_total": self.tally.answered,
        }
        return "".join(f"sglang:{name} {value:g}\n" for name, value in values.items()).encode()


def _refuse(connection: Connection, status: int, message: str) -> None:
    document = {"error": {"message": message, "code": status}}
    headers = "Retry-After: 1\r\n" if status in (409, 503) else ""
    connection.reply(status, orjson.dumps(document), headers=headers)


def _stream_chat(connection: Connection, reply: dict[str, Any]) -> None:
    """The whole answer as one delta, then the end, in OpenAI's chunks."""
    chunk = {**reply, "object": "chat.completion.chunk"}
    message = reply["choices"][0]["message"]
    first = {"index": 0, "delta": message, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    usage = chunk.pop("usage")
    connection.send_event(orjson.dumps({**chunk, "choices": [first]}))
    connection.send_event(orjson.dumps({**chunk, "choices": [last], "usage": usage}))
    connection.send_event(b"[DONE]")
    connection.end_events()
