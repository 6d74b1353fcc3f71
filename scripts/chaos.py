"""A run under faults, with real processes, and the account of its sessions afterwards.

    .venv/bin/python scripts/chaos.py                        20 steps, 10 faults, about 5 minutes
    .venv/bin/python scripts/chaos.py --steps 6 --kinds sigkill,disk_full --json
    .venv/bin/python scripts/chaos.py --out DIR --piece-s 280     again and again, until it is not 3

Every fault is done to something that works at that moment, and the script waits for the event that
shows that it was noticed. It runs in mount and network namespaces of its own (`unshare`; as root or
where users may have them): the weights folder is a small memory disk that can be filled, and ports
are blocked by a routing rule that loses every answer. Exit 1 when the run does not finish, a fault
goes unnoticed, or the account of the sessions does not add up.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from rlmix.core.errors import RlmixError
from rlmix.core.trajectory import Outcome
from rlmix.loop.ledger import BEGUN, LEDGER_FILE, account
from rlmix.observe.jsonl import read_jsonl
from rlmix.observe.manifest import read_manifest
from rlmix.observe.trajectories import read_trajectories
from rlmix.scaling.control import ControlClient

INSIDE = "RLMIX_CHAOS_INSIDE"
MARK = "RLMIX_CHAOS_RUN"
DISK_MIB = 96
"""Of the weights folder: versions of all views, several times over."""
STALL_S = 8.0
NOTICE_LIMIT_S = 240.0
"""A fault that has no effect for so long went unnoticed."""
SETTINGS = (
    "experiment=tiny", "+pool@pools.h100=embedded_h100", "loop.eval_tasks=0",
    "loop.checkpoint_every=1", f"launch.stall_timeout_s={STALL_S}", "launch.loads_every_s=0.5",
    "launch.max_restarts=50", "launch.restart_delay_s=0.2", "launch.update_timeout_s=30",
    "launch.boot_timeout_s=90", "scaling.drain_s=20",
)  # fmt: skip


STATE_FILE = "chaos.json"
UNFINISHED = 3
"""Exit code of a piece after which there is more to do."""
PIECE_MARGIN_S = 75.0
"""What is left of a piece when no further fault is begun: one takes about so long."""


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

        client: ControlClient = self.until(ask, "an answer of the run's control endpoint")
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


def sigkill(scene: Scene) -> dict[str, Any]:
    """An engine dies at once."""
    since_s = time.time()
    name, ready = scene.victim()
    os.kill(ready["pid"], signal.SIGKILL)
    return {"replica": name, "noticed": scene.noticed_dead(name, since_s)}


def sigstop(scene: Scene) -> dict[str, Any]:
    """An engine hangs: its process is there and does nothing."""
    since_s = time.time()
    name, ready = scene.victim()
    os.kill(ready["pid"], signal.SIGSTOP)
    return {"replica": name, "noticed": scene.noticed_dead(name, since_s)}


def port_blocked(scene: Scene) -> dict[str, Any]:
    """Every packet that an engine answers with is lost."""
    since_s = time.time()
    name, ready = scene.victim()
    rule = ["pref", "50", "ipproto", "tcp", "sport", str(urlsplit(ready["url"]).port), "blackhole"]
    subprocess.run(["ip", "rule", "add", *rule], check=True)
    try:
        return {"replica": name, "noticed": scene.noticed_dead(name, since_s)}
    finally:
        subprocess.run(["ip", "rule", "del", *rule], check=True)


def disk_full(scene: Scene) -> dict[str, Any]:
    """No byte is left in the weights folder, until a version could not be written."""
    since_s = time.time()
    ballast = scene.path / "weights" / ".ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"\0" * 65_536)
            except OSError as error:
                reason = str(error)
        failed = scene.until(
            lambda: next(scene.events("publish_failed", since_s), None),
            "a publication that failed",
        )
    finally:
        ballast.unlink(missing_ok=True)
    return {"disk": reason, "noticed": failed["reason"], "step": failed["step"]}


def slow_pull(scene: Scene) -> dict[str, Any]:
    """The process that reads a replica's new versions gets a tenth of the time."""
    since_s = time.time()
    name, ready = scene.victim()
    reader = psutil.Process(ready["pid"]).parent()
    assert reader is not None
    is_over = threading.Event()

    def throttle() -> None:
        while not is_over.is_set():
            reader.suspend()
            is_over.wait(0.27)
            reader.resume()
            is_over.wait(0.03)

    def update() -> dict[str, Any] | None:
        found = [e for e in scene.events("replica_updated", since_s) if e["replica"] == name]
        return found[0] if found else None

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        updated = scene.until(update, f"an update of {name}")
    finally:
        is_over.set()
        thread.join()
        reader.resume()
    return {"replica": name, "noticed": updated["reason"], "pull_s": updated["pull_s"]}


