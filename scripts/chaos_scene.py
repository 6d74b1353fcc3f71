"""The run that `scripts/chaos.py` disturbs: its processes, its files, its namespaces."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rlmix.core.errors import RlmixError
from rlmix.observe.jsonl import read_jsonl
from rlmix.scaling.control import ControlClient

INSIDE = "RLMIX_CHAOS_INSIDE"
MARK = "RLMIX_CHAOS_RUN"
DISK_MIB = 96
"""Of the weights folder: versions of all views, several times over."""
STALL_S = 8.0
NOTICE_LIMIT_S = 240.0
"""A fault that has no effect for so long went unnoticed."""
START_LIMIT_S = 600.0
"""For a whole attempt to come up; half a minute where nothing else runs."""
SETTINGS = (
    "experiment=tiny", "+pool@pools.h100=embedded_h100", "loop.eval_tasks=0",
    "loop.checkpoint_every=1", f"launch.stall_timeout_s={STALL_S}", "launch.loads_every_s=0.5",
    "launch.max_restarts=50", "launch.restart_delay_s=0.2", "launch.update_timeout_s=30",
    "launch.boot_timeout_s=90", "scaling.drain_s=20",
)  # fmt: skip


STATE_FILE = "chaos.json"


class ChaosError(Exception):
    """What the test found wrong."""


@dataclass
class Scene:
    """The run, its processes, and the disturbances that must be taken back."""

    root: Path
    steps: int
    pace_s: float
    random: random.Random
    name: str = "chaos"
    attempt: int = 0
    process: subprocess.Popen[bytes] | None = None
    operations: int = 0
    done: list[dict[str, Any]] = field(default_factory=list)
    """Faults so far."""
    has_disk: bool = False
    """The weights folder is the small disk, in the namespace of this piece."""

    @property
    def path(self) -> Path:
        return self.root / self.name

    def start(self) -> None:
        """A first attempt, or the next one of the same run."""
        self.attempt += 1
        rlmix = [sys.executable, "-c", "from rlmix.cli import main; main()", "train"]
        given = [f"run.dir={self.root}", "--json"]
        if self.attempt == 1:
            settings = [f"loop.steps={self.steps}", f"loop.min_step_s={self.pace_s:g}"]
            given += [f"run.name={self.name}", *SETTINGS, *settings]
        else:
            given += ["--resume", self.name]
        out = (self.root / f"attempt{self.attempt}.out").open("wb")
        err = (self.root / f"attempt{self.attempt}.err").open("wb")
        self.process = subprocess.Popen(
            [*rlmix, *given], stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True, env={**os.environ, MARK: str(self.path)},
        )  # fmt: skip
        if not self.has_disk:
            self.has_disk = True
            self.until(lambda: (self.path / "weights").is_dir(), "the run's folder")
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs"]
            subprocess.run([*command, str(self.path / "weights")], check=True)

    def pause(self) -> None:
        """End the attempt in order, so that another piece can go on."""
        assert self.process is not None
        os.kill(self.process.pid, signal.SIGINT)
        self.process.wait(timeout=120)
        state = {"done": self.done, "attempt": self.attempt, "operations": self.operations}
        (self.root / STATE_FILE).write_text(json.dumps(state))

    def take_over(self) -> None:
        """From where `pause` left it."""
        if (self.root / STATE_FILE).exists():
            state = json.loads((self.root / STATE_FILE).read_text())
            self.done, self.attempt = state["done"], state["attempt"]
            self.operations = state["operations"]

    def rows(self, file: str) -> list[dict[str, Any]]:
        path = self.path / file
        return list(read_jsonl(path)) if path.exists() else []

    def step(self) -> int:
        rows = self.rows("metrics.jsonl")
        return int(rows[-1]["step"]) if rows else 0

    def events(self, kind: str, since_s: float) -> Iterator[dict[str, Any]]:
        for event in self.rows("events.jsonl"):
            if event["kind"] == kind and event["unix_s"] >= since_s:
                yield event

    def until(
        self, condition: Callable[[], Any], what: str, limit_s: float = NOTICE_LIMIT_S
    ) -> Any:
        deadline_s = time.monotonic() + limit_s
        while not (result := condition()):
            if self.process is not None and self.process.poll() is not None:
                raise ChaosError(f"the run ended while waiting for {what}: {self.complaint()}")
            if time.monotonic() > deadline_s:
                raise ChaosError(f"no {what} after {limit_s:g} s")
            time.sleep(0.1)
        return result

    def complaint(self) -> str:
        return (self.root / f"attempt{self.attempt}.err").read_text()[-1500:]

    def engines(self) -> dict[str, dict[str, Any]]:
        """Replica -> what its server said when it was ready, of those that serve now."""
        document = self.client().pools()
        found = {}
        for path in (self.path / "ready").glob("*.json"):
            ready = json.loads(path.read_text())
            pool = path.stem.rpartition("-")[0]
            is_up = document["pools"].get(pool, {}).get("ready", 0) > 0
            if is_up and psutil.pid_exists(ready["pid"]):
                found[path.stem] = ready
        return found

    def client(self) -> ControlClient:
        def ask() -> ControlClient | None:
            try:
                client = ControlClient.of_run(self.path)
                client.pools()
                return client
            except (RlmixError, OSError):
                return None

        client: ControlClient = self.until(
            ask, "an answer of the run's control endpoint", START_LIMIT_S
        )
        return client

    def victim(self) -> tuple[str, dict[str, Any]]:
        """A replica that serves."""
        self.until(lambda: len(self.engines()) >= 2, "two replicas that serve")
        name = self.random.choice(sorted(self.engines()))
        return name, self.engines()[name]

    def noticed_dead(self, name: str, since_s: float) -> str:
        def dead() -> str:
            # Quarantined: it was hit while it loaded a version.
            kinds = ("replica_dead", "replica_quarantined")
            gone = [e for kind in kinds for e in self.events(kind, since_s)]
            mine = [e for e in gone if e["replica"] == name]
            return str(mine[0]["reason"]).splitlines()[0] if mine else ""

        return str(self.until(dead, f"notice of what happened to {name}"))

    def leftovers(self) -> list[psutil.Process]:
        """Processes of the run that still live."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == str(self.path):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def enter_namespaces() -> None:
    """Start again in mount and network namespaces of our own, with nothing but loopback."""
    if os.environ.get(INSIDE):
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        # The rule that finds local addresses comes first and cannot be preceded; move it back.
        subprocess.run(["ip", "rule", "add", "pref", "100", "lookup", "local"], check=True)
        subprocess.run(["ip", "rule", "del", "pref", "0"], check=True)
        return
    as_user = [] if os.geteuid() == 0 else ["--map-root-user"]
    os.environ[INSIDE] = "1"
    words = ["unshare", "--mount", "--net", *as_user, sys.executable, *sys.argv]
    os.execvp(words[0], words)
