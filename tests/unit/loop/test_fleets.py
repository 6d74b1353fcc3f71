"""From the plan to the specs of replicas: who holds which key, and who evaluates."""

from pathlib import Path

import pytest

from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.core.errors import ConfigError, LaunchError
from rlmix.loop.fleets import eval_fleet, further_replica, training_fleet
from rlmix.model.bundle import resolve_model
from rlmix.observe.run_dir import RunDir
from rlmix.plan.build import ADMIN_TOKEN_VARIABLE, TOKEN_VARIABLE, build_plan
from rlmix.pools.spec import FleetSpec, ReplicaSpec

MODEL = resolve_model("bundled:tiny")


def fleets(
    tmp_path: Path, *overrides: str, experiment: str = "tiny_sglang"
) -> tuple[FleetSpec, FleetSpec]:
    """Of the sessions and of the evaluation."""
    config = load_config("train", [f"experiment={experiment}", *overrides]).config
    plan = build_plan(config, facts=facts_of(config), python="python", sglang_python="/s/python")
    with RunDir.create(tmp_path, "r", overrides=[], config_yaml="", plan=plan.to_dict()) as run:
        return (
            training_fleet(plan, config, run, model_dir=MODEL),
            eval_fleet(plan, config, run, store=run.weights, model_dir=MODEL),
        )


def test_only_what_rlmix_starts_gets_the_run_s_keys(tmp_path: Path) -> None:
    training, _ = fleets(tmp_path)
    real, emulated = training.replicas
    assert (real.name, real.engine, real.url) == ("sglang-0", "sglang", None)
    assert (real.token_env, real.admin_token_env) == (TOKEN_VARIABLE, ADMIN_TOKEN_VARIABLE)
    assert real.argv[0] == "/s/python"
    assert real.expected["version"] == "0.5.23"
    assert real.log_path.name == "engine-sglang-0.log"
    assert (emulated.engine, emulated.token_env, emulated.admin_token_env) == (
        "embedded", TOKEN_VARIABLE, None,
    )  # fmt: skip


def test_an_external_server_is_met_with_keys_of_its_own(tmp_path: Path) -> None:
    training, _ = fleets(
        tmp_path, "pools.sglang.engine=sglang_external", "sglang.api_key_env=THEIRS",
        "pools.sglang.replicas=2", "pools.sglang.urls=[http://10.0.0.7:1,http://10.0.0.8:1]",
    )  # fmt: skip
    joined = [replica for replica in training.replicas if replica.pool == "sglang"]
    assert [replica.url for replica in joined] == ["http://10.0.0.7:1", "http://10.0.0.8:1"]
    assert {(replica.token_env, replica.admin_token_env) for replica in joined} == {
        ("THEIRS", "SGLANG_ADMIN_KEY")
    }


def test_an_embedded_pool_evaluates_and_real_servers_only_as_many_as_they_are(
    tmp_path: Path,
) -> None:
    _, evaluation = fleets(tmp_path / "mixed")
    assert [replica.engine for replica in evaluation.replicas] == ["embedded", "embedded"]
    _, evaluation = fleets(tmp_path / "real", "~pools.b200")
    assert [(replica.name, replica.view) for replica in evaluation.replicas] == [("eval-0", "bf16")]
    assert evaluation.replicas[0].engine == "sglang"


def test_without_a_pool_in_bf16_nothing_is_evaluated(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"set loop\.eval_tasks=0"):
        fleets(
            tmp_path, "~pools.b200", "pools.sglang.engine=sglang_external",
            "pools.sglang.urls=[http://10.0.0.7:1]",
        )  # fmt: skip


def test_an_exact_evaluation_keeps_the_cache_that_the_trainer_computes_with(
    tmp_path: Path,
) -> None:
    """With everything in float32 a BF16 cache would be refused, after all of the training."""
    formats = [
        f"pools.{pool}.{key}"
        for pool in ("b200", "a100")
        for key in ("weights=bf16", "activations=fp32", "kv=fp32")
    ]
    exact = ("pools=two", "numerics.consistency=exact", *formats)
    _, evaluation = fleets(tmp_path, *exact, experiment="tiny")
    argv = evaluation.replicas[0].argv
    told = {flag: argv[argv.index(flag) + 1] for flag in ("--weights", "--activations", "--kv")}
    assert told == {"--weights": "bf16", "--activations": "fp32", "--kv": "fp32"}
    assert evaluation.replicas[0].expected["kv"] == "fp32"


def test_a_real_server_s_key_names_its_view(tmp_path: Path) -> None:
    training, _ = fleets(tmp_path)
    assert training.replicas[0].expected["view"] == "bf16"


def further(tmp_path: Path, pool: str, index: int, *overrides: str) -> ReplicaSpec:
    config = load_config("train", list(overrides)).config
    plan = build_plan(config, facts=facts_of(config), python="python", sglang_python="/s/python")
    with RunDir.create(tmp_path, f"r{index}", overrides=[], config_yaml="", plan={}) as run:
        return further_replica(plan, config, run, pool, index)


def test_a_pool_grows_as_far_as_there_are_places(tmp_path: Path) -> None:
    # Embedded engines take what the machine has.
    assert further(tmp_path, "a100", 7, "experiment=tiny").name == "a100-7"
    # Accelerators and servers are those of the plan.
    real = ("experiment=tiny", "+pool@pools.real=sglang_h100_bf16", "pools.real.replicas=2")
    assert further(tmp_path, "real", 1, *real).env["CUDA_VISIBLE_DEVICES"]
    with pytest.raises(ConfigError, match="a free accelerator for 2 replicas of real"):
        further(tmp_path, "real", 2, *real)
    external = (
        "experiment=tiny_sglang", "pools.sglang.engine=sglang_external",
        "pools.sglang.urls=[http://10.0.0.7:1]",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="a free server for 1 replicas of sglang"):
        further(tmp_path, "sglang", 3, *external)
    # A Ray cluster may have more machines than the plan.
    spec = further(tmp_path, "real", 4, *real, "launch.address=10.0.0.1:6379")
    assert spec.needs is not None
    assert "CUDA_VISIBLE_DEVICES" not in spec.env