def failed_boot(scene: Scene) -> dict[str, Any]:
    """A pool is made larger, and the new engine is killed as often as it starts."""
    client = scene.client()
    scene.until(lambda: not under_way(client), "the end of the operation before")
    pool = scene.random.choice(["b200", "a100", "h100"])
    scene.operations += 1
    name = f"boot-{scene.operations}"
    before = client.pools()["pools"][pool]["target"]
    begun = client.scale(name, {pool: before + 1}, "chaos: this boot fails")
    (replica,) = begun["replicas"]

    def failed() -> dict[str, Any] | None:
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
                if replica in words and process.environ().get(MARK) == str(scene.path):
                    process.kill()
            except psutil.Error:
                continue
        operation = client.operation(name)
        return operation if operation["status"] in ("failed", "done", "cancelled") else None

    operation = scene.until(failed, f"the end of {name}")
    if operation["status"] != "failed":
        raise ChaosError(f"{name} is {operation['status']} although its engine was killed")
    after = client.pools()["pools"][pool]["target"]
    if after != before:
        raise ChaosError(f"{name} failed and left pool {pool} with {after} replicas, not {before}")
    return {"replica": replica, "noticed": operation["reason"].splitlines()[0]}


def controller_restart(scene: Scene) -> dict[str, Any]:
    """The driver dies while a pool is being changed; another one continues run and operation."""
    client = scene.client()
    scene.until(lambda: not under_way(client), "the end of the operation before")
    now = client.pools()["pools"]["h100"]["target"]
    scene.operations += 1
    name = f"restart-{scene.operations}"
    client.scale(name, {"h100": 2 if now == 1 else 1}, "chaos: the controller dies meanwhile")
    assert scene.process is not None
    since_s = time.time()
    os.kill(scene.process.pid, signal.SIGKILL)
    scene.process.wait()
    deadline_s = time.monotonic() + 60.0
    while left := scene.leftovers():
        if time.monotonic() > deadline_s:
            raise ChaosError(f"the killed run left {[p.pid for p in left]} behind")
        time.sleep(0.1)
    scene.start()
    client = scene.client()

    def done() -> bool:
        state = client.operation(name)["status"]
        return bool(state in ("done", "failed", "cancelled"))

    restarted = scene.until(
        lambda: (
            next(scene.events("scale_restarted", since_s), None)
            or next(scene.events("scale_done", since_s), None)
        ),
        "the operation's continuation",
    )
    scene.until(done, f"the end of {name}")
    return {"operation": name, "noticed": restarted["reason"],
            "status": client.operation(name)["status"]}  # fmt: skip


def under_way(client: ControlClient) -> bool:
    return any(one["status"] in ("running", "rolling_back") for one in client.pools()["operations"])


FAULTS: dict[str, Callable[[Scene], dict[str, Any]]] = {
    one.__name__: one
    for one in (
        sigkill, sigstop, port_blocked, disk_full, slow_pull, failed_boot, controller_restart,
    )
}  # fmt: skip


def schedule(number: int, kinds: list[str], chooser: random.Random) -> list[str]:
    """Each kind once, then any, in an order that only the seed decides."""
    chosen = [*kinds[:number], *chooser.choices(kinds, k=max(0, number - len(kinds)))]
    chooser.shuffle(chosen)
    return chosen


def checked(scene: Scene) -> dict[str, Any]:
    """The account, and what is wrong with it."""
    attempts = read_manifest(scene.path).attempts
    lines = scene.rows(LEDGER_FILE)
    in_order = [one.number for one in attempts if one.exit_reason is not None]
    result = account(lines, ended_in_order=in_order)
    steps = [row["step"] for row in scene.rows("metrics.jsonl")]
    trained = [
        session
        for file in sorted((scene.path / "trajectories").glob("step_*.jsonl"))
        for session in read_trajectories(file)
    ]
    run_id = read_manifest(scene.path).run_id
    names = [one.session_id.removeprefix(f"{run_id}.") for one in trained]
    begun = {line["session"] for line in lines if line.get("what") == BEGUN}
    places: dict[str, set[str]] = {}
    for one in trained:
        places.setdefault(one.group_id.split("r")[0], set()).add(one.group_id)
    problems = []
    if steps != list(range(1, scene.steps + 1)):
        problems.append(f"steps are {steps}")
    if not result.is_sound:
        problems.append("the ledger does not add up")
    if len(set(names)) != len(names) or set(names) - begun:
        problems.append("a trained session is there twice, or was never begun")
    if any(len(groups) > 1 for groups in places.values()):
        problems.append("a place of the task order was trained on twice")
    return {
        "steps": len(steps),
        "attempts": len(attempts),
        "account": result.to_dict(),
        "trained_sessions": len(trained),
        "trained_rehomed": sum(one.rehomed > 0 for one in trained),
        "trained_void": sum(one.outcome is Outcome.VOID for one in trained),
        "problems": problems,
    }


