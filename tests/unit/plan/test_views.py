"""Scope of weight views: one key, and bytes, published list and folders that follow it."""

from pathlib import Path

import pytest

from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.core.errors import PlanError
from rlmix.loop.fleets import views_of
from rlmix.plan.build import build_plan
from rlmix.plan.model_facts import ModelFacts, facts_from_config
from rlmix.plan.runplan import RunPlan
from tests.unit.plan.qwen36 import configured, planned

DENSE = facts_from_config(
    "dense",
    {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    },
)  # fmt: skip


def small(*overrides: str) -> tuple[RunPlan, ModelFacts]:
    """Plan of the small run, and the sizes of the bundled policy."""
    config = load_config("train", ["experiment=tiny", *overrides]).config
    facts = facts_of(config)
    return build_plan(config, facts=facts, python="python"), facts


def refusal(*overrides: str, experiment: str = "qwen36_mixed") -> str:
    with pytest.raises(PlanError) as caught:
        planned(*overrides, experiment=experiment)
    return str(caught.value)


def test_real_servers_quantise_experts_and_embedded_ones_all() -> None:
    real = planned()
    assert {name: pool.scope for name, pool in real.pools.items() if pool.weights != "bf16"} == {
        "b300": "experts",
        "b200": "experts",
        "h200_fp8": "all",
        "h100_fp8": "all",
    }
    plan, _ = small()
    assert plan.pools["b200"].scope == "all"
    assert views_of(plan) == ("bf16", "nvfp4")


def test_a_model_without_experts_is_quantised_as_a_whole() -> None:
    config = configured("session.max_context_tokens=40000", experiment="qwen36_b200_nvfp4")
    plan = build_plan(config, facts=DENSE, python="python")
    assert plan.trainer.views == ("nvfp4",)
    config.pools["b200"].scope = "experts"
    with pytest.raises(PlanError, match=r"pools.b200.scope: got experts, but dense has none"):
        build_plan(config, facts=DENSE, python="python")


def test_memory_follows_the_scope() -> None:
    experts = planned(experiment="qwen36_b200_nvfp4").pools["b200"]
    whole = planned("pools.b200.scope=all", experiment="qwen36_b200_nvfp4").pools["b200"]
    assert experts.budget is not None
    assert whole.budget is not None
    # Attention, gated-delta-net and shared experts: 1.41e9 parameters at 2 instead of 0.5625 bytes.
    saved_gib = experts.budget.weights_gib - whole.budget.weights_gib
    assert saved_gib == pytest.approx(1.41e9 * 1.4375 / 2**30, rel=0.01)
    assert whole.budget.kv_tokens > experts.budget.kv_tokens


def test_pools_of_one_format_follow_the_one_that_says_a_scope() -> None:
    plan = planned("pools.b300.scope=all")
    assert plan.pools["b200"].scope == "all"
    assert "nvfp4" in plan.trainer.views
    assert "nvfp4:experts" not in plan.trainer.views


def test_two_scopes_of_one_format_are_refused() -> None:
    said = refusal("pools.b300.scope=all", "pools.b200.scope=experts")
    assert said == (
        "pools.b200.scope: pools of nvfp4 weights read one view, and their scopes differ (b300 "
        "all, b200 experts); set all to all"
    )
    assert "bf16 weights are not quantised" in refusal("pools.a100.scope=experts")


@pytest.mark.parametrize("scope", ["all", "experts"])
def test_the_published_folder_is_the_view_that_the_plan_counts(tmp_path: Path, scope: str) -> None:
    from safetensors.torch import load_file

    from rlmix.model.bundle import resolve_model
    from rlmix.weights.publish import publish_version
    from rlmix.weights.store import verify_version, version_dir

    plan, facts = small(f"pools.b200.scope={scope}")
    folder = resolve_model("bundled:tiny")
    state = load_file(folder / "model.safetensors")
    publish_version(state, version=0, store=tmp_path, views=views_of(plan), model_files=folder)
    published = version_dir(tmp_path, "nvfp4", 0)
    manifest = verify_version(published)
    assert manifest.facts["scope"] == scope
    written = sum(
        tensor.nbytes
        for file in published.glob("*.safetensors")
        for tensor in load_file(file).values()
    )
    (view,) = (view for view in plan.trainer.views if view.startswith("nvfp4"))
    # Beside what the plan counts: a float32 scale of each matrix.
    scales = 4 * manifest.facts["quantised_matrices"]
    assert written - scales == facts.weight_bytes(view)
