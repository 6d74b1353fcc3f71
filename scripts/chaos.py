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
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
from chaos_scene import MARK, ChaosError, Scene, enter_namespaces

from rlmix.core.trajectory import Outcome
from rlmix.loop.ledger import BEGUN, LEDGER_FILE, account
from rlmix.observe.manifest import read_manifest
from rlmix.observe.trajectories import read_trajectories
from rlmix.scaling.control import ControlClient

UNFINISHED = 3
"""Exit code of a piece after which there is more to do."""
PIECE_MARGIN_S = 45.0
"""What is left of a piece when no further fault is begun: one takes about so long."""
RESTART_MARGIN_S = 150.0
"""The same of a restart of the controller, on a machine with other work."""
PAUSE_MARGIN_S = 35.0
"""What is left of a piece when the run is paused: a step, a checkpoint, an orderly end."""


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
            restarts = kind == controller_restart.__name__
            margin_s = RESTART_MARGIN_S if restarts else PIECE_MARGIN_S
            while scene.step() < due and left_s() > margin_s:
                time.sleep(0.2)
                scene.until(lambda: True, f"step {due}")
            if left_s() <= margin_s:
                scene.pause()
                return None
            began_s = time.monotonic()
            fact = {"kind": kind, "at_step": scene.step(), **FAULTS[kind](scene)}
            fact["noticed_s"] = round(time.monotonic() - began_s, 1)
            scene.done.append(fact)
            print(json.dumps(fact), file=sys.stderr, flush=True)
        assert scene.process is not None
        while scene.process.poll() is None:
            if left_s() <= PAUSE_MARGIN_S:
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
