"""Launch targets, and the examples of docs/cluster: their schemas, and commands that compose."""

import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlmix.config.compose import load_config
from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import ConfigError

CLUSTER = Path(__file__).parents[3] / "docs" / "cluster"
TARGETS = {"ray.yaml": "ray", "slurm.sbatch": "slurm", "raycluster.yaml": "kuberay"}
COMMAND = re.compile(r"(?:rlmix|\"\$rlmix\") (?:train|doctor) (.*)")


def config_of(*overrides: str) -> TrainConfig:
    return load_config("train", overrides).config


def test_a_target_differs_from_local_in_what_it_says_and_nothing_else() -> None:
    local = config_of().launch
    assert (local.backend, local.address, local.boot_timeout_s) == ("local", None, 120)
    ray, slurm, kuberay = (
        config_of(f"launch={name}", "net.bind=node").launch for name in ("ray", "slurm", "kuberay")
    )
    assert [one.backend for one in (ray, slurm, kuberay)] == ["ray", "slurm", "kuberay"]
    assert {one.address for one in (ray, slurm, kuberay)} == {"auto"}
    assert [one.place_timeout_s for one in (ray, slurm, kuberay)] == [600, 120, 1800]
    assert {one.boot_timeout_s for one in (ray, slurm, kuberay)} == {1800}
    assert {one.max_restarts for one in (local, ray, slurm, kuberay)} == {3}


def test_a_cluster_needs_an_address_and_servers_that_its_machines_reach() -> None:
    with pytest.raises(ConfigError) as caught:
        config_of("launch=slurm", "launch.address=null")
    assert "launch.address: got null with launch.backend=slurm" in str(caught.value)
    assert "net.bind: got 127.0.0.1 with launch.backend=slurm" in str(caught.value)
    assert config_of("launch=ray", "net.bind=0.0.0.0").net.bind == "0.0.0.0"
    with pytest.raises(ConfigError, match="or node for each machine's own"):
        config_of("net.bind=everywhere")


@pytest.mark.parametrize("name", TARGETS)
def test_the_commands_of_an_example_compose_for_its_target(name: str) -> None:
    commands = COMMAND.findall((CLUSTER / name).read_text())
    assert len(commands) >= 1
    for command in commands:
        words = shlex.split(command.replace('"$@"', "").rstrip("& "))
        overrides = [word for word in words if not word.startswith("--")]
        config = config_of(*overrides)
        assert config.launch.backend == TARGETS[name]
        assert config.net.bind == "node"
        assert config.run.dir.endswith("/runs")


