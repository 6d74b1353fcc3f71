"""Several processes that serve one model together, with the bits of one process.

The leader is the engine server; it holds rank 0 and starts the others as child processes. Before
every step it sends them the step's plan (ids, positions, slots); then all run the same layers,
each with its heads or experts, and exchange partial sums with gloo on the loopback interface. The
leader alone knows requests, prefixes, logits and sampling. What it does to the key/value cache it
has the others do as well.

How an engine uses it (with one rank it costs nothing, so there is only this path):

    plan = RankPlan(layout=Layout(tensor=2, experts=1), shape=shape, spec=spec, tiling=CPU_TILING,
                    num_slots=max_running, context_length=context_length, niceness=NICENESS)
    model = RankedModel.start(plan, tensors)      # in the main thread, before the event loop
    scheduler.cache = model.cache                 # a KvCache; prefixes read and write through it
    hidden = model.hidden(RowsOfStep(...))        # in place of run_layers; see there for `route`
    logits = head_logits(hidden[wanted], model.head)
    model.load(new_tensors)                       # between two steps: a weight update
    watching = asyncio.create_task(model.watch()) # raises EngineError when a worker ends
    model.close()                                 # at the end, in a `finally`

`hidden`, `load` and the cache raise EngineError when a worker is gone; the engine must end then.

Invariants: commands go to all workers in one order, and a worker reads the next one only when it
has done the last; no worker outlives the leader, however that ends (the kernel kills it, and the
end of its pipe or of an exchange ends it too); workers ignore SIGINT and SIGTERM, since the leader
ends them.
"""

# T rows of a step, H hidden, L layers, D head dim

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlmix.core.errors import EngineError
from rlmix.engine.arguments import die_with_parent
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.shape import ModelShape
from rlmix.numerics.consistent.contract import TREE_LEAVES, Tiling
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors, Ranks, Route, run_layers
from rlmix.numerics.consistent.pointwise import rope_table
from rlmix.numerics.consistent.serving import (
    CacheAttention,
    PromptChunk,
    for_decoding,
    plan_step,
)
from rlmix.numerics.consistent.shard import (
    LOOPBACK,
    Layout,
    gloo_group,
    kv_heads_of,
    named_tensors,
    ranks_of,
    shard_spec,
    shard_tensors,
    tensors_from_names,
)

START_LIMIT_S = 180.0
"""Importing torch takes seconds, on a machine that is busy with other replicas many."""
EXCHANGE_LIMIT_S = 120.0
"""A worker that lets the others wait so long is taken for dead."""
STOP_LIMIT_S = 20.0
"""A worker needs milliseconds, unless the machine is busy."""

