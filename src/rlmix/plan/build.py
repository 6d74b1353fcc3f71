"""Turns a checked configuration into a RunPlan. Pure: no device, no clock, no network."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlmix.config.schema.pools import AcceleratorConfig, PoolConfig, records_experts
from rlmix.config.schema.train import TrainConfig
from rlmix.plan.accelerators import CPU, architecture
from rlmix.plan.fit import pool_budget
from rlmix.plan.memory import CONTEXTS_TOKENS
from rlmix.plan.model_facts import ELEMENT_BYTES, REFERENCE, ModelFacts, bundled_facts
from rlmix.plan.placement import Placement, mean_price, place
from rlmix.plan.profiles import CPU_CACHE_SHARE, sglang_launch
from rlmix.plan.refusals import embedded_faults, judged, pool_faults, refuse, routing_faults
from rlmix.plan.runplan import (
    EvaluationPlan,
    PoolPlan,
    RouterPlan,
    RunPlan,
    TrainerPlan,
    WorkerPlan,
    thread_limits,
)
from rlmix.plan.speed import Numbers, modelled_speed
from rlmix.plan.trainer import plan_trainer, trainer_faults
from rlmix.plan.views import pool_view, scope_faults, scoped
from rlmix.plan.warnings import plan_warnings

REFERENCE_CONTEXT_TOKENS = 8192
REFERENCE_MAX_BATCH = 256
"""Load under which emulated accelerators are compared: a coding session of medium length."""

FLEET_CONTEXT_TOKENS = 32_768
"""Context at which the tokens of a real fleet are counted: the middle of a long coding session."""

EMULATED_SPEED = 1.0
"""Embedded replicas all run on the same CPU, whatever they stand for, so none is expected to be
faster than another."""

EXACT_CANARY_NATS = 1e-6
"""Exact embedded replicas answer with the trainer's bits; the decimal form of a number moves less
than this. Whatever is above was computed otherwise."""

TOKEN_VARIABLE = "RLMIX_TOKEN"
"""Environment variable in which the run's servers find their bearer token."""

ADMIN_TOKEN_VARIABLE = "RLMIX_ADMIN_TOKEN"
"""The same for the key that changes a real server: its weights, pauses, caches."""

REAL_ON_CPU_SPEED = 0.25
"""Real SGLang on a CPU against an embedded replica, as far as the router knows before it has seen
any turn: about 50 tokens a second against several hundred."""


def build_plan(
    config: TrainConfig, *, facts: ModelFacts, python: str, sglang_python: str | None = None
) -> RunPlan:
    """Every process of the run.

    Args:
        config: has passed all checks.
        facts: sizes of the policy.
        python: interpreter of the child processes.
        sglang_python: interpreter of real servers; None: the same.
    Raises:
        PlanError: lists everything that cannot be placed or run as asked.
    """
    refuse(plan_faults(config, facts))
    config = scoped(config, facts)
    real = _real_pools(config)
    placement = place(config)
    trainer = _trainer(config, facts, placement)
    pools: dict[str, PoolPlan] = {}
    for name, pool in config.pools.items():
        if name in real:
            pools[name] = _real(
                name,
                pool,
                config,
                facts=facts,
                python=sglang_python or python,
                placement=placement,
            )
        else:
            pools[name] = _embedded(name, pool, config, facts=facts, python=python)
    pools = _with_speeds(pools)
    tokens_per_s = _sum_or_none([pool.tokens_per_s for pool in pools.values()])
    pools_usd = sum(pool.usd_per_hour for pool in pools.values())
    return RunPlan(
        pools=pools,
        trainer=trainer,
        router=_router(config, python),
        workers=WorkerPlan(
            workers=config.session.workers,
            concurrency=config.session.concurrency,
            sandbox=config.sandbox.backend,
        ),
        evaluation=_evaluation(config),
        usd_per_hour=pools_usd + trainer.usd_per_hour,
        tokens_per_s=tokens_per_s,
        usd_per_mtok=pools_usd / 3600 / tokens_per_s * 1e6 if tokens_per_s else None,
        unused=placement.unused,
        against=None,
        warnings=tuple(plan_warnings(config, pools, facts)),
    )