def run(options: argparse.Namespace, root: Path) -> dict[str, Any] | None:
    """The result; None: there is more to do in another piece."""
    started_s = time.monotonic()
    chooser = random.Random(options.seed)
    kinds = options.kinds.split(",") if options.kinds else list(FAULTS)
    planned = schedule(options.faults or len(kinds), kinds, chooser)
    scene = Scene(root=root, steps=options.steps, pace_s=options.pace_s, random=chooser)
    scene.take_over()
    problems: list[str] = []

    def left_s() -> float:
        return float(options.piece_s - (time.monotonic() - started_s))

    try:
        scene.start()
        for number, kind in list(enumerate(planned))[len(scene.done) :]:
            due = 1 + number * (options.steps - 2) // len(planned)
            while scene.step() < due and left_s() > PIECE_MARGIN_S:
                time.sleep(0.2)
                scene.until(lambda: True, f"step {due}")
            if left_s() <= PIECE_MARGIN_S:
                scene.pause()
                return None
            began_s = time.monotonic()
            fact = {"kind": kind, "at_step": scene.step(), **FAULTS[kind](scene)}
            fact["noticed_s"] = round(time.monotonic() - began_s, 1)
            scene.done.append(fact)
            print(json.dumps(fact), file=sys.stderr, flush=True)
        assert scene.process is not None
        while scene.process.poll() is None:
            if left_s() <= PIECE_MARGIN_S / 2:
                scene.pause()
                return None
            time.sleep(0.2)
        if scene.process.returncode != 0:
            problems.append(f"the run ended with {scene.process.returncode}: {scene.complaint()}")
    except (ChaosError, subprocess.TimeoutExpired) as error:
        problems.append(str(error))
    finally:
        if scene.process is not None and scene.process.poll() is None:
            scene.process.kill()
    if not (scene.path / "events.jsonl").exists():
        raise SystemExit(f"chaos: {'; '.join(problems)}")
    result = checked(scene)
    deadline_s = time.monotonic() + 30.0
    while (left := scene.leftovers()) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    for process in left:
        problems.append(f"left behind: {process.pid} {process.cmdline()[:4]}")
        process.kill()
    return {
        "seed": options.seed,
        "faults": scene.done,
        **result,
        "problems": problems + result["problems"],
        "run_s": round(scene.rows("events.jsonl")[-1]["run_s"], 1),
    }


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--faults", type=int, default=None, help="as many as kinds if left out")
    parser.add_argument("--kinds", default="", help=f"of {','.join(FAULTS)}; all if left out")
    parser.add_argument("--pace-s", type=float, default=6.0, help="of a step, at least")
    parser.add_argument("--piece-s", type=float, default=3600.0, help="pause the run after so long")
    parser.add_argument("--out", type=Path, default=None, help="folder of the run, kept")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := [k for k in options.kinds.split(",") if options.kinds and k not in FAULTS]:
        parser.error(f"no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
    enter_namespaces()
    # So that a limit from outside also ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="rlmix-chaos-") as folder:
        root = options.out or Path(folder)
        root.mkdir(parents=True, exist_ok=True)
        result = run(options, root.resolve())
        weights = root.resolve() / "chaos" / "weights"
        subprocess.run(["umount", "--lazy", str(weights)], check=False)
        if result is None:
            print(f"paused; go on with the same command (--out {options.out})", file=sys.stderr)
            return UNFINISHED
    print(json.dumps(result, indent=2) if options.json else text_of(result))
    return 1 if result["problems"] else 0


def text_of(result: dict[str, Any]) -> str:
    faults = [
        f"  step {one['at_step']:>2}  {one['kind']:<18} {one['noticed_s']:>5.1f} s  "
        f"{one['noticed'][:90]}"
        for one in result["faults"]
    ]
    ledger = ", ".join(f"{key} {value}" for key, value in result["account"].items())
    return "\n".join(
        [
            f"{result['steps']} steps in {result['run_s']} s, {result['attempts']} attempts, "
            f"{len(faults)} faults (seed {result['seed']}):",
            *faults,
            f"sessions: {ledger}",
            f"trained: {result['trained_sessions']}, re-homed {result['trained_rehomed']}, void "
            f"{result['trained_void']}",
            *(f"PROBLEM {text}" for text in result["problems"]),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
