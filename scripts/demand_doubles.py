"""A default run whose trainer suddenly needs twice as many sessions; the policy alone reacts.

    .venv/bin/python scripts/demand_doubles.py --json
    .venv/bin/python scripts/demand_doubles.py --json experiment=tiny     two pools: starts sooner

It starts `rlmix train` with `scaling.auto=false` and measures what the pools finish; gives the
trainer a pace that takes 70 % of it (`loop.min_step_s`), waits until steps are as slow as that,
and lets the policy act: nothing should happen. Then `loop.sessions_per_step` is doubled from
outside, and the operations that the policy begins are printed. Each phase that is over is a line
on stderr. Exit 1 when it began none after the doubling, or one before.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmix.core.errors import RlmixError
from rlmix.observe.jsonl import read_jsonl
from rlmix.scaling.control import ControlClient

USED_FRAC = 0.7
"""Of what the pools can, before the doubling: twice as much is 1.4 times what they can."""
QUICK_RULES = {"scaling.every_s": 5.0, "scaling.out_delay_s": 10.0, "scaling.most_changes": 2}
"""A run of minutes cannot wait for rules of hours."""
PACED_STEPS = 3
"""Steps at the new pace before the policy may act: it judges by the last ones."""
CALM_STEPS = 2
"""Steps in which the policy may act and should not."""


def rows(path: Path, file: str) -> list[dict[str, Any]]:
    return list(read_jsonl(path / file)) if (path / file).exists() else []


def log_of(folder: Path) -> str:
    return (folder / "run.log").read_text()[-1500:]


def until(condition: Callable[[], Any], run: "subprocess.Popen[bytes]", limit_s: float) -> Any:
    deadline_s = time.monotonic() + limit_s
    while not (result := condition()):
        if run.poll() is not None or time.monotonic() > deadline_s:
            return None
        time.sleep(0.2)
    return result


def tell(phase: str, since_s: float, **facts: Any) -> None:
    line = {"phase": phase, "after_s": round(time.monotonic() - since_s, 1), **facts}
    print(json.dumps(line), file=sys.stderr, flush=True)


def watch(folder: Path, overrides: list[str], limit_s: float) -> dict[str, Any]:
    """Run it, and what was seen."""
    path, since_s = folder / "doubles", time.monotonic()
    command = [sys.executable, "-c", "from rlmix.cli import main; main()", "train",
               f"run.dir={folder}", "run.name=doubles", "loop.steps=1000", "loop.eval_tasks=0",
               "observe.live=false", *overrides]  # fmt: skip
    with (folder / "run.log").open("wb") as log:
        run = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        if not until(lambda: len(rows(path, "metrics.jsonl")) >= 3, run, limit_s):
            return {"error": f"no 3 steps in {limit_s:g} s", "log": log_of(folder)}
        client = ControlClient.of_run(path)
        first = rows(path, "metrics.jsonl")[1:]
        sessions = sum(row["rollout/sessions"] for row in first)
        per_s = sessions / sum(row["time/step_s"] for row in first)
        per_step = int(first[-1]["rollout/sessions"])
        tell("measured", since_s, finished_per_s=per_s)
        pace_s = round(per_step / (USED_FRAC * per_s), 1)

        def steps_pass(number: int) -> None:
            wanted = len(rows(path, "metrics.jsonl")) + number
            until(lambda: len(rows(path, "metrics.jsonl")) >= wanted, run, limit_s)

        # What the trainer took before it was given its pace is no demand of the paced one.
        client.change_settings({**QUICK_RULES, "loop.min_step_s": pace_s})
        steps_pass(PACED_STEPS)
        tell("paced", since_s, min_step_s=pace_s)
        client.change_settings({"scaling.auto": True})
        steps_pass(CALM_STEPS)
        before = client.pools()
        tell("calm", since_s, policy=before["policy"])
        doubled_s = time.time()
        client.change_settings({"loop.sessions_per_step": 2 * per_step})

        def reacted() -> list[dict[str, Any]]:
            return [e for e in rows(path, "events.jsonl") if e["kind"] == "scale_done"]

        until(reacted, run, limit_s)
        tell("reacted" if reacted() else "nothing done", since_s)
        after = client.pools()
    except RlmixError as error:
        return {"error": str(error), "log": log_of(folder)}
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            time.sleep(1.0)
            run.send_signal(signal.SIGINT)
            run.wait(timeout=60)
    events = rows(path, "events.jsonl")
    started = [e for e in events if e["kind"] == "scale_started"]
    return {
        "finished_per_s": per_s,
        "min_step_s": pace_s,
        "sessions_per_step": [per_step, 2 * per_step],
        "began_before": sum(e["unix_s"] < doubled_s for e in started),
        "policy_before": before["policy"],
        "policy_after": after["policy"],
        "usd_per_hour": [before["usd_per_hour"], after["usd_per_hour"]],
        "operations": [
            {
                "id": e["operation"], "after_s": round(e["unix_s"] - doubled_s, 1),
                "targets": e["targets"], "from": e["from"], "reason": e["reason"],
            }
            for e in started
        ],
        "done": [
            {"id": e["operation"], "after_s": round(e["unix_s"] - doubled_s, 1)}
            for e in events
            if e["kind"] == "scale_done"
        ],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for the run")
    parser.add_argument("--limit-s", type=float, default=200.0, help="for each of three waits")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # So that a limit from outside also ends the run.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="rlmix-doubles-") as folder:
        result = watch(Path(folder), options.overrides, options.limit_s)
    print(json.dumps(result, indent=2 if options.json else None))
    good = bool(result.get("done")) and result.get("began_before") == 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
