"""Replicas on machines, and what one machine's memory holds."""

import pytest

from rlmix.config.schema.pools import NodeConfig
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import PlanError
from rlmix.plan.build import build_plan
from rlmix.plan.memory import memory_budget
from rlmix.plan.model_facts import REFERENCE, bundled_facts
from rlmix.plan.placement import place
from tests.unit.plan.qwen36 import configured, planned

QWEN = bundled_facts(REFERENCE)


def node(accelerator: str, *, gpus: int = 8, count: int = 1) -> NodeConfig:
    return NodeConfig(accelerator=accelerator, gpus=gpus, count=count, usd_per_hour=None)


def with_nodes(config: TrainConfig, **nodes: NodeConfig) -> TrainConfig:
    config.inventory.nodes = dict(nodes)
    return config


def test_the_inventory_of_the_reference_run_is_used_up() -> None:
    plan = planned("inventory=qwen36_mixed")
    assert plan.unused == {}
    assert plan.trainer.nodes[0] == "b200_trainer-0"
    assert plan.trainer.nodes[31] == "b200_trainer-3"
    assert set(plan.pools["b200"].nodes) == {"b200-0"}
    assert plan.pools["h100_bf16"].nodes == ("h100-1",) * 4


def test_without_an_inventory_nothing_is_placed() -> None:
    plan = planned()
    assert plan.trainer.nodes == plan.pools["b200"].nodes == ()
    assert plan.unused == {}


def test_a_replica_stays_in_one_machine() -> None:
    # Three accelerators each: one pair and one left over, twice.
    config = configured("pools.h100_bf16.replicas=2", experiment="qwen36_mixed")
    config.pools = {"h100_bf16": config.pools["h100_bf16"]}
    config.trainer.device = "cpu"
    placement = place(with_nodes(config, small=node("h100", gpus=3, count=2)))
    assert placement.pools == {"h100_bf16": ("small-0", "small-1")}
    assert placement.unused == {"small-0": 1, "small-1": 1}


def test_what_does_not_fit_is_told_with_the_number_that_does() -> None:
    config = configured(experiment="qwen36_b200")
    with pytest.raises(PlanError) as caught:
        build_plan(with_nodes(config, few=node("b200", count=5)), facts=QWEN, python="python")
    # 40 accelerators: 32 for the trainer, 8 left for 42 replicas.
    assert str(caught.value) == (
        "pools.b200.replicas: wants 42 replicas b200, the inventory has room for 8; set "
        "pools.b200.replicas=8 or add machines to inventory.nodes"
    )


def test_machines_may_have_a_price_of_their_own() -> None:
    config = configured(experiment="qwen36_b200")
    dear = node("b200", count=10)
    cheap = NodeConfig(accelerator="b200", gpus=8, count=10, usd_per_hour=2.0)
    at_list = build_plan(with_nodes(config, all=dear), facts=QWEN, python="python")
    ours = build_plan(with_nodes(config, all=cheap), facts=QWEN, python="python")
    assert at_list.usd_per_hour == 42 * 5.0 + 32 * 5.0
    assert ours.usd_per_hour == 42 * 2.0 + 32 * 2.0
    assert at_list.unused == {"all-9": 6}


def test_memory_of_one_h100_in_fp8_worked_by_hand() -> None:
    config = configured()
    chip = config.accelerators["h100"]
    budget = memory_budget(
        QWEN, chip, weights="fp8", kv="fp8", state="fp32", tp=1, memory_frac=0.8, max_running=24
    )
    room = 0.8 * 85.5e9 - 2e9 - QWEN.weight_bytes("fp8")
    state = 5 * (15_728_640 * 4 + 1_474_560)
    assert budget.kv_tokens == int((room - 24 * state) // 10_240)
    assert budget.requests["8192"] == int(room // (8192 * 10_240 + state))
    assert budget.state_gib * 2**30 == pytest.approx(24 * state)
    assert budget.share_gib == pytest.approx(0.8 * 85.5e9 / 2**30)


def test_more_accelerators_than_kv_heads_store_the_cache_again() -> None:
    chip = configured().accelerators["h200"]
    pair, four = (
        memory_budget(
            QWEN, chip, weights="bf16", kv="fp8", state="fp32", tp=tp, memory_frac=0.8,
            max_running=1,
        )
        for tp in (2, 4)
    )  # fmt: skip
    # Twice the room and more, at twice the bytes for a token.
    assert four.kv_gib > 2 * pair.kv_gib
    assert four.kv_tokens < 1.5 * pair.kv_tokens


def test_a_price_of_the_machines_is_a_price() -> None:
    npu = "+pool@pools.npu=sglang_ascend_910c_bf16"
    priced = node("ascend_910c")
    priced.usd_per_hour = 1.5
    config = configured(npu, experiment="qwen36_b200")
    config.pools = {"npu": config.pools["npu"]}
    config.trainer.device = "cpu"
    plan = build_plan(with_nodes(config, npus=priced), facts=QWEN, python="python")
    assert plan.pools["npu"].usd_per_hour == 1.5 * plan.pools["npu"].gpus
    assert plan.pools["npu"].price_source == "inventory.nodes"
    with pytest.raises(PlanError, match="no public price of ascend_910c is known"):
        build_plan(with_nodes(config, npus=node("ascend_910c")), facts=QWEN, python="python")
