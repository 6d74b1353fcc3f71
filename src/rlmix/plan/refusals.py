"""Everything that makes a configuration impossible to place, told at once.

Pure. Each line says where, on which chip, why, and what works.
"""

from collections.abc import Iterator, Sequence

from rlmix.config.schema.pools import PoolConfig, records_experts
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import PlanError
from rlmix.plan.accelerators import ARCHITECTURES, CPU, architecture
from rlmix.plan.capabilities import Combination, Judgement, Row, judge, refusal_text
from rlmix.plan.engine_args import argument_faults
from rlmix.plan.fit import fit_faults
from rlmix.plan.matrix import ROWS
from rlmix.plan.model_facts import ModelFacts
from rlmix.plan.placement import Placement, mean_price


def refuse(lines: Sequence[str]) -> None:
    """Raise one error for all lines, without repeats.

    Raises:
        PlanError: there is any.
    """
    told = list(dict.fromkeys(lines))
    if len(told) == 1:
        raise PlanError(told[0])
    if told:
        raise PlanError("\n".join([f"{len(told)} problems", *(f"  {line}" for line in told)]))


def combination(
    pool: PoolConfig, config: TrainConfig, facts: ModelFacts, *, consistency: str | None = None
) -> Combination:
    """The pool as the matrix sees it."""
    return Combination(
        accelerator=pool.accelerator,
        architecture=architecture(config.accelerators[pool.accelerator]),
        weights=pool.weights,
        activations=pool.activations,
        kv=pool.kv,
        attention=pool.attention,
        linear_attention=pool.linear_attention,
        state=pool.state,
        moe=pool.moe,
        consistency=consistency or config.numerics.consistency,
        record_experts=str(
            records_experts(pool, routing_replay=config.algo.routing_replay)
        ).lower(),
        is_moe=facts.is_moe,
        is_hybrid=facts.is_hybrid,
    )


def routing_faults(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    """Experts are asked for, and the model has none."""
    if facts.is_moe:
        return
    if config.algo.routing_replay:
        yield (
            f"algo.routing_replay: got true, but {facts.name} has no experts to replay; set "
            "algo.routing_replay=false"
        )


def format_refusals(pool: PoolConfig, config: TrainConfig, facts: ModelFacts) -> tuple[Row, ...]:
    """Rows against the formats of an embedded pool: numbers that the chip's kernels do not compute.

    Kernels alone are not judged, since nothing of them runs here, and activations in fp32 are a
    reference that no chip has.
    """
    refusals = judge(combination(pool, config, facts), ROWS).refusals
    if pool.activations == "fp32":
        return ()
    return tuple(row for row in refusals if {"weights", "activations"} & set(row.when))


def embedded_faults(
    name: str, pool: PoolConfig, config: TrainConfig, facts: ModelFacts
) -> Iterator[str]:
    """Why an emulated pool would stand for numbers that no real one has."""
    for row in format_refusals(pool, config, facts):
        yield refusal_text(name, combination(pool, config, facts), row)
    if pool.tp > 1 and (facts.heads % pool.tp or _is_uneven(facts.kv_heads, pool.tp)):
        yield (
            f"pools.{name}.tp: got {pool.tp}, but {facts.name} has {facts.heads} query heads and "
            f"{facts.kv_heads} key heads, which {pool.tp} processes cannot share; use 1"
        )
    if pool.ep > 1 and facts.experts % pool.ep:
        yield (
            f"pools.{name}.ep: got {pool.ep}, but {facts.name} has {facts.experts} experts, which "
            f"{pool.ep} processes cannot share; use 1"
        )


def _is_uneven(kv_heads: int, tp: int) -> bool:
    """Neither holds every process whole key heads, nor every key head whole processes."""
    return kv_heads % tp != 0 and tp % kv_heads != 0


def judged(pool: PoolConfig, config: TrainConfig, facts: ModelFacts) -> Judgement:
    return judge(combination(pool, config, facts), ROWS)


def pool_faults(
    name: str,
    pool: PoolConfig,
    config: TrainConfig,
    facts: ModelFacts,
    placement: Placement,
) -> Iterator[str]:
    """Why a pool of real servers cannot run."""
    chip = config.accelerators[pool.accelerator]
    if (kind := architecture(chip)) not in ARCHITECTURES:
        yield (
            f"accelerators.{pool.accelerator}.compute_capability: got {chip.compute_capability} "
            f"({kind}), of which no launch profile is known; pools of real servers stand on 8.0, "
            f"9.0, 10.x or 12.x, or null for an NPU; give pools.{name}.accelerator another one"
        )
        return
    seen = combination(pool, config, facts)
    for row in judge(seen, ROWS).refusals:
        yield refusal_text(name, seen, row)
    yield from argument_faults(name, pool, is_moe=facts.is_moe)
    context_tokens = config.session.max_context_tokens
    if kind == CPU:
        if pool.tp > 1:
            yield f"pools.{name}.tp: got {pool.tp} on {pool.accelerator}, which has one; use 1"
        if facts.is_hybrid:
            yield (
                f"pools.{name}.accelerator: got {pool.accelerator}, and SGLang's CUDA wheel has no "
                f"CPU kernels for the gated-delta-net layers of {facts.name}; set another one, or "
                f"pools.{name}.engine=embedded with a smaller model"
            )
    elif pool.kv != "fp32" and (not facts.is_hybrid or pool.state != "none"):
        yield from fit_faults(name, pool, chip, facts, context_tokens=context_tokens)
    if facts.max_context_tokens is not None and context_tokens > facts.max_context_tokens:
        yield (
            f"session.max_context_tokens: got {context_tokens}, but {facts.name} was made for "
            f"{facts.max_context_tokens}; set session.max_context_tokens="
            f"{facts.max_context_tokens}"
        )
    if pool.usd_per_hour is None:
        nodes = placement.pools.get(name, ())
        if mean_price(nodes, placement.usd_per_hour, chip.usd_per_hour) is None:
            yield (
                f"pools.{name}.usd_per_hour: no public price of {pool.accelerator} is known; set "
                f"accelerators.{pool.accelerator}.usd_per_hour=PRICE"
            )
