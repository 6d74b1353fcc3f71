"""Ray clusters of several nodes on this machine: placement, demand, and the death of a node.

Nodes are real (`ray.cluster_utils`), accelerators are custom resources of them. Each node is three
processes, so there are as few as can be, and the tests share them.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

ASKS = """
import asyncio, json, subprocess, sys, time
from collections import Counter
from pathlib import Path

from rlmix.core.errors import PlacementError
from rlmix.launch.handle import Needs
from rlmix.launch.ray import RayCluster, seen_nodes


def chip(amount, name="h100_unit"):
    return Needs(kind="h100", gpus=0.0, resources={name: float(amount)}, labels={})


def requested(*wanted, unwanted=()):
    # What Ray's own autoscaler says it was asked for, once it says so.
    words = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", sys.argv[1]]
    found = []
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        told = subprocess.run(words, capture_output=True, text=True).stdout
        found = [line for line in told.splitlines() if "from request_resources()" in line]
        text = " ".join(found)
        if all(w in text for w in wanted) and not any(u in text for u in unwanted):
            return found
        time.sleep(0.5)
    return ["never", *found]


async def main():
    cluster = RayCluster.join(sys.argv[1], "probe", log_dir=Path(sys.argv[2]), place_limit_s=LIMIT)
    out = {}
    try:
        fits = cluster.spawn(Counter, name="fits", needs=chip(2))
        await fits.placed()
        out["free"] = sum(node.free.get("h100_unit", 0) for node in seen_nodes())
        more = cluster.spawn(Counter, name="more", needs=chip(1))
        unknown = cluster.spawn(Counter, name="unknown", needs=chip(1, "b300_unit"))
        out["all"] = requested("'h100_unit': 2.0", "'h100_unit': 1.0", "'b300_unit': 1.0")
        for waits in (more, unknown):
            try:
                await waits.call("total")
                out[waits.name] = "placed"
            except PlacementError as error:
                out[waits.name] = str(error)
            waits.kill()
        out["one"] = requested("'h100_unit': 2.0", unwanted=["'h100_unit': 1.0", "b300_unit"])
    finally:
        cluster.stop()
    out["none"] = requested(unwanted=["unit"])
    print(json.dumps(out))


