"""From the plan to the fleets of a run: the pools that sample, and the one that evaluates. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlmix.config.schema.train import TrainConfig
from rlmix.loop.router_process import READY_FOLDER
from rlmix.model.chat import ChatRenderer
from rlmix.observe.run_dir import RunDir
from rlmix.plan.runplan import PoolPlan, RunPlan
from rlmix.pools.spec import FleetSpec, ReplicaSpec

EVAL_POOL = "eval"
EVAL_FORMAT = "bf16"
"""Weights and KV of an evaluation, whatever the pools use: it judges the policy itself."""

NUM_EVAL_REPLICAS = 2

CANARY_ISSUES = (
    "The function returns the wrong value for an empty list.",
    "The limit itself should be accepted.",
)
CANARY_TOKENS = 8


def views_of(plan: RunPlan) -> tuple[str, ...]:
    """Weight views to publish: one per format in use, and always BF16 for the evaluation."""
    return tuple(sorted({*plan.trainer.views, EVAL_FORMAT}))


def training_fleet(
    plan: RunPlan, config: TrainConfig, run: RunDir, *, model_dir: Path
) -> FleetSpec:
    replicas = [
        _replica(pool, name, index, config, run)
        for name, pool in plan.pools.items()
        for index in range(pool.replicas)
    ]
    return _fleet(replicas, config, store=run.weights, model_dir=model_dir)


def eval_fleet(
    plan: RunPlan, config: TrainConfig, run: RunDir, *, store: Path, model_dir: Path
) -> FleetSpec:
    """BF16 replicas that read `store`, on the accelerator of the first planned pool."""
    pool = _in_bf16(next(iter(plan.pools.values())))
    replicas = [_replica(pool, EVAL_POOL, index, config, run) for index in range(NUM_EVAL_REPLICAS)]
    return _fleet(replicas, config, store=store, model_dir=model_dir)


def _in_bf16(pool: PoolPlan) -> PoolPlan:
    argv = list(pool.argv)
    for flag, value in (("--weights", EVAL_FORMAT), ("--kv", EVAL_FORMAT), ("--pool", EVAL_POOL)):
        argv[argv.index(flag) + 1] = value
    return replace(pool, weights=EVAL_FORMAT, kv=EVAL_FORMAT, argv=tuple(argv))


def _replica(
    pool: PoolPlan, pool_name: str, index: int, config: TrainConfig, run: RunDir
) -> ReplicaSpec:
    planned = pool.replica(pool_name, index)
    launch = config.launch
    return ReplicaSpec(
        name=planned.name,
        pool=pool_name,
        view=pool.weights,
        argv=planned.argv,
        env=planned.env,
        log_path=run.logs / f"engine-{planned.name}.log",
        ready_path=run.path / READY_FOLDER / f"{planned.name}.json",
        expected={
            "accelerator": pool.accelerator,
            "weights": pool.weights,
            "activations": pool.activations,
            "kv": pool.kv,
            "attention": pool.attention,
        },
        speed=pool.speed,
        max_running=pool.max_running,
        boot_timeout_s=launch.boot_timeout_s,
        update_timeout_s=launch.update_timeout_s,
        canary_tolerance_nats=pool.canary_tolerance_nats,
    )


def _fleet(
    replicas: Sequence[ReplicaSpec], config: TrainConfig, *, store: Path, model_dir: Path
) -> FleetSpec:
    launch = config.launch
    renderer = ChatRenderer(model_dir)
    return FleetSpec(
        replicas=tuple(replicas),
        store=store,
        pause_mode=config.weights.pause,
        max_parallel_boots=launch.max_parallel_boots,
        max_restarts=launch.max_restarts,
        restart_window_s=launch.restart_window_s,
        restart_delay_s=launch.restart_delay_s,
        loads_every_s=launch.loads_every_s,
        stall_timeout_s=launch.stall_timeout_s,
        canary_prompts=tuple(tuple(renderer.prompt_ids(issue)) for issue in CANARY_ISSUES),
        canary_tokens=CANARY_TOKENS,
    )
