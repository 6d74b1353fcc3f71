"""What a configuration asks a planner and a simulator: the market, the scenario, the fleets.

Invariant: all fleets of one comparison meet the same trainer, the same sessions, the same seed, the
same prices and the same limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlmix.config.schema.train import TrainConfig
from rlmix.plan.model_facts import REFERENCE, ModelFacts, bundled_facts
from rlmix.plan.runplan import RunPlan
from rlmix.scaling.compare import Fleet, Market, given_fleet, planned_fleet, scaled_fleet
from rlmix.scaling.costs import SECONDS_PER_HOUR
from rlmix.scaling.demand import TrainerNeed
from rlmix.scaling.modelled import (
    fleet_limits,
    homogeneous_models,
    policy_rules,
    pool_models,
    price_of,
    session_shape,
    trainer_step_s,
)
from rlmix.scaling.policy import FleetLimits, PolicyRules
from rlmix.scaling.simulated_replicas import LoadTable
from rlmix.scaling.simulator import Scenario

MIXED, PLANNED = "mixed", "planned"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A configuration, made ready for planner and simulator."""

    market: Market
    scenario: Scenario
    rules: PolicyRules
    today: Mapping[str, int]
    """Pool of the configuration -> its replicas."""
    rivals: tuple[str, ...]
    """Homogeneous fleets, each of one pool of that name."""


def request_of(
    config: TrainConfig,
    plan: RunPlan,
    facts: ModelFacts,
    *,
    quota_gpus: Mapping[str, int] | None = None,
) -> Request:
    """Args:
        facts: of the run's model; emulated fleets stand for the reference model.
        quota_gpus: accelerators that can be had, in place of the inventory's.
    Raises:
        PlanError: a price is missing, or nothing can be modelled.
    """
    assumed = config.scaling.simulate
    shape = session_shape(assumed)
    modelled_facts = bundled_facts(REFERENCE) if plan.is_modelled else facts
    pools = pool_models(plan, config, facts, shape)
    rivals = homogeneous_models(config, modelled_facts, shape)
    limits = fleet_limits(config, plan, list(pools))
    if quota_gpus is not None:
        limits = replace(limits, quota_gpus={**limits.quota_gpus, **quota_gpus})
    need = TrainerNeed(
        sessions_per_step=config.loop.sessions_per_step,
        step_s=trainer_step_s(config, modelled_facts, shape),
        max_staleness=config.loop.max_staleness,
        session_s=0.0,
    )
    market = Market(
        tables={name: LoadTable(model, shape) for name, model in {**pools, **rivals}.items()},
        shape=shape,
        need=need,
        limits=limits,
    )
    trainer_price = price_of(
        config.accelerators[assumed.trainer_accelerator],
        name=assumed.trainer_accelerator,
        prices=assumed.prices,
    )
    duration_s = assumed.hours * SECONDS_PER_HOUR
    scenario = Scenario(
        name=MIXED,
        replicas={},
        shape=shape,
        prompt_tokens=assumed.prompt_tokens,
        turns_spread=assumed.turns_spread,
        sessions_per_step=need.sessions_per_step,
        group_size=config.loop.group_size,
        max_staleness=need.max_staleness,
        step_s=need.step_s,
        trainer_usd_per_hour=assumed.trainer_gpus * trainer_price,
        burst_factor=assumed.burst_factor,
        max_sessions=assumed.max_sessions,
        duration_s=duration_s,
        warm_up_s=assumed.warm_up_frac * duration_s,
        losses_per_day=assumed.losses_per_day,
        drain_s=config.scaling.drain_s,
        queue_timeout_s=config.router.queue_timeout_s,
        every_s=config.scaling.every_s,
        rules=None,
        limits=limits,
        seed=config.run.seed,
        batch_frac=assumed.batch_frac,
    )
    return Request(
        market=market,
        scenario=scenario,
        rules=policy_rules(config.scaling),
        today={name: plan.pools[name].replicas for name in pools},
        rivals=tuple(rivals),
    )


def fleets_of(asked: Request) -> list[Fleet]:
    """The configuration's mix at the size that the demand asks for, the planner's, and one of each
    rival. The planner may take what the mix and the rivals are made of."""
    market = asked.market
    free = replace(market, limits=FleetLimits(
        pools={}, quota_gpus=market.limits.quota_gpus, usd_per_hour=market.limits.usd_per_hour
    ))  # fmt: skip
    mixed = scaled_fleet(MIXED, asked.today, free)
    planned = planned_fleet(PLANNED, [*asked.today, *asked.rivals], free)
    return [mixed, planned, *(planned_fleet(name, [name], free) for name in asked.rivals)]


def todays_fleet(asked: Request) -> Fleet:
    """Exactly what the configuration has."""
    return given_fleet("today", asked.today, asked.market)
