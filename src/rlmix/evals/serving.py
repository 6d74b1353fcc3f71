"""An `eval` pool behind a router: engines in BF16 with a BF16 cache that serve one version.

The same replicas, admission gate and router as in training; there is no trainer, so canary answers
are checked for what they must be and not compared. Invariant: whatever was started has ended when
`close` returns.
"""

import asyncio
import contextlib
import os
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import PlanError
from rlmix.evals.saturation import LOOK_EVERY_S, Load, load_of, saturation
from rlmix.launch.handle import Handle
from rlmix.launch.ray import RayCluster
from rlmix.loop.fleets import EVAL_POOL, NO_EVALUATION, eval_fleet, evaluating_pool
from rlmix.loop.router_process import RouterProcess
from rlmix.loop.runtime import LOGICAL_CPUS
from rlmix.observe.run_dir import RunDir
from rlmix.plan.build import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE
from rlmix.plan.runplan import RunPlan, thread_limits
from rlmix.pools.fleet import Fleet
from rlmix.pools.replica import Replica
from rlmix.pools.spec import ReplicaSpec
from rlmix.router.client import RouterAdmin
from rlmix.sandbox.reap import reap

NO_POOL = NO_EVALUATION.replace(
    "loop.eval_tasks: the closing evaluation", "agent=policy: an evaluation"
).replace("set loop.eval_tasks=0, or add such a pool", "add such a pool")


def served_plan(plan: RunPlan, config: TrainConfig) -> RunPlan:
    """The plan of the eval pool alone: nothing else of a run is started.

    Raises:
        PlanError: no pool can be served in BF16.
    """
    chosen = evaluating_pool(plan)
    if chosen is None:
        raise PlanError(NO_POOL)
    count = config.eval.replicas
    if chosen.engine != "embedded":
        count = min(count, chosen.replicas)
    pool = replace(chosen, replicas=count, gpu_ids=chosen.gpu_ids[:count])
    return replace(plan, pools={EVAL_POOL: pool})


def served_config(config: TrainConfig) -> TrainConfig:
    """The configuration without what a training run needs beside its pools."""
    return replace(
        config,
        loop=replace(config.loop, eval_tasks=0),
        eval=replace(config.eval, every_steps=0),
        trainer=replace(config.trainer, device="cpu"),
        tasks=replace(config.tasks, source="generated", path=None),
    )


class Serving:
    """Use `start` and `close`, or as an asynchronous context manager around both."""

    def __init__(
        self, plan: RunPlan, config: TrainConfig, run: RunDir, *, store: Path, model_dir: Path
    ) -> None:
        self._plan, self._config, self._run = plan, config, run
        self._spec = eval_fleet(plan, config, run, store=store, model_dir=model_dir)
        self._exit = contextlib.AsyncExitStack()
        self._looks: list[Load] = []
        self.token = secrets.token_urlsafe(24)
        self._admin_token = secrets.token_urlsafe(24)
        self.url = ""
        self.fleet: Fleet

    async def start(self, version: int) -> None:
        """Router, Ray, engines on `version`, all verified.

        Raises:
            LaunchError: something cannot be started; what was is ended by `close`.
        """
        run, scratch = self._run, Path(tempfile.gettempdir())
        os.environ[TOKEN_VARIABLE] = self.token
        self._exit.callback(os.environ.pop, TOKEN_VARIABLE, None)
        self._exit.callback(reap, run.run_id, scratch)
        router = RouterProcess(self._plan.router, run)
        self._exit.push_async_callback(router.stop)
        cluster = _cluster(self._config, run)
        self._exit.callback(cluster.stop)
        self.url = await router.wait_ready()
        admin = RouterAdmin(self.url, token=self.token)
        self._exit.push_async_callback(admin.close)

        def spawn(spec: ReplicaSpec, incarnation: int) -> Handle:
            return cluster.spawn(
                Replica,
                name=f"replica-{spec.name}-{incarnation}",
                kwargs={"spec": spec},
                needs=spec.needs,
                env={
                    **thread_limits(1),
                    TOKEN_VARIABLE: self.token,
                    ADMIN_TOKEN_VARIABLE: self._admin_token,
                },
            )

        self.fleet = Fleet(self._spec, spawn=spawn, router=admin, on_event=run.events.append)
        self._exit.push_async_callback(self.fleet.stop)
        await self.fleet.start(version)
        watch = asyncio.create_task(self._look(), name="eval load")
        self._exit.push_async_callback(_ended, watch)

    async def _look(self) -> None:
        while True:
            self._looks.append(load_of(self.fleet.status()))
            await asyncio.sleep(LOOK_EVERY_S)

    def engine_facts(self) -> dict[str, Any]:
        """What serves, and how busy it was so far."""
        replicas = self._spec.replicas
        places = sum(replica.max_running for replica in replicas)
        return {
            "engine": replicas[0].engine,
            "replicas": len(replicas),
            **replicas[0].expected,
            "saturation": saturation(self._looks, places=places),
        }

    async def close(self) -> None:
        await self._exit.aclose()

    async def __aenter__(self) -> "Serving":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def _cluster(config: TrainConfig, run: RunDir) -> RayCluster:
    """A Ray of its own, or the cluster that `launch.address` names."""
    launch = config.launch
    if launch.address is None:
        return RayCluster.start(run.run_id, num_cpus=LOGICAL_CPUS, log_dir=run.logs)
    return RayCluster.join(
        launch.address, run.run_id, log_dir=run.logs, place_limit_s=launch.place_timeout_s
    )


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
