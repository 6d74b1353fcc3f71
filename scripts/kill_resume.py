#!/usr/bin/env python
"""Kills a whole run with SIGKILL at random moments, resumes it each time, and compares it with one
that nobody touched.

    .venv/bin/python scripts/kill_resume.py                       10 kills, two runs of 6 steps
    .venv/bin/python scripts/kill_resume.py --victim rank trainer.ranks=2 launch.max_restarts=20
        a trainer's rank is killed instead, which the run survives by itself so many times
    .venv/bin/python scripts/kill_resume.py --out DIR --piece-s 280    again, until it is not 3

The work is deterministic: exact numerics, no staleness, seeds that depend on the task alone. So
what a step learned, and from what, must be equal in both runs, and every step there once, in order.
A kill comes a random time after an attempt began, after its first replica serves, or after a step,
so that boots, sampling, steps, publications and saves are all met. Exit 0 when both runs agree, 1
when not, 3 when a piece's time is over and there is more to do.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from rlmix.observe.jsonl import read_jsonl

SETTINGS = (
    "experiment=tiny", "numerics.consistency=exact", "loop.max_staleness=0",
    "pools.b200.weights=bf16", "pools.b200.kv=bf16", "pools.b200.attention=triton",
    "pools.b200.moe=triton", "pools.a100.kv=bf16",
)  # fmt: skip
COMPARED = (
    "loss/policy", "loss/grad_norm", "reward/mean", "mismatch/mean_abs", "mismatch/k3_kl",
    "correction/masked_frac", "rollout/tokens", "trainer/tokens", "trainer/policy_tokens",
)  # fmt: skip
"""What a step learned from what: equal where the same sessions gave the same tokens."""
UNFINISHED = 3
ATTEMPT_LIMIT_S = 600.0
LOOK_S = 0.2
STATE_FILE = "kill_resume.json"


def command(out: Path, name: str, steps: int, extra: list[str], *, resume: bool) -> list[str]:
    base = [str(Path(sys.executable).with_name("rlmix")), "train"]
    if resume:
        return [*base, "--resume", str(out / "runs" / name), "--json"]
    return [*base, *SETTINGS, *extra, f"run.dir={out / 'runs'}", f"run.name={name}",
            f"loop.steps={steps}", "--json"]  # fmt: skip


def start(out: Path, name: str, steps: int, extra: list[str]) -> "subprocess.Popen[bytes]":
    resume = (out / "runs" / name / "manifest.json").is_file()
    with (out / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command(out, name, steps, extra, resume=resume),
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
        )


def steps_done(run: Path) -> list[int]:
    path = run / "metrics.jsonl"
    return [int(row["step"]) for row in read_jsonl(path)] if path.is_file() else []


def is_sampling(run: Path) -> bool:
    """Whether this attempt has replicas that serve."""
    attempts = json.loads((run / "manifest.json").read_text())["attempts"]
    path = run / "events.jsonl"
    events = read_jsonl(path) if path.is_file() else []
    now = [e for e in events if e.get("attempt") == len(attempts)]
    return any(e["kind"] == "replica_ready" for e in now)


def moment(
    run: Path, chance: random.Random, process: "subprocess.Popen[bytes]", piece_ends_s: float
) -> str:
    """Wait for a moment worth a kill; returns what it is after. Empty when the run, or the piece's
    time, ended first."""
    kind = chance.choice(("start", "sampling", "step"))
    before = len(steps_done(run)) if run.is_dir() else 0
    deadline_s = time.monotonic() + ATTEMPT_LIMIT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            return ""
        if time.monotonic() > piece_ends_s:
            return ""
        is_there = (run / "manifest.json").is_file()
        if is_there and (
            kind == "start"
            or (kind == "sampling" and is_sampling(run))
            or (kind == "step" and len(steps_done(run)) > before)
        ):
            time.sleep(chance.uniform(0.0, 8.0 if kind == "sampling" else 4.0))
            return kind if process.poll() is None else ""
        time.sleep(LOOK_S)
    raise SystemExit(f"kill_resume: nothing happened in {ATTEMPT_LIMIT_S:g} s; see {run}")


def kill(process: "subprocess.Popen[bytes]", run: Path, victim: str, chance: random.Random) -> str:
    """SIGKILL; returns to whom."""
    if victim == "run":
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "the driver and its group"
    ranks = trainer_ranks(run)
    if not ranks:
        return ""
    chosen = chance.choice(ranks)
    chosen.kill()
    return f"a rank, process {chosen.pid}"


def trainer_ranks(run: Path) -> list[psutil.Process]:
    """Those that write a rank's log; Ray gives its actors other names every now and then."""
    found = []
    for process in psutil.process_iter():
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        except OSError:
            continue
        if log.parent == run / "logs" and log.name.startswith("trainer-"):
            found.append(process)
    return found