def validated(document: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """What Ray's own schema says, in a process of its own: a Ray that was imported before a run
    could set its environment cannot be started by tests that follow in this one."""
    program = (
        "import json, sys; from ray.autoscaler._private import util;"
        "util.validate_config(util.prepare_config(json.load(sys.stdin)))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(document), capture_output=True, text=True
    )


def test_the_ray_up_example_is_what_ray_s_own_schema_allows() -> None:
    document = yaml.safe_load((CLUSTER / "ray.yaml").read_text())
    assert validated(document).returncode == 0
    assert "max_workerz" in validated({**document, "max_workerz": 1}).stderr
    kinds = document["available_node_types"]
    assert kinds[document["head_node_type"]]["max_workers"] == 0
    labels = {
        kind: one.get("labels", {}).get("ray.io/accelerator-type") for kind, one in kinds.items()
    }
    known = {chip.ray_label for chip in config_of().accelerators.values()}
    assert {label for label in labels.values() if label} <= known
    # Where the label says too little, a resource of the example's own command does.
    assert "a100_80g" in kinds["a100"]["resources"]
    assert config_of("+launch.resources.a100=a100_80g").launch.resources == {"a100": "a100_80g"}
    for command in document["head_start_ray_commands"] + document["worker_start_ray_commands"]:
        assert "ray start" not in command or command.startswith("RAY_AUTH_MODE=token ")


def documents() -> dict[str, Any]:
    found = yaml.safe_load_all((CLUSTER / "raycluster.yaml").read_text())
    return {document["kind"]: document for document in found}


def test_the_raycluster_has_one_group_for_each_kind_of_gpu_with_its_label() -> None:
    cluster = documents()["RayCluster"]
    spec = cluster["spec"]
    assert (cluster["apiVersion"], spec["enableInTreeAutoscaling"]) == ("ray.io/v1", True)
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["rayVersion"] == importlib.metadata.version("ray")
    chips = config_of().accelerators
    groups = spec["workerGroupSpecs"]
    assert len({group["groupName"] for group in groups}) == len(groups)
    for group in groups:
        label = chips[group["groupName"]].ray_label
        assert group["labels"] == {"ray.io/accelerator-type": label}
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        limits = container["resources"]["limits"]
        assert int(limits["nvidia.com/gpu"]) == 8
        assert "key" in container["env"][1]["valueFrom"]["secretKeyRef"]
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    secret = documents()["Secret"]
    (head,) = spec["headGroupSpec"]["template"]["spec"]["containers"]
    asked = head["env"][1]["valueFrom"]["secretKeyRef"]
    assert asked["name"] == secret["metadata"]["name"]
    assert asked["key"] in secret["stringData"]


def test_the_sbatch_script_parses_and_puts_no_secret_into_a_command_line() -> None:
    path = CLUSTER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    text = path.read_text()
    options = [line.split()[1:] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert ["hetjob"] in options
    assert all(word.startswith("--") for words in options if words != ["hetjob"] for word in words)
    started = [line for line in text.splitlines() if " start " in line or "srun" in line]
    assert started
    assert not any("TOKEN" in line for line in started)


def fake(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


def test_the_sbatch_script_starts_a_head_a_worker_and_the_run_and_hands_a_notice_on(
    tmp_path: Path,
) -> None:
    """Run as it is, with stand-ins for srun, ray and rlmix that write down what they were asked."""
    said = tmp_path / "said"
    # As srun does for a component of one node: component 0 is this host, component 1 another one.
    fake(tmp_path, "srun", 'case $1 in *=1) hostname() { echo other; }; export -f hostname;; esac\n'
         'shift 2; exec "$@"')  # fmt: skip
    fake(tmp_path, "sleep", "exec true")
    fake(tmp_path, "ray", f'echo "ray $* mode=$RAY_AUTH_MODE token=${{#RAY_AUTH_TOKEN}}" >>{said}')
    fake(
        tmp_path, "rlmix",
        f'echo "rlmix $*" >>{said}; trap "echo drained >>{said}; exit 130" TERM; '
        f"until [ $(grep -c 'ray start' {said}) -ge 2 ]; do /bin/sleep 0.05; done; "
        "kill -TERM $PPID; "
        "while :; do /bin/sleep 0.05; done",
    )  # fmt: skip
    done = subprocess.run(
        ["bash", str(CLUSTER / "slurm.sbatch"), "loop.steps=7"],
        env={"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin", "RLMIX_SHARED": "/shared"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = said.read_text().splitlines()
    assert done.returncode == 130, done.stderr
    (head,) = [line for line in lines if " --head " in line]
    (worker,) = [line for line in lines if " --address=" in line]
    address = re.search(r"--node-ip-address=(\S+) --port=6379", head)
    assert address is not None
    assert f"--address={address[1]}:6379" in worker
    assert '--resources={"a100_80g": 8}' in worker
    assert all("mode=token token=64" in line for line in (head, worker))
    (run,) = [line for line in lines if line.startswith("rlmix train")]
    assert run == (
        "rlmix train launch=slurm net.bind=node run.dir=/shared/runs "
        "+launch.resources.a100=a100_80g loop.steps=7"
    )
    assert "drained" in lines


def test_the_container_has_both_environments_and_no_secret() -> None:
    text = (CLUSTER / "Containerfile").read_text()
    assert "RUN scripts/sglang-env" in text
    assert "RUN scripts/venv" in text
    assert text.index("scripts/sglang-env scripts/sglang-env") < text.index("COPY . .")
    assert not re.search(r"(?i)(token|password|api_?key)\s*=", text)