def plan_faults(config: TrainConfig, facts: ModelFacts) -> list[str]:
    """Everything that cannot be placed or run as asked, one line each."""
    faults = list(scope_faults(config.pools, facts))
    config = scoped(config, facts)
    placement = place(config)
    real = _real_pools(config)
    for name, pool in config.pools.items():
        if name in real:
            faults += pool_faults(name, pool, config, facts, placement)
        else:
            faults += embedded_faults(name, pool, config, facts)
    faults += routing_faults(config, facts)
    faults += placement.problems
    return faults + trainer_faults(config, _trainer(config, facts, placement), placement)


def _real_pools(config: TrainConfig) -> dict[str, PoolConfig]:
    return {name: pool for name, pool in config.pools.items() if pool.engine != "embedded"}


def _trainer(config: TrainConfig, facts: ModelFacts, placement: Placement) -> TrainerPlan:
    views = tuple(sorted({pool_view(pool) for pool in config.pools.values()}))
    return plan_trainer(config, facts, views=views, placement=placement)


def _embedded(
    name: str, pool: PoolConfig, config: TrainConfig, *, facts: ModelFacts, python: str
) -> PoolPlan:
    chip = config.accelerators[pool.accelerator]
    price, source = _price(pool, chip, (), {})
    context_tokens = config.session.max_context_tokens
    held = _held_bytes(pool, facts, cached_tokens=pool.max_running * context_tokens)
    modelled = modelled_speed(
        bundled_facts(REFERENCE),
        chip,
        Numbers(
            weights=pool_view(pool),
            activations=pool.activations,
            kv=pool.kv,
            state="bf16",
        ),
        tp=pool.tp,
        memory_frac=pool.memory_frac,
        context_tokens=REFERENCE_CONTEXT_TOKENS,
        max_batch=REFERENCE_MAX_BATCH,
        usd_per_hour=price,
    )
    shared = _shared(pool, chip, price, source)
    if config.numerics.consistency == "exact":
        shared["canary_tolerance_nats"] = EXACT_CANARY_NATS
    return PoolPlan(
        **shared,
        is_emulated=True,
        argv=_embedded_argv(name, pool, config, python),
        env={**thread_limits(1), "PYTHONUNBUFFERED": "1"},
        memory_gib=held / 2**30,
        budget=None,
        nodes=(),
        gpu_ids=(),
        tokens_per_s=None,
        speed=EMULATED_SPEED,
        modelled=modelled,
        by_context=(),
        evidence=(),
    )


def _real(
    name: str,
    pool: PoolConfig,
    config: TrainConfig,
    *,
    facts: ModelFacts,
    python: str,
    placement: Placement,
) -> PoolPlan:
    chip = config.accelerators[pool.accelerator]
    nodes = placement.pools.get(name, ())
    price, source = _price(pool, chip, nodes, placement.usd_per_hour)
    kind = architecture(chip)
    launch = sglang_launch(pool, config, facts, architecture=kind, python=python)
    shared = _shared(pool, chip, price, source)
    evidence = tuple(row.source for row in judged(pool, config, facts).evidence)
    if kind == CPU:
        cached_tokens = CPU_CACHE_SHARE * pool.max_running * config.session.max_context_tokens
        return PoolPlan(
            **{**shared, "gpus": 0},
            is_emulated=False,
            argv=launch.argv,
            env=launch.env,
            memory_gib=_held_bytes(pool, facts, cached_tokens=cached_tokens) / 2**30,
            budget=None,
            nodes=(),
            gpu_ids=(),
            tokens_per_s=None,
            speed=REAL_ON_CPU_SPEED,
            modelled=None,
            by_context=(),
            evidence=evidence,
        )
    budget = pool_budget(pool, chip, facts)
    longest = config.session.max_context_tokens
    contexts = sorted({min(context, longest) for context in CONTEXTS_TOKENS})
    fleet_context = min(FLEET_CONTEXT_TOKENS, longest)
    speeds = {
        context: modelled_speed(
            facts,
            chip,
            Numbers(
                weights=pool_view(pool),
                activations=pool.activations,
                kv=pool.kv,
                state=pool.state if facts.is_hybrid else "bf16",
            ),
            tp=pool.tp,
            memory_frac=pool.memory_frac,
            context_tokens=context,
            max_batch=pool.max_running,
            usd_per_hour=price,
        )
        for context in contexts
    }
    modelled = speeds[fleet_context]
    return PoolPlan(
        **shared,
        is_emulated=False,
        argv=launch.argv,
        env=launch.env,
        memory_gib=budget.share_gib,
        budget=budget,
        nodes=nodes,
        gpu_ids=placement.gpu_ids.get(name, ()),
        tokens_per_s=pool.replicas * modelled.tokens_per_s if modelled else None,
        speed=modelled.tokens_per_s if modelled else EMULATED_SPEED,
        modelled=modelled,
        by_context=tuple(speed for speed in speeds.values() if speed is not None),
        evidence=evidence,
    )


