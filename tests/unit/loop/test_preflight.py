"""What a run of real servers needs here, told before anything starts."""

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.loop.fleets import evaluating_pool
from rlmix.loop.preflight import interpreter, launch_faults, start_faults
from rlmix.plan.build import build_plan


def faults(*overrides: str, devices: Path = Path("/dev")) -> list[str]:
    config = load_config("train", overrides).config
    plan = build_plan(config, facts=facts_of(config), python="python")
    return start_faults(plan, config, devices=devices)


def test_a_run_of_embedded_pools_needs_nothing() -> None:
    assert faults("sglang.python=/no/python") == []


def test_a_missing_environment_is_refused_with_the_script_that_makes_it() -> None:
    (line,) = faults("experiment=tiny_sglang", "sglang.python=/no/python")
    assert line.startswith("pools.sglang.engine=sglang: no SGLang is installed at /no/python; run")
    assert "scripts/sglang-env" in line
    # A server that runs already needs no environment here.
    assert faults(
        "experiment=tiny_sglang", "sglang.python=/no/python",
        "pools.sglang.engine=sglang_external", "pools.sglang.urls=[http://127.0.0.1:30000]",
    ) == []  # fmt: skip


def test_accelerators_are_counted(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("")
    python.chmod(0o755)
    asked = (
        "experiment=qwen36_b200", "pools.b200.replicas=3", f"sglang.python={python}",
        "trainer.device=cpu", "loop.eval_tasks=0", "tasks.source=generated",
    )  # fmt: skip
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    (tmp_path / "nvidiactl").touch()
    (line,) = faults(*asked, devices=tmp_path)
    assert "this machine has 2 accelerators, and the last replica stands on number 3" in line
    (tmp_path / "nvidia2").touch()
    assert faults(*asked, devices=tmp_path) == []


def test_every_trainer_rank_needs_an_accelerator_where_it_asks_for_one(tmp_path: Path) -> None:
    asked = ("trainer.device=b200", "trainer.ranks=2")
    (tmp_path / "nvidia0").touch()
    (line,) = faults(*asked, devices=tmp_path)
    assert line == (
        "trainer.device=b200: this machine has 1 accelerators, and each of trainer.ranks=2 needs "
        "one; lower trainer.ranks, or set trainer.device=cpu"
    )
    (tmp_path / "nvidia1").touch()
    assert faults(*asked, devices=tmp_path) == []


def test_the_evaluation_is_served_by_an_embedded_pool_or_by_real_ones_in_bf16() -> None:
    config = load_config("train", ["experiment=tiny_sglang"]).config
    plan = build_plan(config, facts=facts_of(config), python="python")
    assert evaluating_pool(plan) is plan.pools["b200"]
    real = plan.pools["sglang"]
    assert evaluating_pool(replace(plan, pools={"sglang": real})) is real
    for changes in ({"weights": "nvfp4"}, {"kv": "fp8"}, {"replicas": 0}):
        changed = replace(real, **changes)
        assert evaluating_pool(replace(plan, pools={"sglang": changed})) is None
    (line,) = faults(
        "experiment=tiny_sglang", "loop.eval_tasks=4", "~pools.b200",
        "pools.sglang.engine=sglang_external", "pools.sglang.urls=[http://127.0.0.1:30000]",
    )  # fmt: skip
    assert line.startswith("loop.eval_tasks:")


def test_the_interpreter_is_the_configured_one() -> None:
    config = load_config("train", ["sglang.python=/opt/sglang/bin/python"]).config
    assert interpreter(config) == "/opt/sglang/bin/python"


def test_a_cluster_s_machines_say_themselves_what_they_lack(tmp_path: Path) -> None:
    asked = ("experiment=qwen36_b200", "trainer.device=cpu", "loop.eval_tasks=0")
    tasks = ("tasks.source=generated", "sglang.python=/no/python")
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"launch.address=127.0.0.1:{head.getsockname()[1]}"
        joined = ("launch=ray", "net.bind=node", address)
        assert faults(*asked, *tasks, *joined, devices=tmp_path) == []
    assert len(faults(*asked, *tasks, devices=tmp_path)) == 2


@pytest.mark.parametrize(
    ("backend", "mark", "place"),
    [
        ("slurm", "SLURM_JOB_ID", "in no SLURM job"),
        ("kuberay", "KUBERNETES_SERVICE_HOST", "no pod"),
    ],
)
def test_a_launch_target_is_refused_outside_of_it(backend: str, mark: str, place: str) -> None:
    config = load_config("train", [f"launch={backend}", "net.bind=node"]).config
    (line,) = launch_faults(config, {"HOME": "/"})
    assert line.startswith(f"launch={backend}: none of {mark}")
    assert place in line
    assert list(launch_faults(config, {mark: "7", "RAY_ADDRESS": "as Ray finds it"})) == []