asyncio.run(main())
"""


def environment() -> dict[str, str]:
    """Of a joined cluster: no token, because these nodes were started without one."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "240"}


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`clusters(head_args, node_args...)` -> (cluster, nodes); all end with the test."""
    for key in [key for key in os.environ if key.startswith("RAY_")]:
        monkeypatch.delenv(key)
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    from ray.cluster_utils import Cluster

    started: list[Any] = []

    def start(head: dict[str, Any], *nodes: dict[str, Any]) -> tuple[Any, list[Any]]:
        memory = {"object_store_memory": 80 << 20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={**memory, **head})
        started.append(cluster)
        return cluster, [cluster.add_node(**memory, **node) for node in nodes]

    yield start
    for cluster in started:
        cluster.shutdown()


def probe(tmp_path: Path, address: str, *, limit_s: float) -> dict[str, Any]:
    """Runs `ASKS` in a process of its own, since a process joins one cluster in its life."""
    script = tmp_path / "asks.py"
    script.write_text(ASKS.replace("LIMIT", str(limit_s)))
    done = subprocess.run(
        [sys.executable, str(script), address, str(tmp_path / "logs")],
        env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def node_of(pid: int, nodes: list[Any]) -> Any:
    """The node under whose raylet a process is."""
    above = {parent.pid for parent in psutil.Process(pid).parents()}
    for node in nodes:
        raylets = node.all_processes["raylet"]
        if any(raylet.process.pid in above for raylet in raylets):
            return node
    raise AssertionError(f"process {pid} is on no node")


def test_a_replica_takes_its_accelerator_and_what_finds_none_is_told_and_asked_for(
    clusters: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
    cluster, _ = clusters({"num_cpus": 8}, {"num_cpus": 4, "resources": {"h100_unit": 2}})
    answer = probe(tmp_path, cluster.address, limit_s=8.0)
    assert answer["free"] == 0
    # Both numbers: asked for, and there.
    assert "asked for 1 CPU and 1 h100_unit" in answer["more"]
    assert "2 h100_unit of which 0 are free" in answer["more"]
    assert "0 b300_unit of which 0 are free" in answer["unknown"]
    assert "after 8 s" in answer["more"]
    # Ray's own autoscaler was asked for what has a place and for what has none; what was given up
    # is asked for no longer, and nothing is after the end.
    assert "never" not in answer["all"] + answer["one"] + answer["none"]
    assert len(answer["all"]) == 3
    assert len(answer["one"]) == 1
    assert answer["none"] == []


def test_a_node_dies_and_its_pool_recovers_on_the_others(
    clusters: Callable[..., Any], start_run: Callable[..., Any]
) -> None:
    cluster, nodes = clusters(
        {"num_cpus": 64},
        {"num_cpus": 2, "resources": {"b200_unit": 2}},
        {"num_cpus": 2, "resources": {"b200_unit": 2}},
    )
    run = start_run(
        "node_dies", f"launch.address={cluster.address}", "+launch.resources.b200=b200_unit",
        "pools.b200.replicas=2", "loop.steps=6", "loop.min_step_s=10", "launch.boot_timeout_s=200",
        "launch.place_timeout_s=100", "launch.restart_delay_s=0.2",
    )  # fmt: skip

    def ready() -> list[dict[str, Any]]:
        return [event for event in run.events("replica_ready") if event["pool"] == "b200"]

    run.wait_until(lambda: len(ready()) >= 2, "two replicas of b200", limit_s=280)
    run.wait_until(lambda: len(run.rows()) >= 1, "a step", limit_s=200)
    victim = node_of(ready()[0]["pid"], nodes)
    lost = {event["replica"] for event in ready() if node_of(event["pid"], nodes) is victim}
    before = len(ready())
    cluster.remove_node(victim, allow_graceful=False)
    run.wait_until(
        lambda: {event["replica"] for event in ready()[before:]} >= lost,
        "replicas on the other node",
        limit_s=200,
    )
    survivor = next(node for node in nodes if node is not victim)
    for event in ready()[before:]:
        if psutil.pid_exists(event["pid"]):
            assert node_of(event["pid"], [survivor]) is survivor
    code, _ = run.finish()
    assert code == 0, run.stderr()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # Sessions of the lost replicas went on elsewhere; none is missing and none ended as a fault.
    dead = [event for event in run.events("replica_dead") if event["replica"] in lost]
    assert {event["replica"] for event in dead} == lost
    assert sum(row["rollout/sessions"] for row in rows) == 6 * 8
    assert all(row["reward/mean"] is not None for row in rows)
    run.assert_no_process_left()


def scale_pools(root: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """As a cloud's hook would call it."""
    rlmix = str(Path(sys.executable).with_name("rlmix"))
    return subprocess.run(
        [rlmix, "scale", "pools", "--dir", str(root), *arguments],
        env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_a_node_with_notice_drains_and_its_replica_comes_back_on_another_node_only(
    clusters: Callable[..., Any], start_run: Callable[..., Any], tmp_path: Path
) -> None:
    spot = {"num_cpus": 2, "resources": {"b200_unit": 2}}
    cluster, nodes = clusters({"num_cpus": 64}, spot, spot)
    run = start_run(
        "notice", f"launch.address={cluster.address}", "+launch.resources.b200=b200_unit",
        "pools.b200.replicas=2", "loop.steps=6", "loop.min_step_s=10", "launch.boot_timeout_s=200",
        "launch.place_timeout_s=100",
    )  # fmt: skip

    def ready() -> list[dict[str, Any]]:
        return [event for event in run.events("replica_ready") if event["pool"] == "b200"]

    run.wait_until(lambda: len(ready()) >= 2, "two replicas of b200", limit_s=280)
    run.wait_until(lambda: len(run.rows()) >= 1, "a step", limit_s=200)
    leaver = node_of(ready()[0]["pid"], nodes)
    there = sorted(e["replica"] for e in ready() if node_of(e["pid"], nodes) is leaver)
    before = len(ready())

    # All nodes of this machine have one host name and one address, so only the id will do.
    wrong = scale_pools(tmp_path, "--leave", "gpu-77")
    assert (wrong.returncode, "the cluster has none of that name" in wrong.stderr) == (2, True)
    assert leaver.node_id[:8] in wrong.stderr
    notice_s = time.monotonic()
    told = scale_pools(tmp_path, "--json", "--leave", leaver.node_id, "--within", "15")
    assert told.returncode == 0, told.stderr[-3000:]
    document = json.loads(told.stdout)
    drained_s = time.monotonic() - notice_s
    assert document["operation"]["status"] == "done"
    assert sorted(document["operation"]["replicas"]) == there
    (machine,) = [one for one in document["machines"] if one["is_leaving"]]
    assert machine["id"] == leaver.node_id
    again = scale_pools(tmp_path, "--json", "--leave", leaver.node_id)
    assert json.loads(again.stdout)["operation"]["id"] == document["operation"]["id"]
    run.wait_until(
        lambda: {event["replica"] for event in ready()[before:]} >= set(there),
        "replicas on the other node",
        limit_s=200,
    )
    back_s = time.monotonic() - notice_s
    survivor = next(node for node in nodes if node is not leaver)
    for event in ready()[before:]:
        assert node_of(event["pid"], [survivor]) is survivor
    cluster.remove_node(leaver, allow_graceful=False)  # Nobody is on it any more.
    code, _ = run.finish()
    assert code == 0, run.stderr()
    rows = run.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert not run.events("replica_dead")
    assert [event["replicas"] for event in run.events("machine_leaves")] == [there]
    assert sum(row["rollout/sessions"] for row in rows) == 6 * 8
    assert all(row["rollout/void_frac"] == 0 for row in rows)
    run.assert_no_process_left()
    print(f"drained after {drained_s:.1f} s, served elsewhere after {back_s:.1f} s")


def test_images_are_pulled_on_every_node_before_a_run(
    clusters: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tmp_path / "bin" / "docker"
    engine.parent.mkdir()
    # Has nothing, and cannot pull what is called broken.
    engine.write_text(
        f'#!/bin/sh\necho "$PPID $*" >> {tmp_path}/words\n[ "$1" = pull ] || exit 1\n'
        '[ "$3" != broken:1 ] || { echo "denied: broken:1" >&2; exit 1; }\n'
    )
    engine.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")
    cluster, _ = clusters({"num_cpus": 2}, {"num_cpus": 2})

    def pull(image: str) -> "subprocess.CompletedProcess[str]":
        rlmix = str(Path(sys.executable).with_name("rlmix"))
        return subprocess.run(
            [rlmix, "tasks", "pull", "--json", "experiment=tiny", "sandbox.backend=docker",
             f"sandbox.image={image}", "launch=ray", f"launch.address={cluster.address}",
             "net.bind=node", f"run.dir={tmp_path}"],
            env=environment(), capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip

    good = pull("base:1")
    assert good.returncode == 0, good.stderr[-3000:]
    machines = json.loads(good.stdout)["machines"]
    assert [machine["pulled"] for machine in machines] == [["base:1"], ["base:1"]]
    # By a process of each node.
    words = (tmp_path / "words").read_text().splitlines()
    pulls = [line.split(maxsplit=1) for line in words if " pull " in line]
    assert len({pid for pid, _ in pulls}) == 2
    bad = pull("broken:1")
    assert bad.returncode == 1
    failed = [machine["failed"] for machine in json.loads(bad.stdout)["machines"]]
    assert failed == [[{"image": "broken:1", "why": "denied: broken:1"}]] * 2
