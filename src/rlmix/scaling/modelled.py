"""Replicas, sessions and a trainer as a plan models them: what planner and simulator start from.

Nothing here was measured: steps follow the roofline of `plan.speed`, memory that of `plan.memory`.
Emulated pools are modelled with the reference model on the accelerators that they stand for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmix.config.schema.pools import AcceleratorConfig
from rlmix.config.schema.scaling import ScalingConfig, SimulateConfig
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import PlanError
from rlmix.plan.accelerators import NO_LABEL, peak_tflops
from rlmix.plan.memory import RUNTIME_BYTES, STATE_SLOTS_PER_REQUEST, kv_bytes_held
from rlmix.plan.model_facts import REFERENCE, ModelFacts, bundled_facts
from rlmix.plan.runplan import PoolPlan, RunPlan
from rlmix.plan.speed import (
    BANDWIDTH_REACHED_FRAC,
    FLOPS_REACHED_FRAC,
    Numbers,
    step_bytes,
)
from rlmix.router.step_model import roofline_prior
from rlmix.scaling.policy import FleetLimits, PolicyRules, PoolLimits
from rlmix.scaling.service import ReplicaModel, SessionShape
from rlmix.scaling.swap import SwapRules

TRAINER_REACHED_FRAC = 0.2
"""Share of the peak matrix rate that training of a sparse model reaches. Assumed."""
TRAINER_FLOPS_PER_PARAM = 8.0
"""Of a token: 2 forward, 4 backward, 2 for activations that are computed again."""

HOMOGENEOUS = (
    ("bf16", "bf16", "bf16"),
    ("bf16", "bf16", "fp8"),
    ("nvfp4:experts", "bf16", "fp8"),
)
"""(weight view, activations, KV cache) of the fleets of one accelerator."""
HOMOGENEOUS_MEMORY_FRAC = 0.8
HOMOGENEOUS_MAX_RUNNING = 32
"""As in `conf/pool/sglang_b200_bf16.yaml` and its siblings."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """What a replica computes in, and how much of its memory it may use."""

    numbers: Numbers
    tp: int
    memory_frac: float
    max_running: int


def session_shape(assumed: SimulateConfig) -> SessionShape:
    """The mean session: it grows by output and observation with every turn until the mean context
    is the one asked for."""
    grows = assumed.output_tokens + assumed.observation_tokens
    turns = max(1.0, 2.0 * (assumed.context_tokens - assumed.prompt_tokens) / grows)
    return SessionShape(
        turns=turns,
        output_tokens=float(assumed.output_tokens),
        new_tokens=assumed.observation_tokens + assumed.prompt_tokens / turns,
        context_tokens=float(assumed.context_tokens),
        tool_s=assumed.tool_s,
    )


def trainer_step_s(config: TrainConfig, facts: ModelFacts, shape: SessionShape) -> float:
    """The trainer's own time for a step: given, or all its tokens at a share of the peak rate.

    Worked: 1,024 sessions of 63,488 tokens, 2.95e9 active parameters, 16 x 2.25e15 operations a
    second: 8 * 2.95e9 * 6.5e7 / (0.2 * 3.6e16) = 213 s.
    """
    assumed = config.scaling.simulate
    if assumed.trainer_step_s is not None:
        return assumed.trainer_step_s
    chip = config.accelerators[assumed.trainer_accelerator]
    tokens = config.loop.sessions_per_step * (2.0 * shape.context_tokens - assumed.prompt_tokens)
    rate = TRAINER_REACHED_FRAC * assumed.trainer_gpus * chip.bf16_tflops * 1e12
    return TRAINER_FLOPS_PER_PARAM * facts.active_params * tokens / rate


def price_of(chip: AcceleratorConfig, *, name: str, prices: str) -> float:
    """US dollars an hour of one accelerator.

    Raises:
        PlanError: nobody knows that price.
    """
    key = "usd_per_hour" if prices == "list" else "market_usd_per_hour"
    price: float | None = getattr(chip, key)
    if price is None:
        raise PlanError(
            f"accelerators.{name}.{key}: null, and scaling.simulate.prices={prices} needs it; set "
            "the price, or choose the other prices"
        )
    return price


def pool_models(
    plan: RunPlan, config: TrainConfig, facts: ModelFacts, shape: SessionShape
) -> dict[str, ReplicaModel]:
    """One replica of each pool of the plan. Pools that hold no session of this shape are in it and
    serve nothing; those on a CPU without emulation are left out.

    Raises:
        PlanError: a price is missing, or no pool can be modelled.
    """
    models = {}
    for name, pool in plan.pools.items():
        chip = config.accelerators[pool.accelerator]
        if chip.ray_label == NO_LABEL:
            continue
        own = config.pools[name].usd_per_hour
        is_list = config.scaling.simulate.prices == "list"
        price = (
            own
            if own is not None and is_list
            else price_of(chip, name=pool.accelerator, prices=config.scaling.simulate.prices)
        )
        models[name] = replica_model(
            name,
            chip,
            _formats(pool, memory_frac=config.pools[name].memory_frac),
            accelerator=pool.accelerator,
            facts=bundled_facts(REFERENCE) if pool.is_emulated else facts,
            price=price,
            shape=shape,
            assumed=config.scaling.simulate,
        )
    if not models:
        raise PlanError(
            "scale pools: no pool stands on an accelerator, so nothing can be modelled; choose "
            "pools=six or experiment=qwen36_mixed"
        )
    return models


def homogeneous_models(
    config: TrainConfig, facts: ModelFacts, shape: SessionShape
) -> dict[str, ReplicaModel]:
    """The accelerator of `scaling.simulate.against` in each format that it computes."""
    name = config.scaling.simulate.against
    chip = config.accelerators[name]
    models = {}
    for weights, activations, kv in HOMOGENEOUS:
        view = weights.split(":")[0]
        if view == "nvfp4" and chip.nvfp4_tflops is None:
            continue
        title = f"{name}_{view}" + ("" if kv == view else f"_{kv}kv")
        formats = Formats(
            numbers=Numbers(weights=weights, activations=activations, kv=kv, state="bf16"),
            tp=1,
            memory_frac=HOMOGENEOUS_MEMORY_FRAC,
            max_running=HOMOGENEOUS_MAX_RUNNING,
        )
        models[title] = replica_model(
            title,
            chip,
            formats,
            accelerator=name,
            facts=facts,
            price=price_of(chip, name=name, prices=config.scaling.simulate.prices),
            shape=shape,
            assumed=config.scaling.simulate,
        )
    return models


def replica_model(
    name: str,
    chip: AcceleratorConfig,
    formats: Formats,
    *,
    accelerator: str,
    facts: ModelFacts,
    price: float,
    shape: SessionShape,
    assumed: SimulateConfig,
) -> ReplicaModel:
    """One replica on `formats.tp` accelerators of a kind; its batch is what memory holds at the
    shape's context, up to the limit."""
    numbers, tp = formats.numbers, formats.tp
    kv_bytes = kv_bytes_held(facts, kv=numbers.kv, tp=tp)
    state_bytes = facts.state_bytes(numbers.state)
    room = tp * (formats.memory_frac * chip.memory_gb * 1e9 - RUNTIME_BYTES)
    room -= facts.weight_bytes(numbers.weights)
    each = (shape.context_tokens + shape.output_tokens) * kv_bytes
    each += STATE_SLOTS_PER_REQUEST * state_bytes
    fits = max(int(room // each), 0)
    most = formats.max_running if assumed.max_running is None else assumed.max_running
    running = max(min(most, fits), 1)
    kv_room = room - running * STATE_SLOTS_PER_REQUEST * state_bytes
    bandwidth = tp * chip.bandwidth_tb_s * 1e12
    peak = tp * peak_tflops(chip, numbers.activations) * 1e12
    token_flops = 2.0 * facts.active_params + facts.attention_flops * shape.context_tokens
    return ReplicaModel(
        pool=name,
        accelerator=accelerator,
        view=numbers.weights,
        gpus=tp,
        usd_per_hour=tp * price,
        max_running=running,
        kv_tokens=max(int(kv_room // kv_bytes), 0) if fits else 0,
        state_tokens=state_bytes / kv_bytes,
        max_context_tokens=facts.max_context_tokens or 1 << 30,
        step_s=_StepTable(facts, numbers, tp=tp, most=running, bandwidth=bandwidth, peak=peak),
        prefill_token_s=token_flops / (FLOPS_REACHED_FRAC * peak),
        router_model=roofline_prior(
            bandwidth_bytes_s=bandwidth,
            weight_bytes=step_bytes(facts, numbers, batch=running, context_tokens=0, tp=tp)
            - running * 2 * state_bytes,
            kv_bytes_per_token=kv_bytes,
            state_bytes=state_bytes,
            flops_per_token=token_flops,
            peak_flops_s=peak,
        ),
        cold_start_s=assumed.cold_start_s,
    )


def fleet_limits(
    config: TrainConfig, plan: RunPlan, names: Sequence[str] | None = None
) -> FleetLimits:
    """Floors and ceilings of the pools, machines of the inventory less the trainer's, budget."""
    pools = {}
    for name in names if names is not None else list(plan.pools):
        pool = config.pools[name]
        floor = min(pool.min_replicas, pool.replicas)
        pools[name] = PoolLimits(floor=floor, ceiling=pool.max_replicas, may_be_zero=floor == 0)
    quota: dict[str, int] = {}
    if config.inventory.nodes:
        for pool_plan in plan.pools.values():
            held = quota.get(pool_plan.accelerator, 0)
            quota[pool_plan.accelerator] = held + pool_plan.gpus
        for node, left in plan.unused.items():
            accelerator = _node_accelerator(node, config)
            quota[accelerator] = quota.get(accelerator, 0) + left
    return FleetLimits(
        pools=pools, quota_gpus=quota, usd_per_hour=config.scaling.budget_usd_per_hour
    )


def policy_rules(scaling: ScalingConfig) -> PolicyRules:
    return PolicyRules(
        headroom_frac=scaling.headroom_frac,
        surplus_frac=scaling.surplus_frac,
        out_delay_s=scaling.out_delay_s,
        in_delay_s=scaling.in_delay_s,
        in_cold_starts=scaling.in_cold_starts,
        zero_delay_s=scaling.zero_delay_s,
        most_changes=scaling.most_changes,
        wait_high_frac=scaling.wait_high_frac,
        kv_high_frac=scaling.kv_high_frac,
        queued_high_frac=scaling.queued_high_frac,
        reprefill_high_frac=scaling.reprefill_high_frac,
        swap=None
        if scaling.swap_payback_s is None
        else SwapRules(payback_s=scaling.swap_payback_s, drain_s=scaling.drain_s),
    )


def _node_accelerator(node: str, config: TrainConfig) -> str:
    """Machines are called after their entry of the inventory, with a number behind it."""
    nodes: Mapping = config.inventory.nodes
    entry = max((name for name in nodes if node.startswith(name)), key=len)
    accelerator: str = nodes[entry].accelerator
    return accelerator


def _formats(pool: PoolPlan, *, memory_frac: float) -> Formats:
    view = f"{pool.weights}:experts" if pool.scope == "experts" else pool.weights
    state = "bf16" if pool.state == "none" else pool.state
    return Formats(
        numbers=Numbers(weights=view, activations=pool.activations, kv=pool.kv, state=state),
        tp=pool.tp,
        memory_frac=memory_frac,
        max_running=pool.max_running,
    )


class _StepTable:
    """`plan.speed` at whole batches, straight lines between: asked millions of times."""

    def __init__(
        self,
        facts: ModelFacts,
        numbers: Numbers,
        *,
        tp: int,
        most: int,
        bandwidth: float,
        peak: float,
    ) -> None:
        reached = BANDWIDTH_REACHED_FRAC * bandwidth
        self._moved_s = [
            step_bytes(facts, numbers, batch=batch, context_tokens=0, tp=tp) / reached
            for batch in range(most + 2)
        ]
        self._token_s = kv_bytes_held(facts, kv=numbers.kv, tp=tp) / reached
        self._request_flop_s = 2.0 * facts.active_params / (FLOPS_REACHED_FRAC * peak)
        self._token_flop_s = facts.attention_flops / (FLOPS_REACHED_FRAC * peak)

    def __call__(self, batch: float, context_tokens: float) -> float:
        whole = min(int(batch), len(self._moved_s) - 2)
        low, high = self._moved_s[whole], self._moved_s[whole + 1]
        move_s = low + (batch - whole) * (high - low) + batch * context_tokens * self._token_s
        flop_s = batch * (self._request_flop_s + context_tokens * self._token_flop_s)
        return max(move_s, flop_s)
