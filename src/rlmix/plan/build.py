"""Turns a checked configuration into a RunPlan. Pure: no file, no device, no clock."""

from rlmix.config.schema.pools import PoolConfig
from rlmix.config.schema.train import TrainConfig
from rlmix.plan.model_shape import QWEN36_35B_A3B, ModelShape
from rlmix.plan.runplan import PoolPlan, RouterPlan, RunPlan, TrainerPlan, WorkerPlan
from rlmix.plan.speed import modelled_speed
from rlmix.plan.warnings import plan_warnings

REFERENCE_CONTEXT_TOKENS = 8192
REFERENCE_MAX_BATCH = 256
"""Load under which accelerators are compared: a coding session of medium length."""

EMULATED_SPEED = 1.0
"""Embedded replicas all run on the same CPU, whatever they stand for, so none is expected to be
faster than another."""

TOKEN_VARIABLE = "RLMIX_TOKEN"
"""Environment variable in which the run's servers find their bearer token."""

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""Many small processes share the cores; two threads each make small matrices 100 times slower."""

TRAINER_BYTES_PER_PARAM = {"adamw": 2 + 4 + 4 + 8, "sgd": 2 + 4 + 4}
"""BF16 weights, float32 master and gradient, two float32 moments."""


def build_plan(config: TrainConfig, *, shape: ModelShape, python: str) -> RunPlan:
    """Every process of the run.

    Args:
        config: has passed all checks.
        shape: sizes of the policy.
        python: interpreter of the child processes.
    """
    pools = {
        name: _pool(name, pool, config, shape=shape, python=python)
        for name, pool in config.pools.items()
    }
    trainer = _trainer(config, shape)
    return RunPlan(
        pools=pools,
        trainer=trainer,
        router=_router(config, python),
        workers=WorkerPlan(
            workers=config.session.workers,
            concurrency=config.session.concurrency,
            sandbox=config.sandbox.backend,
        ),
        usd_per_hour=sum(pool.usd_per_hour for pool in pools.values()) + trainer.usd_per_hour,
        warnings=tuple(plan_warnings(config, pools)),
    )


def _pool(
    name: str, pool: PoolConfig, config: TrainConfig, *, shape: ModelShape, python: str
) -> PoolPlan:
    accelerator = config.accelerators[pool.accelerator]
    price = accelerator.usd_per_hour if pool.usd_per_hour is None else pool.usd_per_hour
    context_tokens = config.session.max_context_tokens
    held = shape.weight_bytes(pool.weights)
    held += pool.max_running * shape.request_bytes(pool.kv, context_tokens)
    return PoolPlan(
        accelerator=pool.accelerator,
        engine=pool.engine,
        is_emulated=True,
        weights=pool.weights,
        activations=pool.activations,
        kv=pool.kv,
        attention=pool.attention,
        moe=pool.moe,
        tp=pool.tp,
        replicas=pool.replicas,
        gpus=pool.replicas * pool.tp,
        argv=_embedded_argv(name, pool, config, python),
        env=dict(ONE_THREAD),
        usd_per_hour=pool.replicas * pool.tp * price,
        usd_per_replica_hour=pool.tp * price,
        memory_gib=held / 2**30,
        concurrency=pool.replicas * pool.max_running,
        max_running=pool.max_running,
        speed=EMULATED_SPEED,
        canary_tolerance_nats=pool.canary_tolerance_nats,
        modelled=modelled_speed(
            QWEN36_35B_A3B,
            accelerator,
            weights=pool.weights,
            kv=pool.kv,
            tp=pool.tp,
            context_tokens=REFERENCE_CONTEXT_TOKENS,
            max_batch=REFERENCE_MAX_BATCH,
            usd_per_hour=price,
        ),
    )


def _embedded_argv(
    name: str, pool: PoolConfig, config: TrainConfig, python: str
) -> tuple[str, ...]:
    arguments = {
        "model-path": "{model_path}",
        "accelerator": pool.accelerator,
        "weights": pool.weights,
        "activations": pool.activations,
        "kv": pool.kv,
        "attention": pool.attention,
        "moe": pool.moe,
        "max-running-requests": pool.max_running,
        "context-length": config.session.max_context_tokens,
        "host": config.net.bind,
        "port": 0,
        "pool": name,
        "replica": "{replica}",
        "seed": config.run.seed,
        "weight-version": "{weight_version}",
        "ready-file": "{ready_file}",
    }
    return (python, "-m", "rlmix.engine.embedded", *_flags(arguments))


def _router(config: TrainConfig, python: str) -> RouterPlan:
    router = config.router
    arguments = {
        "host": config.net.bind,
        "port": 0,
        "policy": router.policy,
        "speeds": router.speeds,
        "queue-timeout-s": router.queue_timeout_s,
        "request-timeout-s": router.request_timeout_s,
        "idle-expiry-s": router.idle_expiry_s,
        "token-env": TOKEN_VARIABLE,
        "ready-file": "{ready_file}",
    }
    return RouterPlan(
        argv=(python, "-m", "rlmix.router", *_flags(arguments)),
        env={"PYTHONUNBUFFERED": "1"},
    )


def _trainer(config: TrainConfig, shape: ModelShape) -> TrainerPlan:
    trainer = config.trainer
    return TrainerPlan(
        ranks=trainer.ranks,
        device="cpu",
        compute="bf16, float32 master weights",
        optimizer=trainer.optimizer,
        lr=trainer.lr,
        micro_batch_tokens=trainer.micro_batch_tokens,
        threads=trainer.threads,
        views=tuple(sorted({pool.weights for pool in config.pools.values()})),
        gpus=0,
        memory_gib=shape.params * TRAINER_BYTES_PER_PARAM[trainer.optimizer] / 2**30,
        usd_per_hour=0.0,
    )


def _flags(arguments: dict[str, object]) -> list[str]:
    return [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
