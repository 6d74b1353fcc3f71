"""Two hosts, as network namespaces joined by a cable: pools on both, one host lost in mid-run.

What is shared is the file system, as on a cluster; addresses, ports and loopback are each host's
own. The loss is that of a machine without power: the cable goes first, so that nobody is told, then
every process behind it is killed.
"""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
PORT = 6379
HOSTS = ("a", "b")


def ip(*arguments: str, check: bool = True) -> None:
    subprocess.run(["ip", *arguments], check=check, capture_output=True, timeout=20)


@dataclass
class Hosts:
    """Names of the namespaces and the addresses in them."""

    tag: str
    folder: Path
    token: str

    def name(self, host: str) -> str:
        return f"rlmix{self.tag}{host}"

    def address(self, host: str) -> str:
        return f"10.231.7.{1 + HOSTS.index(host)}"

    def start(self, host: str, *command: str, log: str) -> "subprocess.Popen[bytes]":
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token,
            "RAY_raylet_start_wait_time_s": "240", "RAY_USAGE_STATS_ENABLED": "0",
            # A machine is given up after 3 checks, not after half a minute.
            "RAY_health_check_initial_delay_ms": "1000", "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3",
        }  # fmt: skip
        with (self.folder / log).open("wb") as out:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name(host), *command],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True, env=environment, cwd=self.folder,
            )  # fmt: skip

    def lose_power(self, host: str) -> None:
        """Without a word to the others."""
        ip("-n", self.name(host), "link", "set", f"to{host}", "down")
        self.kill_all(host)

    def kill_all(self, host: str) -> None:
        for _ in range(20):
            found = subprocess.run(
                ["ip", "netns", "pids", self.name(host)],
                capture_output=True,
                text=True,
                check=False,
            )
            pids = [int(pid) for pid in found.stdout.split()]
            if not pids:
                return
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and `ip`")
    pair = Hosts(tag=secrets.token_hex(2), folder=tmp_path, token=secrets.token_hex(32))
    try:
        ip("netns", "add", pair.name("a"))
        ip("netns", "add", pair.name("b"))
        # Both ends of the cable are made inside, so the names meet nobody's.
        ip("-n", pair.name("a"), "link", "add", "toa", "type", "veth", "peer", "name", "tob",
           "netns", pair.name("b"))  # fmt: skip
        for host in HOSTS:
            name, end = pair.name(host), f"to{host}"
            ip("-n", name, "addr", "add", f"{pair.address(host)}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "route", "add", "default", "dev", end)
    except subprocess.CalledProcessError as error:
        for host in HOSTS:
            ip("netns", "del", pair.name(host), check=False)
        pytest.skip(f"no network namespaces here: {error.stderr.decode()}")
    yield pair
    for host in HOSTS:
        pair.kill_all(host)
        ip("netns", "del", pair.name(host), check=False)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(
    condition: Callable[[], bool], what: str, process: Any, log: Path, limit_s: float = 240
) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        said = log.read_text(errors="replace")[-3000:]
        assert process.poll() is None, f"ended while waiting for {what}: {said}"
        assert time.monotonic() < deadline_s, f"no {what} after {limit_s} s: {said}"
        time.sleep(0.2)


def test_a_run_on_two_hosts_finishes_when_one_of_them_loses_power(hosts: Hosts) -> None:
    temporary = tempfile.mkdtemp(prefix="rlmix2h")
    ray, common = str(BIN / "ray"), ("--object-store-memory", str(80 << 20), "--block")
    head_address = f"{hosts.address('a')}:{PORT}"
    head = hosts.start(
        "a", ray, "start", "--head", "--node-ip-address", hosts.address("a"), "--port", str(PORT),
        "--include-dashboard=false", "--num-cpus=64", "--resources", '{"a100_unit": 1}',
        "--temp-dir", temporary, *common, log="head.log",
    )  # fmt: skip
    wait_until(
        lambda: b"Ray runtime started" in (hosts.folder / "head.log").read_bytes(),
        "head", head, hosts.folder / "head.log",
    )  # fmt: skip
    hosts.start(
        "b", ray, "start", "--address", head_address, "--node-ip-address", hosts.address("b"),
        "--num-cpus=2", "--resources", '{"b200_unit": 1}', *common, log="worker.log",
    )  # fmt: skip
    run = hosts.folder / "runs" / "two"
    driver = hosts.start(
        "a", str(BIN / "rlmix"), "train", "experiment=tiny", "launch=ray", "net.bind=node",
        f"launch.address={head_address}", "+launch.resources.b200=b200_unit",
        "+launch.resources.a100=a100_unit", "launch.place_timeout_s=30", "loop.steps=4",
        "loop.eval_tasks=0", f"run.dir={hosts.folder / 'runs'}", "run.name=two", log="driver.log",
    )  # fmt: skip
    log = hosts.folder / "driver.log"

    def events(kind: str) -> list[dict[str, Any]]:
        return [row for row in rows(run / "events.jsonl") if row["kind"] == kind]

    wait_until(lambda: len(rows(run / "metrics.jsonl")) >= 1, "first step", driver, log)
    ready = {event["pool"]: event for event in events("replica_ready")}
    assert set(ready) == {"a100", "b200"}
    said = {
        pool: json.loads((run / "ready" / f"{pool}-0.json").read_text())["url"]
        for pool in ("a100", "b200")
    }
    # Each pool's engine listens on its own host's address, and on no other one.
    assert said["a100"].startswith(f"http://{hosts.address('a')}:")
    assert said["b200"].startswith(f"http://{hosts.address('b')}:")
    before = len(rows(run / "metrics.jsonl"))
    hosts.lose_power("b")
    lost_s = time.monotonic()
    wait_until(
        lambda: any(event["pool"] == "b200" for event in events("replica_dead")),
        "the loss of b200", driver, log,
    )  # fmt: skip
    noticed_s = time.monotonic() - lost_s
    assert driver.wait(timeout=240) == 0, log.read_text(errors="replace")[-3000:]
    steps = rows(run / "metrics.jsonl")
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert before < 4, "the host must be lost in mid-run"
    pools = {
        pool
        for file in (run / "trajectories").glob("step_*.jsonl")
        for record in rows(file)
        for pool in record["pools"]
    }
    assert pools == {"a100", "b200"}
    print(f"noticed after {noticed_s:.1f} s, void {[row['rollout/void_frac'] for row in steps]}")
    shutil.rmtree(temporary, ignore_errors=True)
