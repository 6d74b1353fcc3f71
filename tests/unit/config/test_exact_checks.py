"""Exact mode removes differences of order, not of formats."""

import pytest

from rlmix.config.compose import load_config
from rlmix.core.errors import ConfigError

FP32 = [
    f"pools.{name}.{key}"
    for name in ("b200", "a100")
    for key in ("weights=bf16", "activations=fp32", "kv=fp32")
]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config("train", overrides)
    return str(caught.value)


def test_all_pools_in_other_formats_are_named_at_once_with_both_ways_out() -> None:
    said = refusal("numerics.consistency=exact")
    for part in (
        "b300 (weights=nvfp4, kv=fp8)",
        "h100 (weights=fp8, activations=fp8, kv=fp8)",
        "a100 (kv=fp8)",
        "set weights, activations and kv of these pools to bf16",
        "experiment=exact",
        "or numerics.consistency=native",
    ):
        assert part in said


def test_only_the_pool_in_another_format_is_named() -> None:
    said = refusal("experiment=exact", "pools.h200.kv=fp8")
    assert "h200 (kv=fp8)" in said
    assert "h100" not in said


def test_the_exact_experiment_is_sound_and_stays_on_the_default_pools() -> None:
    config = load_config("train", ["experiment=exact"]).config
    assert set(config.pools) == set(load_config("train", []).config.pools)
    formats = {(p.weights, p.activations, p.kv) for p in config.pools.values()}
    assert formats == {("bf16", "bf16", "bf16")}
    assert config.loop.max_staleness == 0


def test_all_pools_may_round_nothing_but_not_some() -> None:
    assert load_config("train", ["numerics.consistency=exact", "pools=two", *FP32])
    said = refusal("numerics.consistency=exact", "pools=two", *FP32[:3], "pools.a100.kv=bf16")
    assert "b200 (activations=fp32, kv=fp32)" in said


def test_an_exact_embedded_replica_may_have_two_or_four_processes() -> None:
    assert load_config("train", ["experiment=exact", "pools.b200.tp=4", "pools.b200.ep=2"])
    assert "pools.b200.tp: got 3" in refusal("experiment=exact", "pools.b200.tp=3")
    assert "pools.b200.ep: got 4" in refusal(
        "experiment=exact", "pools.b200.tp=2", "pools.b200.ep=4"
    )
    assert "an embedded replica is one process" in refusal("pools.b200.tp=2")


def test_a_trainer_on_another_kind_of_machine_cannot_agree_with_embedded_pools() -> None:
    said = refusal("experiment=exact", "trainer.device=h100")
    assert "got exact with trainer.device=h100, but b300" in said
    assert "set trainer.device=cpu, or numerics.consistency=native" in said