def ends(process: "subprocess.Popen[bytes]", deadline_s: float) -> bool:
    """Wait for it; False when the piece's time is over (then the run is stopped politely)."""
    while process.poll() is None:
        if time.monotonic() > deadline_s:
            process.send_signal(signal.SIGINT)
            process.wait()
            return False
        time.sleep(LOOK_S)
    return True


def finish(out: Path, name: str, steps: int, extra: list[str], deadline_s: float) -> bool:
    """Run to the end; False when the piece's time is over."""
    process = start(out, name, steps, extra)
    if not ends(process, deadline_s):
        return False
    if process.returncode:
        raise SystemExit(f"kill_resume: {name} ended with {process.returncode}; {out / name}.log")
    return True


def compare(out: Path, steps: int) -> list[str]:
    """What differs between the two runs."""
    rows = {name: read_jsonl(out / "runs" / name / "metrics.jsonl") for name in ("whole", "killed")}
    found = [
        f"{name}: steps {[row['step'] for row in held]}"
        for name, held in rows.items()
        if [row["step"] for row in held] != list(range(1, steps + 1))
    ]
    for ours, theirs in zip(rows["whole"], rows["killed"], strict=False):
        found += [
            f"step {ours['step']}: {key} is {theirs.get(key)!r}, and {ours.get(key)!r} in the run "
            "that nobody touched"
            for key in COMPARED
            if ours.get(key) != theirs.get(key)
        ]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--victim", choices=("run", "rank"), default="run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("/tmp/rlmix-kill-resume"))
    parser.add_argument("--piece-s", type=float, default=1e9, help="stop politely after so long")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, e.g. trainer.ranks=2")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    state_path = out / STATE_FILE
    state: dict[str, Any] = {"kills": [], "whole": False}
    if state_path.is_file():
        state = json.loads(state_path.read_text())
    deadline_s = time.monotonic() + arguments.piece_s

    def keep() -> None:
        state_path.write_text(json.dumps(state))

    steps, extra = arguments.steps, arguments.overrides
    if not state["whole"]:
        state["whole"] = finish(out, "whole", steps, extra, deadline_s)
        keep()
        if not state["whole"]:
            sys.exit(UNFINISHED)
    run, is_over = out / "runs" / "killed", False
    while len(state["kills"]) < arguments.kills:
        if time.monotonic() > deadline_s:
            sys.exit(UNFINISHED)
        chance = random.Random(arguments.seed * 1000 + len(state["kills"]))
        process = start(out, "killed", steps, extra)
        while len(state["kills"]) < arguments.kills:
            after = moment(run, chance, process, deadline_s)
            if not after and (process.poll() is not None or arguments.victim == "rank"):
                break
            whom = kill(process, run, arguments.victim, chance)
            if whom:
                done = len(steps_done(run))
                after = after or "the piece's end"
                state["kills"].append({"after": after, "whom": whom, "steps": done})
                print(f"kill {len(state['kills'])}: {after}, {whom}, "
                      f"{done} steps done", file=sys.stderr, flush=True)  # fmt: skip
                keep()
            if arguments.victim == "run":
                break
        if not ends(process, deadline_s):
            sys.exit(UNFINISHED)
        if process.returncode == 0:
            is_over = True  # It came to its end between two kills.
            break
        if process.returncode != -signal.SIGKILL:
            raise SystemExit(f"kill_resume: ended with {process.returncode}; see {out}/killed.log")
    if not is_over and not finish(out, "killed", steps, extra, deadline_s):
        sys.exit(UNFINISHED)
    differences = compare(out, steps)
    document = {"kills": state["kills"], "steps": steps, "differences": differences}
    print(json.dumps(document) if arguments.json else
          f"{len(state['kills'])} kills, {steps} steps, "
          + ("the runs agree" if not differences else "; ".join(differences)))  # fmt: skip
    sys.exit(1 if differences else 0)


if __name__ == "__main__":
    main()
