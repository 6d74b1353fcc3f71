"""From a configuration to models, demand and fleets: worked on the reference run."""

import functools

import pytest

from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import PlanError
from rlmix.plan.build import build_plan
from rlmix.plan.speed import Numbers, decode_step_s
from rlmix.scaling.compare import Fleet, given_fleet, planned_fleet
from rlmix.scaling.modelled import session_shape, trainer_step_s
from rlmix.scaling.scenarios import Request, fleets_of, request_of, todays_fleet


@functools.cache
def config_of(*overrides: str) -> TrainConfig:
    return load_config("train", ["experiment=qwen36_mixed", *overrides]).config


@functools.cache
def asked_of(*overrides: str, b200: int | None = None) -> Request:
    config = config_of(*overrides)
    facts = facts_of(config)
    plan = build_plan(config, facts=facts, python="python")
    quota = None if b200 is None else {"b200": b200}
    return request_of(config, plan, facts, quota_gpus=quota)


def by_name(asked: Request) -> dict[str, Fleet]:
    return {fleet.name: fleet for fleet in fleets_of(asked)}


def test_a_session_grows_until_its_mean_context_is_the_one_asked_for() -> None:
    shape = session_shape(config_of().scaling.simulate)
    # (32768 - 2048) x 2 / (400 + 400) turns; the prompt is prefilled once.
    assert shape.turns == pytest.approx(76.8)
    assert shape.new_tokens == pytest.approx(400 + 2048 / 76.8)
    assert 2048 + shape.turns * 800 / 2 == pytest.approx(shape.context_tokens)


def test_the_trainers_step_is_its_tokens_over_a_share_of_its_peak() -> None:
    config = config_of()
    facts = facts_of(config)
    shape = session_shape(config.scaling.simulate)
    tokens = 1024 * (2 * 32768 - 2048)
    wanted = 8 * facts.active_params * tokens / (0.2 * 16 * 2250e12)
    assert trainer_step_s(config, facts, shape) == pytest.approx(wanted)
    given = config_of("scaling.simulate.trainer_step_s=60")
    assert trainer_step_s(given, facts, shape) == 60.0


def test_steps_are_those_of_the_plan_at_whole_batches() -> None:
    model = asked_of().market.model("h100_fp8")
    config = config_of()
    chip, pool = config.accelerators["h100"], config.pools["h100_fp8"]
    numbers = Numbers(weights="fp8", activations=pool.activations, kv=pool.kv, state=pool.state)
    for batch in (1, 7, model.max_running):
        wanted = decode_step_s(
            facts_of(config), chip, numbers, tp=1, batch=batch, context_tokens=32_768
        )
        assert model.step_s(float(batch), 32_768.0) == pytest.approx(wanted)
    low, high = model.step_s(7.0, 32_768.0), model.step_s(8.0, 32_768.0)
    assert model.step_s(7.5, 32_768.0) == pytest.approx((low + high) / 2)


def test_prices_of_the_market_are_lower_and_the_trainer_pays_them_too() -> None:
    market = asked_of("scaling.simulate.prices=market")
    assert market.market.model("h100_bf16").usd_per_hour == pytest.approx(2 * 2.40)
    assert market.scenario.trainer_usd_per_hour == pytest.approx(16 * 3.49)
    assert asked_of().scenario.trainer_usd_per_hour == pytest.approx(16 * 5.0)
    npu = load_config("train", ["scaling.simulate.against=ascend_910c"]).config
    facts = facts_of(npu)
    with pytest.raises(PlanError, match=r"accelerators\.ascend_910c\.usd_per_hour: null"):
        request_of(npu, build_plan(npu, facts=facts, python="python"), facts)


def test_fleets_are_bought_for_the_demand_of_one_trainer() -> None:
    asked = asked_of()
    # 1,024 sessions in 212.8 s: 4.81 a second, with a tenth to spare.
    for fleet in fleets_of(asked):
        assert fleet.needed_per_s == pytest.approx(1024 / asked.scenario.step_s)
        assert fleet.supply_per_s >= 1.1 * fleet.needed_per_s - 1e-9 or fleet.name == "mixed"
        assert not fleet.missing
    assert by_name(asked)["mixed"].supply_per_s >= fleet.needed_per_s


@pytest.mark.parametrize("prices", ["list", "market"])
@pytest.mark.parametrize("context", [8192, 32_768, 65_536])
@pytest.mark.parametrize("b200", [None, 8])
def test_the_planned_mix_is_never_dearer_than_a_homogeneous_fleet(
    prices: str, context: int, b200: int | None
) -> None:
    fleets = by_name(
        asked_of(
            f"scaling.simulate.prices={prices}", f"scaling.simulate.context_tokens={context}",
            b200=b200,
        )
    )  # fmt: skip
    planned = fleets["planned"]
    assert not planned.missing
    for name, fleet in fleets.items():
        if not fleet.missing and fleet.needed_per_s >= planned.needed_per_s - 1e-9:
            assert planned.usd_per_hour <= fleet.usd_per_hour + 1e-6, name
    if b200 is not None:
        assert fleets["b200_bf16"].missing.endswith("at their limit: quota of b200 (8)")
        assert sum(n for name, n in planned.replicas.items() if name.startswith("b200")) <= 8


def test_of_equally_dear_fleets_the_one_with_the_shortest_sessions_is_planned() -> None:
    """At 64K and list prices 35 B300s with 5 B200s cost what 47 B200s do, 235 USD an hour."""
    asked = asked_of("scaling.simulate.context_tokens=65536")
    market = asked.market
    planned = fleets_of(asked)[1]
    alone = planned_fleet("b200", ["b200"], market)
    assert planned.usd_per_hour == pytest.approx(alone.usd_per_hour)
    assert market.session_s(planned.replicas) <= market.session_s(alone.replicas)
    slower = {"b300": 35, "b200": 5}
    assert given_fleet("x", slower, market).usd_per_hour == pytest.approx(planned.usd_per_hour)
    assert market.session_s(slower) > 1.2 * market.session_s(planned.replicas)


def test_quotas_are_the_machines_of_the_inventory_without_the_trainers() -> None:
    asked = asked_of("inventory=qwen36_mixed", "pools.b200.replicas=6")
    assert asked.market.limits.quota_gpus["b200"] == 8
    assert asked.market.limits.quota_gpus["h100"] == 16
    assert asked_of().market.limits.quota_gpus == {}
    assert todays_fleet(asked).replicas["b200"] == 6


def test_a_context_beyond_the_models_is_served_by_nothing_and_said() -> None:
    asked = asked_of("scaling.simulate.context_tokens=300000")
    fleets = by_name(asked)
    assert all(asked.market.per_s(name) == 0.0 for name in asked.market.tables)
    assert fleets["planned"].missing.endswith("at their limit: no pool can serve it")
    assert fleets["mixed"].missing == "no pool of it serves this context"
    assert sum(fleets["planned"].replicas.values()) == 0