def _shared(pool: PoolConfig, chip: AcceleratorConfig, price: float, source: str) -> dict[str, Any]:
    """Fields that follow from the pool's keys, whatever serves it."""
    return {
        "accelerator": pool.accelerator,
        "engine": pool.engine,
        "weights": pool.weights,
        "scope": pool.scope,
        "activations": pool.activations,
        "kv": pool.kv,
        "attention": pool.attention,
        "linear_attention": pool.linear_attention,
        "state": pool.state,
        "moe": pool.moe,
        "tp": pool.tp,
        "replicas": pool.replicas,
        "gpus": pool.replicas * pool.tp,
        "usd_per_hour": pool.replicas * pool.tp * price,
        "usd_per_replica_hour": pool.tp * price,
        "ray_label": chip.ray_label,
        "price_source": source,
        "concurrency": pool.replicas * pool.max_running,
        "max_running": pool.max_running,
        "urls": tuple(pool.urls),
        "canary_tolerance_nats": pool.canary_tolerance_nats,
    }


def _price(
    pool: PoolConfig, chip: AcceleratorConfig, nodes: tuple[str, ...], prices: dict[str, float]
) -> tuple[float, str]:
    """Of one accelerator, and where that is from. Unknown prices of emulated chips count as 0;
    those of real ones were refused before."""
    if pool.usd_per_hour is not None:
        return pool.usd_per_hour, "the pool's own usd_per_hour"
    price = mean_price(nodes, prices, chip.usd_per_hour) or 0.0
    return price, "inventory.nodes" if prices.keys() & set(nodes) else chip.price_source


def _with_speeds(pools: dict[str, PoolPlan]) -> dict[str, PoolPlan]:
    """Speeds of pools on accelerators relative to the fastest of them, which gets 1."""
    real = {name for name, pool in pools.items() if pool.budget is not None}
    if not real:
        return pools
    best = max(pools[name].speed for name in real)
    return {
        name: replace(pool, speed=pool.speed / best) if name in real else pool
        for name, pool in pools.items()
    }


def _held_bytes(pool: PoolConfig, facts: ModelFacts, *, cached_tokens: int) -> float:
    """Weights and a full cache of a replica on a CPU."""
    cache = cached_tokens * facts.kv_elements * ELEMENT_BYTES[pool.kv]
    return facts.weight_bytes(pool_view(pool)) + cache


def _sum_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


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
    if config.numerics.consistency == "exact":
        arguments |= {"consistency": "exact", "tp-size": pool.tp, "ep-size": pool.ep}
    records = records_experts(pool, routing_replay=config.algo.routing_replay)
    switches = ("--enable-return-routed-experts",) if records else ()
    return (python, "-m", "rlmix.engine.embedded", *_flags(arguments), *switches)


def _evaluation(config: TrainConfig) -> EvaluationPlan | None:
    if config.eval.data is None and not config.eval.every_steps:
        return None
    return EvaluationPlan(
        data=config.eval.data or "generated",
        subset=config.eval.subset,
        k=config.eval.k,
        n=config.eval.n,
        weights="bf16",
        every_steps=config.eval.every_steps,
    )


def _router(config: TrainConfig, python: str) -> RouterPlan:
    router = config.router
    arguments = {
        "host": config.net.bind,
        "port": 0,
        "policy": router.policy,
        "speeds": router.speeds,
        "view": router.view,
        "placement": router.placement,
        "break-affinity-s": router.break_affinity_s,
        "staleness-s": router.staleness_s,
        "ramp-s": router.ramp_s,
        "admit-batches": router.admit_batches,
        "shards": router.shards,
        "max-waiting": router.max_waiting,
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


def _flags(arguments: Mapping[str, object]) -> list[str]:
    return [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
