"""From the plan to the fleets of a run: the pools that sample, and the one that evaluates. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError, LaunchError
from rlmix.launch.needs import needs_of
from rlmix.loop.router_process import READY_FOLDER
from rlmix.model.chat import ChatRenderer
from rlmix.observe.run_dir import RunDir
from rlmix.plan.build import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE
from rlmix.plan.capabilities import SGLANG_VERSION
from rlmix.plan.runplan import PoolPlan, RunPlan
from rlmix.plan.views import EXPERTS
from rlmix.pools.spec import FleetSpec, PushSpec, ReplicaSpec, StagingSpec

STAGED = "staged"
"""Folder of the run with copies of versions, where `weights.staging` names none."""

EVAL_POOL = "eval"
LIVE_EVAL_POOL = "eval_live"
"""The same while the run goes on; the closing evaluation comes after it under its own name."""
EVAL_FORMAT = "bf16"
"""Weights and KV of an evaluation, whatever the pools use: it judges the policy itself."""

NO_EVALUATION = (
    "loop.eval_tasks: the closing evaluation is served in BF16 by an embedded pool, or by real "
    "servers with BF16 weights and cache, and there is none; set loop.eval_tasks=0, or add "
    "such a pool"
)

CANARY_ISSUES = (
    "The function returns the wrong value for an empty list.",
    "The limit itself should be accepted.",
)
CANARY_TOKENS = 8


def views_of(plan: RunPlan) -> tuple[str, ...]:
    """Weight views to publish: one per format in use, and always BF16 for the evaluation."""
    return tuple(sorted({*plan.trainer.views, EVAL_FORMAT}))


def training_fleet(
    plan: RunPlan,
    config: TrainConfig,
    run: RunDir,
    *,
    model_dir: Path,
    counts: Mapping[str, int] | None = None,
) -> FleetSpec:
    """The pools that sample.

    Args:
        counts: pool -> replicas to start with, where they are not the planned ones.
    """
    replicas = [
        _replica(pool, name, index, config, run)
        for name, pool in plan.pools.items()
        for index in range(pool.replicas if counts is None else counts[name])
    ]
    return _fleet(replicas, config, store=run.weights, model_dir=model_dir)


def further_replica(
    plan: RunPlan, config: TrainConfig, run: RunDir, name: str, index: int
) -> ReplicaSpec:
    """A replica of a pool that is made larger while the run goes on.

    Raises:
        ConfigError: the plan knows no accelerator or server for it.
    """
    pool = plan.pools[name]
    places = pool.urls if pool.engine == "sglang_external" else pool.gpu_ids
    what = "server" if pool.engine == "sglang_external" else "accelerator"
    # On a Ray cluster it is Ray that finds the machine, and says so when there is none.
    is_ray_s = config.launch.address is not None and pool.engine == "sglang"
    if places and index >= len(places) and not is_ray_s:
        raise ConfigError(
            f"{name}-{index}: the plan has a free {what} for {len(places)} replicas of {name} and "
            f"not for another; start the run with pools.{name}.replicas={index + 1} and make the "
            "pool smaller until it is needed"
        )
    return _replica(pool, name, index, config, run)


def eval_fleet(
    plan: RunPlan,
    config: TrainConfig,
    run: RunDir,
    *,
    store: Path,
    model_dir: Path,
    name: str = EVAL_POOL,
    niceness: int = 0,
) -> FleetSpec:
    """BF16 replicas that read `store`, like those of the pool that `evaluating_pool` chooses.

    Args:
        name: of the pool.
        niceness: of embedded engines, which share the machine's cores with a trainer.

    Raises:
        LaunchError: no pool can be served in BF16.
    """
    chosen = evaluating_pool(plan)
    if chosen is None:
        raise LaunchError(NO_EVALUATION)
    pool = _in_bf16(chosen, is_exact=config.numerics.consistency == "exact")
    # Real servers stand on accelerators that the pool has; embedded ones take what the machine has.
    count = config.eval.replicas
    if pool.engine != "embedded":
        count = min(count, pool.replicas)
    # The kept versions lie beside the run's store and are read from their folder.
    replicas = [
        replace(_replica(pool, name, index, config, run), staging=None) for index in range(count)
    ]
    if niceness and pool.engine == "embedded":
        nice = ("nice", "-n", str(niceness))
        replicas = [replace(replica, argv=(*nice, *replica.argv)) for replica in replicas]
    return _fleet(replicas, config, store=store, model_dir=model_dir)


def evaluating_pool(plan: RunPlan) -> PoolPlan | None:
    """The first embedded pool; else the first of real servers that rlmix starts in BF16."""
    pools = list(plan.pools.values())
    real = [
        pool
        for pool in pools
        if pool.engine == "sglang"
        and pool.replicas
        and (pool.weights, pool.kv) == (EVAL_FORMAT, EVAL_FORMAT)
    ]
    return next(iter([pool for pool in pools if pool.engine == "embedded"] + real), None)


def _in_bf16(pool: PoolPlan, *, is_exact: bool) -> PoolPlan:
    """In exact mode weights are BF16 anyway, and the cache is what the trainer computes with."""
    if pool.engine != "embedded":
        return pool
    kv = pool.kv if is_exact else EVAL_FORMAT
    argv = list(pool.argv)
    for flag, value in (("--weights", EVAL_FORMAT), ("--kv", kv), ("--pool", EVAL_POOL)):
        argv[argv.index(flag) + 1] = value
    return replace(pool, weights=EVAL_FORMAT, kv=kv, argv=tuple(argv))


def _replica(
    pool: PoolPlan, pool_name: str, index: int, config: TrainConfig, run: RunDir
) -> ReplicaSpec:
    planned = pool.replica(pool_name, index)
    launch = config.launch
    is_ours = pool.engine == "sglang"
    is_external = pool.engine == "sglang_external"
    needs = None
    if pool_name not in (EVAL_POOL, LIVE_EVAL_POOL) or is_ours:
        needs = needs_of(
            engine=pool.engine,
            accelerator=pool.accelerator,
            ray_label=pool.ray_label,
            num_accelerators=pool.tp,
            is_cuda=config.accelerators[pool.accelerator].compute_capability is not None,
            resources=launch.resources,
            is_joined=launch.address is not None,
        )
    return ReplicaSpec(
        name=planned.name,
        pool=pool_name,
        view=pool.weights,
        engine=pool.engine,
        url=pool.urls[index] if is_external else None,
        argv=planned.argv,
        env=_without_device_ids(planned.env) if needs is not None else planned.env,
        needs=needs,
        log_path=run.logs / f"engine-{planned.name}.log",
        ready_path=run.path / READY_FOLDER / f"{planned.name}.json",
        expected=_expected(pool, consistency=config.numerics.consistency),
        token_env=config.sglang.api_key_env if is_external else TOKEN_VARIABLE,
        admin_token_env=(
            ADMIN_TOKEN_VARIABLE
            if is_ours
            else config.sglang.admin_key_env
            if is_external
            else None
        ),
        speed=pool.speed,
        max_running=pool.max_running,
        boot_timeout_s=launch.boot_timeout_s,
        update_timeout_s=launch.update_timeout_s,
        canary_tolerance_nats=pool.canary_tolerance_nats,
        push=_push(pool, config),
        staging=_staging(config, run),
    )


def remote_url(config: TrainConfig, run: RunDir) -> str:
    """Where versions go besides the run's folder; empty: nowhere."""
    store = config.weights.store
    return f"{store.rstrip('/')}/{run.name}" if store else ""


