"""What an evaluation of a policy starts: the eval pool in BF16, and nothing else of a run."""

from pathlib import Path

import pytest

from rlmix.cli.train import plan_of
from rlmix.config.compose import load_config
from rlmix.core.errors import PlanError
from rlmix.evals.serving import Serving, served_config, served_plan
from rlmix.loop.preflight import start_faults
from rlmix.model.bundle import resolve_model
from rlmix.observe.run_dir import RunDir

MODEL = resolve_model("bundled:tiny")


def test_the_pool_is_the_first_embedded_one_in_bf16_whatever_the_run_uses(tmp_path: Path) -> None:
    config = load_config("train", ["pools=six", "eval.replicas=3"]).config
    plan = served_plan(plan_of(config), config)
    assert [(name, pool.replicas) for name, pool in plan.pools.items()] == [("eval", 3)]
    with RunDir.create(tmp_path, "r") as run:
        facts = Serving(plan, config, run, store=tmp_path / "w", model_dir=MODEL).engine_facts()
    assert (facts["engine"], facts["replicas"]) == ("embedded", 3)
    assert (facts["weights"], facts["kv"]) == ("bf16", "bf16")
    assert facts["saturation"] == {"places": 3 * 32, "looks": 0}


def test_real_servers_in_bf16_serve_by_the_same_code(tmp_path: Path) -> None:
    config = load_config("train", ["experiment=tiny_sglang", "~pools.b200"]).config
    plan = served_plan(plan_of(config), config)
    with RunDir.create(tmp_path, "r") as run:
        facts = Serving(plan, config, run, store=tmp_path / "w", model_dir=MODEL).engine_facts()
    assert (facts["engine"], facts["replicas"], facts["kv"]) == ("sglang", 1, "bf16")
    assert facts["version"] == "0.5.23"


def test_tasks_and_trainer_of_a_run_are_not_asked_for(tmp_path: Path) -> None:
    """A run on a public set needs its folder; judging its checkpoints does not."""
    config = load_config("train", ["tasks.source=mimo", "trainer.device=h100"]).config
    plan = served_plan(plan_of(config), config)
    assert any("tasks.path=null" in fault for fault in start_faults(plan, config))
    assert start_faults(plan, served_config(config), devices=tmp_path) == []


def test_a_fleet_without_a_pool_in_bf16_is_told_in_one_sentence() -> None:
    config = load_config(
        "train",
        [
            "experiment=tiny_sglang", "~pools.b200", "pools.sglang.engine=sglang_external",
            "pools.sglang.urls=[http://10.0.0.7:1]",
        ],
    ).config  # fmt: skip
    with pytest.raises(
        PlanError, match=r"^agent=policy: an evaluation is served in BF16.*add such"
    ):
        served_plan(plan_of(config), config)
