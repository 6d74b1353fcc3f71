"""Everything that runs beside the driver: brought up in order, taken down in reverse.

Invariant: whatever was started when something fails, or when the driver is interrupted, is ended
before `Runtime.close` returns: sessions first, then sandboxes, engines, trainer, router and Ray.
"""

import asyncio
import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rlmix.config.schema.train import TrainConfig
from rlmix.core.addresses import NODE_VARIABLE, meeting_address
from rlmix.evals.evaluator import Evaluator, EvaluatorSpec
from rlmix.launch.handle import Handle
from rlmix.launch.ray import RayCluster
from rlmix.loop.canaries import CanaryReferences
from rlmix.loop.fleets import remote_url
from rlmix.loop.router_process import RouterProcess
from rlmix.loop.specs import trainer_spec, worker_spec
from rlmix.loop.trainer_ranks import TrainerRanks
from rlmix.loop.trainer_recovery import RecoveringTrainer
from rlmix.loop.workers import WorkerPool
from rlmix.model.bundle import resolve_model
from rlmix.observe.run_dir import RunDir
from rlmix.plan.build import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE
from rlmix.plan.runplan import RunPlan, thread_limits
from rlmix.pools.fleet import Fleet
from rlmix.pools.replica import Replica
from rlmix.pools.spec import FleetSpec, ReplicaSpec
from rlmix.router.client import RouterAdmin
from rlmix.sandbox.reap import reap, reap_command
from rlmix.sessions.worker import TaskWorker
from rlmix.trainer.spec import TrainerSpec

LOGICAL_CPUS = 64
"""What actors may ask of Ray in all. Ray only counts; the plan decides what fits the machine."""

SESSION_MARGIN_S = 60.0
"""Verdict and clean-up on top of a session's own time limit."""