def _staging(config: TrainConfig, run: RunDir) -> StagingSpec | None:
    """None: machines see the trainer's folder. Copies of a run have a folder of their own, and one
    that a resumed run finds is compared with the store before it is used."""
    url = remote_url(config, run)
    if not url:
        return None
    base = config.weights.staging
    return StagingSpec(
        url=url,
        folder=run.path / STAGED if base is None else Path(base) / run.run_id,
        limit_s=config.launch.update_timeout_s,
    )


def _without_device_ids(env: Mapping[str, str]) -> dict[str, str]:
    """In a cluster Ray says which accelerators of its machine a replica has."""
    return {name: value for name, value in env.items() if name != "CUDA_VISIBLE_DEVICES"}


def _push(pool: PoolPlan, config: TrainConfig) -> PushSpec | None:
    """None: engines read the folder."""
    if config.weights.transport == "disk":
        return None
    is_embedded = pool.engine == "embedded"
    return PushSpec(
        host=config.net.bind,
        backend="gloo" if is_embedded or pool.accelerator == "cpu" else "nccl",
        # One process of ours receives for all of its ranks.
        num_ranks=1 if is_embedded else pool.tp,
        bucket_bytes=config.weights.bucket_mib << 20,
    )


def _expected(pool: PoolPlan, *, consistency: str) -> dict[str, str]:
    """What an engine must say of itself."""
    fields = {
        "accelerator": pool.accelerator,
        "weights": pool.weights,
        "activations": pool.activations,
        "kv": pool.kv,
        "attention": pool.attention,
    }
    if pool.engine == "embedded":
        return fields | {"consistency": consistency}
    return fields | {
        "view": f"{pool.weights}:{pool.scope}" if pool.scope == EXPERTS else pool.weights,
        "linear_attention": pool.linear_attention,
        "state": pool.state,
        "moe": pool.moe,
        "tp": str(pool.tp),
        "version": SGLANG_VERSION,
    }


def _fleet(
    replicas: Sequence[ReplicaSpec], config: TrainConfig, *, store: Path, model_dir: Path
) -> FleetSpec:
    launch = config.launch
    renderer = ChatRenderer(model_dir)
    return FleetSpec(
        replicas=tuple(replicas),
        store=store,
        pause_mode=config.weights.pause,
        checks_identity=config.weights.identity_check,
        max_parallel_pulls=config.weights.max_parallel_pulls,
        max_parallel_boots=launch.max_parallel_boots,
        max_restarts=launch.max_restarts,
        restart_window_s=launch.restart_window_s,
        restart_delay_s=launch.restart_delay_s,
        loads_every_s=launch.loads_every_s,
        stall_timeout_s=launch.stall_timeout_s,
        canary_prompts=tuple(tuple(renderer.prompt_ids(issue)) for issue in CANARY_ISSUES),
        canary_tokens=CANARY_TOKENS,
    )