WORKER = "import sys; from rlmix.engine.embedded.ranks import work; work(*map(int, sys.argv[1:]))"


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlan:
    """What every rank must know before the first step."""

    layout: Layout
    shape: ModelShape
    spec: ModelSpec
    """Both of the whole model."""
    tiling: Tiling
    num_slots: int
    context_length: int
    niceness: int
    """Added to the workers' priority number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsOfStep:
    """Rows of one forward: decoding requests in slots 0..num_decoding-1, then the chunks'
    tokens."""

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    """int64 [T] each."""
    num_decoding: int
    chunks: tuple[PromptChunk, ...]


class _Rank:
    """One rank's share of the model and of the cache."""

    def __init__(self, plan: RankPlan, ranks: Ranks) -> None:
        self.plan, self.ranks = plan, ranks
        self.spec = shard_spec(plan.spec, plan.layout)
        shape = replace(
            plan.shape, num_heads=self.spec.num_heads, num_kv_heads=self.spec.num_kv_heads
        )
        length = plan.tiling.padded(plan.context_length)
        self.cache = KvCache(shape, num_slots=plan.num_slots, context_length=length)
        self.table = rope_table(
            self.cache.capacity, head_dim=plan.spec.head_dim, theta=plan.shape.rope_theta
        )
        self.tensors: ModelTensors | None = None

    def hold(self, tensors: ModelTensors) -> None:
        self.tensors = for_decoding(tensors, leaves=TREE_LEAVES // self.plan.layout.tensor)

    def hidden(self, rows: RowsOfStep, route: Route | None) -> Tensor:
        assert self.tensors is not None
        positions_T, slots_T = torch.from_numpy(rows.positions_T), torch.from_numpy(rows.slots_T)
        step = plan_step(
            positions_T,
            num_decoding=rows.num_decoding,
            chunks=rows.chunks,
            groups=self.spec.num_heads // self.spec.num_kv_heads,
            tiling=self.plan.tiling,
        )
        index = self.cache.write_index(slots_T, positions_T)
        attention = CacheAttention(self.cache.values, step, index, round_to=self.spec.round_to)
        return run_layers(
            self.tensors,
            self.spec,
            torch.from_numpy(rows.token_ids_T),
            self.table.index_select(1, positions_T),
            attention,
            ranks=self.ranks,
            route=route,
        )


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    pipe: Connection


class RankedCache(KvCache):
    """The leader's cache, of its own heads. Reading gives all heads of the model, fetched from the
    ranks that hold them; writing, moving and clearing happen on every rank."""

    def __init__(self, cache: KvCache, model: "RankedModel") -> None:
        self.__dict__.update(cache.__dict__)  # The same tensors, not a second cache.
        self._model = model
        layout, spec = model.plan.layout, model.plan.spec
        self._heads = [kv_heads_of(spec, layout, rank) for rank in range(layout.world)]
        owners: dict[int, int] = {}
        for rank in layout.tensor_ranks(0):
            for head in self._heads[rank]:
                owners.setdefault(head, rank)
        self._owners = sorted(set(owners.values()))
        self._num_heads = spec.num_kv_heads

    def move(self, source: int, target: int, *, num_tokens: int) -> None:
        self._model.tell("move", source, target, num_tokens)
        super().move(source, target, num_tokens=num_tokens)

    def clear(self, slot: int, *, num_tokens: int) -> None:
        self._model.tell("clear", slot, num_tokens)
        super().clear(slot, num_tokens=num_tokens)

    def read(self, slot: int, start: int, end: int, *, dtype: torch.dtype) -> Tensor:
        own = super().read(slot, start, end, dtype=dtype)
        if len(self._owners) == 1:
            return own
        layers, _, _, tokens, dim = own.shape
        whole = torch.empty((layers, 2, self._num_heads, tokens, dim), dtype=dtype)
        if tokens:
            self._model.tell("read", slot, start, end, dtype, tuple(self._owners))
        for rank in self._owners:
            heads = self._heads[rank]
            part = own if rank == 0 else torch.empty_like(own)
            if rank and tokens:
                self._model.exchange("recv", part, rank)
            whole[:, :, heads.start : heads.stop] = part
        return whole

    def write(self, slot: int, start: int, values: Tensor) -> None:
        heads = self._heads[0]
        if values.shape[3]:
            self._model.tell("write", slot, start, values.shape[3], values.dtype)
            for rank in range(1, len(self._heads)):
                theirs = self._heads[rank]
                part = values[:, :, theirs.start : theirs.stop].contiguous()
                self._model.exchange("send", part, rank)
        super().write(slot, start, values[:, :, heads.start : heads.stop])

    @property
    def num_bytes(self) -> int:
        return super().num_bytes * len(self._heads)


class RankedModel:
    """The leader's side; see the module."""

    def __init__(self, plan: RankPlan, workers: list[_Worker], ranks: Ranks, world: Any) -> None:
        self.plan = plan
        self._workers, self._world = workers, world
        self._rank = _Rank(plan, ranks)
        self.cache: KvCache = RankedCache(self._rank.cache, self) if workers else self._rank.cache

    @classmethod
    def start(cls, plan: RankPlan, tensors: ModelTensors) -> "RankedModel":
        """Start the workers, give everybody his tensors, and return when all have them.

        Must be called in the main thread: the kernel ends a worker with the thread that made it.
        Raises:
            ValueError: the layout does not fit the model, see `check_layout`.
            EngineError: a worker did not start.
        """
        import torch.distributed as dist

        shard_tensors(tensors, plan.spec, plan.layout, rank=0)  # Raises before anything starts.
        if threading.current_thread() is not threading.main_thread():
            raise EngineError("engine: ranks must be started in the main thread")
        num_workers = plan.layout.world - 1
        workers: list[_Worker] = []
        try:
            store = None
            if num_workers:
                store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
                workers += [_spawn() for _ in range(num_workers)]
                for rank, worker in enumerate(workers, start=1):
                    _greet(worker, rank)
                    worker.pipe.send((plan, rank, store.port))
            ranks, world = _groups(plan, 0, store)
            model = cls(plan, workers, ranks, world)
            model.load(tensors)
        except BaseException:
            _end(workers, grace_s=0.0)
            raise
        return model

    @property
    def head(self) -> Tensor:
        assert self._rank.tensors is not None
        return self._rank.tensors.head

    @torch.inference_mode()
    def hidden(self, rows: RowsOfStep, *, route: Route | None = None) -> Tensor:
        """Final hidden states of all rows, float32 [T, H].

        Args:
            route: sees the leader's router logits; it must choose as `own_route` does, which the
                workers use, and may record.
        Raises:
            EngineError: a worker ended, or let the others wait for EXCHANGE_LIMIT_S.
        """
        self.tell("step", rows)
        with self._naming_the_dead():
            return self._rank.hidden(rows, route)

    def load(self, tensors: ModelTensors) -> None:
        """Give every rank its part of other weights; the caches stay as they are."""
        plan = self.plan
        for rank in range(1, plan.layout.world):
            part = named_tensors(shard_tensors(tensors, plan.spec, plan.layout, rank=rank))
            shapes = {name: tuple(tensor.shape) for name, tensor in part.items()}
            self.tell("load", shapes, only=rank)
            for tensor in part.values():
                self.exchange("send", tensor.contiguous(), rank)
        self._rank.hold(shard_tensors(tensors, plan.spec, plan.layout, rank=0))

    def tell(self, command: str, *arguments: object, only: int | None = None) -> None:
        """Have every worker, or one, do something after what it was told before."""
        with self._naming_the_dead():
            for rank, worker in enumerate(self._workers, start=1):
                if only is None or rank == only:
                    worker.pipe.send((command, arguments))

    def exchange(self, direction: str, tensor: Tensor, rank: int) -> None:
        """`send` a contiguous tensor to a worker, or `recv` one from it."""
        with self._naming_the_dead():
            _exchange(self._world, direction, tensor, rank)

    async def watch(self) -> None:
        """Wait until a worker ends, for ever if none does.

        Raises:
            EngineError: which one, and how it ended.
        """
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        handles = [os.pidfd_open(worker.process.pid) for worker in self._workers]
        try:
            for handle in handles:
                loop.add_reader(handle, ended.set)
            await ended.wait()
        finally:
            for handle in handles:
                loop.remove_reader(handle)
                os.close(handle)
        raise EngineError(self._obituary("ended"))

    def close(self) -> None:
        """End the workers; returns when they are gone."""
        _end(self._workers, grace_s=STOP_LIMIT_S)

    @contextlib.contextmanager
    def _naming_the_dead(self) -> Iterator[None]:
        if not self._workers:
            yield
            return
        try:
            yield
        except (RuntimeError, OSError) as error:  # gloo raises the one, pipes the other.
            raise EngineError(self._obituary(str(error).splitlines()[0][:200])) from error

    def _obituary(self, reason: str) -> str:
        deadline_s = time.monotonic() + 2.0  # A connection breaks before the process is gone.
        while time.monotonic() < deadline_s:
            for rank, worker in enumerate(self._workers, start=1):
                code = worker.process.poll()
                if code is not None:
                    return (
                        f"engine: rank {rank} of {self.plan.layout.world} (pid "
                        f"{worker.process.pid}) ended with {_ending(code)}; the replica cannot go "
                        "on, its log holds what the rank said last"
                    )
            time.sleep(0.02)
        return (
            f"engine: an exchange with the other {len(self._workers)} ranks failed: {reason}; "
            "the replica cannot go on"
        )


def _ending(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def _groups(plan: RankPlan, rank: int, store: Any) -> tuple[Ranks, Any]:
    """The rank's groups for sums, and the group of all for sending."""
    everybody = list(range(plan.layout.world))
    world = gloo_group(store, "world", everybody, rank, timeout_s=EXCHANGE_LIMIT_S)
    ranks = ranks_of(
        plan.layout,
        rank,
        num_experts=plan.shape.num_experts,
        store=store,
        timeout_s=EXCHANGE_LIMIT_S,
    )
    return ranks, world


def _exchange(world: Any, direction: str, tensor: Tensor, rank: int) -> None:
    # As bytes: gloo does not know every dtype.
    bits = tensor.detach().reshape(-1).view(torch.uint8)
    getattr(world, direction)([bits], rank, 0).wait()


def _spawn() -> _Worker:
    ours, theirs = Pipe()
    with theirs:
        fd = theirs.fileno()
        command = [sys.executable, "-c", WORKER, str(fd), str(os.getpid())]
        process = subprocess.Popen(command, pass_fds=[fd], stdin=subprocess.DEVNULL)
    return _Worker(process, ours)


def _greet(worker: _Worker, rank: int) -> None:
    with contextlib.suppress(EOFError, ConnectionResetError):
        if worker.pipe.poll(START_LIMIT_S):
            worker.pipe.recv()
            return
    raise EngineError(
        f"engine: rank {rank} did not start within {START_LIMIT_S:g} s (exit code "
        f"{worker.process.poll()}); the replica's log holds what it said"
    )


def _end(workers: list[_Worker], *, grace_s: float) -> None:
    for worker in workers:
        worker.pipe.close()
    deadline_s = time.monotonic() + grace_s
    for worker in workers:
        try:
            worker.process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


class _Commands:
    """What a worker can be told; one method a command."""

    def __init__(self, rank: int, part: _Rank, world: Any) -> None:
        self._number, self._rank, self._world = rank, part, world

    def step(self, rows: RowsOfStep) -> None:
        self._rank.hidden(rows, None)

    def load(self, shapes: dict[str, tuple[int, ...]]) -> None:
        found = {name: torch.empty(shape) for name, shape in shapes.items()}
        for tensor in found.values():
            _exchange(self._world, "recv", tensor, 0)
        self._rank.hold(tensors_from_names(found))

    def move(self, source: int, target: int, num_tokens: int) -> None:
        self._rank.cache.move(source, target, num_tokens=num_tokens)

    def clear(self, slot: int, num_tokens: int) -> None:
        self._rank.cache.clear(slot, num_tokens=num_tokens)

    def read(
        self, slot: int, start: int, end: int, dtype: torch.dtype, owners: tuple[int, ...]
    ) -> None:
        if self._number in owners:
            values = self._rank.cache.read(slot, start, end, dtype=dtype)
            _exchange(self._world, "send", values.contiguous(), 0)

    def write(self, slot: int, start: int, num_tokens: int, dtype: torch.dtype) -> None:
        layers, _, _, heads, _, dim = self._rank.cache.values.shape
        values = torch.empty((layers, 2, heads, num_tokens, dim), dtype=dtype)
        _exchange(self._world, "recv", values, 0)
        self._rank.cache.write(slot, start, values)


def work(pipe_fd: int, parent_pid: int) -> None:
    """A worker's life: do what the leader says until its pipe ends."""
    die_with_parent(parent_pid)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    torch.set_num_threads(1)
    pipe = Connection(pipe_fd)
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        _obey(pipe)
    # Without the farewells of torch and gloo, which take seconds on a busy machine.
    os._exit(0)


def _obey(pipe: Connection) -> None:
    """Until the pipe ends, which raises EOFError."""
    import torch.distributed as dist

    with torch.inference_mode():
        plan, rank, port = pipe.recv()
        os.nice(plan.niceness)
        store = dist.TCPStore(LOOPBACK, port, is_master=False)
        ranks, world = _groups(plan, rank, store)
        commands = _Commands(rank, _Rank(plan, ranks), world)
        while True:
            command, arguments = pipe.recv()
            getattr(commands, command)(*arguments)