class Runtime:
    """Ray, router, trainer and workers of one run; fleets are added by the caller."""

    def __init__(self, plan: RunPlan, config: TrainConfig, run: RunDir) -> None:
        self._plan = plan
        self._config = config
        self._run = run
        self._exit = contextlib.AsyncExitStack()
        self._token = secrets.token_urlsafe(24)
        self._admin_token = secrets.token_urlsafe(24)
        self._cluster: RayCluster | None = None
        self.trainer: Handle
        self.router: RouterAdmin
        self.router_process: RouterProcess
        self.workers: WorkerPool

    async def start_processes(self, model_dir: Path, views: tuple[str, ...]) -> None:
        """Router, Ray, trainer actor and task workers; nothing is loaded yet."""
        run = self._run
        scratch = Path(tempfile.gettempdir())
        os.environ[TOKEN_VARIABLE] = self._token
        self._exit.callback(os.environ.pop, TOKEN_VARIABLE, None)
        await asyncio.to_thread(reap, run.run_id, scratch)  # Of an attempt that was killed.
        self._exit.callback(reap, run.run_id, scratch)
        if self._config.launch.address is not None:
            # First, because it says by which address other machines reach the router.
            self._open_cluster()
        router = self.router_process = RouterProcess(self._plan.router, run)
        self._exit.push_async_callback(router.stop)
        if self._cluster is None:
            # Ray wants the main thread for its signal handlers, and this blocks for some seconds;
            # the router starts meanwhile.
            self._open_cluster()
        self.trainer = self._start_trainer(views)
        self._exit.callback(self.trainer.kill)
        url = await router.wait_ready()
        self.router = RouterAdmin(url, token=self._token)
        self._exit.push_async_callback(self.router.close)
        self.workers = self._start_workers(url, model_dir, scratch)
        self._exit.push_async_callback(self.workers.close)

    def start_fleet(self, spec: FleetSpec, *, held_version: Callable[[], int]) -> Fleet:
        """A fleet that ends with the runtime, unless it was stopped before. Not booted yet."""
        fleet = Fleet(
            spec,
            spawn=self._spawn_replica,
            router=self.router,
            on_event=self._run.events.append,
            references=CanaryReferences(self.trainer, held_version=held_version),
        )
        self._exit.push_async_callback(fleet.stop)
        return fleet

    async def start_evaluator(self, spec: FleetSpec, config: TrainConfig) -> tuple[Fleet, Handle]:
        """What evaluates while the run goes on: a router, a fleet and an evaluator of its own, so
        that no session of the run ever waits behind one of an evaluation."""
        assert self._cluster is not None
        router = RouterProcess(self._plan.router, self._run, name="router-eval")
        self._exit.push_async_callback(router.stop)
        url = await router.wait_ready()
        admin = RouterAdmin(url, token=self._token)
        self._exit.push_async_callback(admin.close)
        fleet = Fleet(
            spec, spawn=self._spawn_replica, router=admin, on_event=self._run.events.append
        )
        self._exit.push_async_callback(fleet.stop)
        evaluator = self._cluster.spawn(
            Evaluator,
            name="evaluator",
            kwargs={
                "spec": EvaluatorSpec(
                    config=config,
                    router_url=url,
                    router_token=self._token,
                    model_dir=str(resolve_model(config.model.path)),
                    run_id=self._run.run_id,
                    scratch_dir=tempfile.gettempdir(),
                )
            },
            env=thread_limits(1),
        )
        self._exit.callback(evaluator.kill)
        return fleet, evaluator

    @property
    def cluster(self) -> RayCluster:
        """After `start_processes`."""
        assert self._cluster is not None
        return self._cluster

    def on_close(self, callback: Callable[..., object]) -> None:
        """Await `callback` when the runtime closes, before what was started earlier ends."""
        self._exit.push_async_callback(callback)  # type: ignore[arg-type]

    async def close(self) -> None:
        await self._exit.aclose()

    def _start_workers(self, router_url: str, model_dir: Path, scratch: Path) -> WorkerPool:
        config, cluster = self._config, self._cluster
        assert cluster is not None
        spec = worker_spec(
            config,
            run_id=self._run.run_id,
            router_url=router_url,
            router_token=self._token,
            model_dir=model_dir,
            scratch=scratch,
        )

        incarnations = [0] * config.session.workers

        def spawn(index: int) -> Handle:
            incarnations[index] += 1
            again = f"-{incarnations[index]}" if incarnations[index] > 1 else ""
            return cluster.spawn(
                TaskWorker,
                name=f"worker-{index}{again}",
                kwargs={"spec": spec},
                env=thread_limits(1),
            )

        return WorkerPool(
            spawn,
            num_workers=config.session.workers,
            session_limit_s=config.session.time_limit_s + SESSION_MARGIN_S,
            on_event=self._run.events.append,
        )

    def _start_trainer(self, views: tuple[str, ...]) -> Handle:
        config, run, cluster = self._config, self._run, self._cluster
        assert cluster is not None
        spec = trainer_spec(
            config,
            checkpoints=run.checkpoints,
            store=run.weights,
            views=views,
            remote=remote_url(config, run),
        )

        def spawn(rank: int, incarnation: int) -> Handle:
            name = "trainer" if spec.ranks == 1 else f"trainer-{rank}"
            return cluster.spawn(
                make_trainer,
                name=name if incarnation == 1 else f"{name}-again-{incarnation}",
                log_name=name,
                kwargs={"spec": replace(spec, rank=rank)},
                env=thread_limits(config.trainer.threads),
            )

        ranks = TrainerRanks(spawn, num_ranks=spec.ranks)
        ranks.start()
        return RecoveringTrainer(
            ranks,
            checkpoints=run.checkpoints,
            max_restarts=config.launch.max_restarts,
            restart_window_s=config.launch.restart_window_s,
            on_event=run.events.append,
        )

    def _open_cluster(self) -> None:
        self._cluster = self._start_cluster()
        self._exit.callback(self._cluster.stop)
        if self._cluster.is_joined:
            os.environ[NODE_VARIABLE] = self._cluster.node_address
            self._exit.callback(os.environ.pop, NODE_VARIABLE, None)

    def _start_cluster(self) -> RayCluster:
        launch, run = self._config.launch, self._run
        if launch.address is None:
            return RayCluster.start(
                run.run_id,
                num_cpus=LOGICAL_CPUS,
                log_dir=run.logs,
                on_lost=reap_command(run.run_id, Path(tempfile.gettempdir())),
            )
        return RayCluster.join(
            launch.address, run.run_id, log_dir=run.logs, place_limit_s=launch.place_timeout_s
        )

    def _spawn_replica(self, spec: ReplicaSpec, incarnation: int) -> Handle:
        assert self._cluster is not None
        return self._cluster.spawn(
            Replica,
            name=f"replica-{spec.name}-{incarnation}",
            kwargs={"spec": spec},
            needs=spec.needs,
            # Said here and not inherited, since a replica may be on another machine.
            env={
                **thread_limits(1),
                TOKEN_VARIABLE: self._token,
                ADMIN_TOKEN_VARIABLE: self._admin_token,
            },
        )


def make_trainer(spec: TrainerSpec) -> object:
    """Runs in the trainer's process; the driver itself never imports torch."""
    from rlmix.trainer.rank import TrainerRank

    return TrainerRank(replace(spec, host=meeting_address(spec.host, os.environ)))
