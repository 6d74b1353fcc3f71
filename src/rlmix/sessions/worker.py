"""A task worker: one process's share of the sessions, with everything they need.

Invariant: `run` hands back exactly one trajectory per spec, and `close` leaves no session, sandbox
or connection behind.
"""

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rlmix.core.trajectory import Trajectory
from rlmix.engine.client import EngineClient
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxBackend, SandboxLimits
from rlmix.sessions.agent import run_session
from rlmix.sessions.spec import Engine, Renderer, SessionSpec
from rlmix.tasks.rule import Verdict
from rlmix.tasks.source import TaskSource, open_source
from rlmix.tasks.verdict import Baselines, judge


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """How one worker is set up; the same for all workers of a run."""

    run_id: str
    router_url: str
    router_token: str | None = field(default=None, repr=False)
    engine_timeout_s: float
    """Longest wait for one model turn."""
    model_dir: str
    """Folder of the policy's tokenizer and chat template."""
    sandbox_backend: str
    sandbox_limits: SandboxLimits
    scratch_dir: str
    allow_unisolated: bool
    allow_weak: bool = False
    """`auto` may take weak isolation where namespaces are forbidden."""
    sandbox_image: str | None = None
    sandbox_servers: tuple[str, ...] = ()
    has_images: bool = False
    """Tasks come with images of their own."""
    num_verdicts: int
    """Verdicts at once; they are pure CPU, so about the number of cores."""
    verdict_timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerInfo:
    """What a worker runs its commands in."""

    sandbox_backend: str
    is_isolated: bool
    warnings: tuple[str, ...]


class TaskWorker:
    """Runs sessions; meant as an asynchronous actor, one per process."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec
        self._opening = asyncio.Lock()
        self._backend: SandboxBackend | None = None
        self._engine: Engine | None = None
        self._renderer: Renderer | None = None
        self._sources: dict[tuple[str, str, int, str | None], TaskSource] = {}
        self._verdicts = asyncio.Semaphore(spec.num_verdicts)
        self._baselines: Baselines = {}
        self._running: set[asyncio.Task[object]] = set()
        self._is_closing = False

    async def open(self) -> WorkerInfo:
        """Open the sandbox backend and load the tokenizer. Done once; `run` does it if need be.

        Raises:
            SandboxError: sandboxes do not work here; the message says the fix.
        """
        async with self._opening:
            if self._backend is None:
                from rlmix.model.chat import ChatRenderer

                spec = self._spec
                self._renderer = ChatRenderer(spec.model_dir)
                self._engine = EngineClient(
                    spec.router_url, token=spec.router_token, timeout_s=spec.engine_timeout_s
                )
                self._backend = await open_backend(
                    spec.sandbox_backend,
                    spec.sandbox_limits,
                    Path(spec.scratch_dir),
                    spec.run_id,
                    image=spec.sandbox_image,
                    has_images=spec.has_images,
                    servers=spec.sandbox_servers,
                    allow_weak=spec.allow_weak,
                    allow_unisolated=spec.allow_unisolated,
                )
        return WorkerInfo(
            sandbox_backend=self._backend.name,
            is_isolated=self._backend.is_isolated,
            warnings=self._backend.warnings,
        )

    async def run(self, spec: SessionSpec) -> Trajectory:
        """Run one session to its end."""
        await self.open()
        assert self._backend is not None
        assert self._engine is not None
        assert self._renderer is not None
        source = self._source(spec)
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            return await run_session(
                spec,
                public=source.public(spec.task_id),
                engine=self._engine,
                backend=self._backend,
                renderer=self._renderer,
                judge=partial(self._judge, source, spec.task_id),
                is_closing=lambda: self._is_closing,
            )
        finally:
            self._running.discard(task)

    def _source(self, spec: SessionSpec) -> TaskSource:
        key = (spec.source, spec.split, spec.source_seed, spec.source_path)
        if key not in self._sources:
            self._sources[key] = open_source(
                spec.source, split=spec.split, seed=spec.source_seed, path=spec.source_path
            )
        return self._sources[key]

    async def _judge(self, source: TaskSource, task_id: str, diff: bytes) -> Verdict:
        assert self._backend is not None
        public = source.public(task_id)
        async with self._verdicts:
            return await judge(
                public,
                source.hidden(task_id),
                diff,
                self._backend,
                timeout_s=public.verify_s or self._spec.verdict_timeout_s,
                baselines=self._baselines,
            )

    async def close(self) -> None:
        """End running sessions as cancelled, then every sandbox and connection."""
        self._is_closing = True
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if isinstance(self._engine, EngineClient):
            await self._engine.close()
        if self._backend is not None:
            await self._backend.close()
