#!/usr/bin/env python
"""Measures the router beside others, on replicas that only take time.

    python scripts/bench_router.py [--quick] [--json] [--seeds 5] [--rivals-python PATH]

Every contestant gets the same sessions and the same replicas: one process that speaks SGLang's HTTP
with the step times of six accelerators (a roofline, `rlmix.plan.speed`; modelled, not measured).
The rivals are sglang-router and smg, as processes of their own, with their defaults; PATH is the
python that has them installed, if that is not this one. `oracle` is no router at all: the client
itself keeps each session on the replica with the fewest sessions per speed. `round_robin_direct` is
the client sending turn after turn to the next replica. Times are scaled: a second of an accelerator
takes TIME_SCALE seconds here, so routers have less time than they would have in earnest.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from bench_router_contestants import (
    Contestant,
    Fleet,
    available_contestants,
    plan_specs,
    ratio_specs,
    start_contestant,
)
from bench_router_latency import measure_latency

from rlmix.engine.timed.player import Played, Player
from rlmix.engine.timed.trace import Shape, make_trace

TIME_SCALE = 1 / 25
"""Seconds here for a second of an accelerator."""
TURN_TIMEOUT_S = 180.0
"""A turn that takes longer on the accelerator's clock has timed out for its client."""

LOADS = {
    # name: (sessions at a time, sessions in all). The six replicas have 46 places (184 / THINNING);
    # about a fifth, a half, and nearly all of them are busy (`busy_frac`).
    "light": (40, 60),
    "moderate": (80, 80),
    "high": (160, 160),
}
FULL_RUN = ("moderate", "high")
QUICK_LOADS = {"moderate": (48, 48)}
QUICK_TIME_SCALE = 1 / 50
QUICK_ONLY = ("sglang_router_cache_aware", "sglang_router_power_of_two",
              "sglang_router_round_robin", "round_robin_direct")  # fmt: skip


FULL_LOAD, QUICK_FULL_LOAD = (84, 140), (56, 56)
"""Of the three replicas with 16 places each whose speeds are 4 : 2 : 1: all of them are wanted, so
a router that leaves none idle uses them in proportion to their speeds."""


def summary(
    played: Played,
    *,
    cpu_s: float,
    usd_per_hour: float,
    num_sessions: int,
    time_scale: float,
    places: int,
) -> dict[str, Any]:
    """What one run of one contestant came to."""
    latencies = sorted(turn.latency_s for turn in played.turns)
    shares = Counter(turn.replica for turn in played.turns)
    tokens: Counter[str] = Counter()
    for turn in played.turns:
        tokens[turn.replica] += turn.output_tokens
    real_s = played.makespan_s / time_scale
    return {
        "makespan_s": round(played.makespan_s, 3),
        "busy_frac": round(
            sum(turn.engine_s for turn in played.turns) / played.makespan_s / places, 3
        ),
        "p50_ms": round(1e3 * quantile(latencies, 0.5), 1),
        "p99_ms": round(1e3 * quantile(latencies, 0.99), 1),
        "hit_frac": round(played.hit_frac, 4),
        "timeouts": played.timeouts,
        "errors": played.num_errors,
        "refusals": sum(played.refusals.values()),
        "sessions_lost": played.sessions_lost,
        "usd_per_session": round(usd_per_hour * real_s / 3600 / num_sessions, 5),
        "cpu_ms_per_request": round(1e3 * cpu_s / max(1, len(latencies)), 3),
        "turns": len(latencies),
        "turn_share": {name: round(n / len(latencies), 4) for name, n in sorted(shares.items())},
        "token_share": {
            name: round(n / max(1, sum(tokens.values())), 4) for name, n in sorted(tokens.items())
        },
        "kinds_of_errors": played.errors,
    }


def quantile(ordered: list[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


async def run_once(
    contestant: Contestant, fleet: Fleet, *, load: tuple[int, int], seed: int, shape: Shape
) -> dict[str, Any]:
    """One contestant, one trace, cold caches."""
    concurrency, num_sessions = load
    await fleet.reset()
    async with start_contestant(contestant, fleet) as running:
        player = Player(
            running.target,
            concurrency=concurrency,
            time_scale=fleet.time_scale,
            turn_timeout_s=TURN_TIMEOUT_S * fleet.time_scale,
        )
        before_s, fleet_before_s = running.cpu_s(), fleet.cpu_s()
        played = await player.play(make_trace(num_sessions, seed=seed, shape=shape))
        result = summary(
            played,
            cpu_s=running.cpu_s() - before_s,
            usd_per_hour=fleet.usd_per_hour,
            num_sessions=num_sessions,
            time_scale=fleet.time_scale,
            places=sum(spec.max_running for spec in fleet.specs),
        )
        result["placed_share"] = placed_shares(played, first=concurrency)
        result["fleet_cpu_ms_per_request"] = round(
            1e3 * (fleet.cpu_s() - fleet_before_s) / max(1, len(played.turns)), 3
        )
        return result


def placed_shares(played: Played, *, first: int) -> dict[str, float]:
    """Where the first turns of the sessions that came first were served."""
    firsts = [turn for turn in played.turns if turn.index == 0]
    numbers = {turn.session_id: int(turn.session_id.split("-")[1]) for turn in firsts}
    chosen = Counter(t.replica for t in firsts if numbers[t.session_id] < first)
    return {name: round(n / first, 4) for name, n in sorted(chosen.items())}


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Each number's median over the seeds; counts are summed."""
    summed = ("timeouts", "errors", "refusals", "sessions_lost", "turns")
    found: dict[str, Any] = {}
    for key, first in runs[0].items():
        if key in summed:
            found[key] = sum(run[key] for run in runs)
        elif isinstance(first, (int, float)):
            found[key] = round(statistics.median(run[key] for run in runs), 5)
        elif key in ("turn_share", "token_share", "placed_share"):
            names = sorted({name for run in runs for name in run[key]})
            found[key] = {
                name: round(statistics.mean(run[key].get(name, 0.0) for run in runs), 4)
                for name in names
            }
    return found


def shares_off(
    runs: list[dict[str, Any]], speeds: dict[str, float]
) -> dict[str, dict[str, float] | float]:
    """Shares of sessions and tokens, means over the seeds, beside shares of the speeds; and the
    largest relative distance between those."""
    capacity = {name: speed / sum(speeds.values()) for name, speed in speeds.items()}
    found: dict[str, dict[str, float] | float] = {
        "capacity": {name: round(share, 4) for name, share in capacity.items()}
    }
    for key in ("placed_share", "token_share"):
        mean = {n: statistics.mean(run[key].get(n, 0.0) for run in runs) for n in speeds}
        found[key] = {name: round(share, 4) for name, share in mean.items()}
        off = max(abs(mean[name] / capacity[name] - 1.0) for name in speeds)
        found[f"{key}_off_frac"] = round(off, 4)
    return found


def compare(by_name: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The document of one load: medians, and ratios seed by seed."""
    ours, oracle = by_name["ours"], by_name["oracle"]
    # `manual` keeps sessions by a key that the client has to send; it is told apart because the
    # other three are what this router is asked to beat.
    others = {n: medians(r) for n, r in by_name.items() if n not in ("ours", "oracle")}
    rivals = [
        name
        for name in by_name
        if name.startswith("sglang_router") and name != "sglang_router_manual"
    ]
    ratios = {
        name: round(
            statistics.median(
                run["makespan_s"] / our["makespan_s"] for run, our in zip(runs, ours, strict=True)
            ),
            3,
        )
        for name, runs in by_name.items()
        if name != "ours"
    }
    best = None
    if rivals:
        best = statistics.median(
            min(by_name[name][index]["makespan_s"] for name in rivals) / our["makespan_s"]
            for index, our in enumerate(ours)
        )
    return {
        "ours": medians(ours),
        "others": others,
        "oracle": medians(oracle),
        "ratio_best": None if best is None else round(best, 3),
        "ratio_oracle": round(
            statistics.median(
                our["makespan_s"] / run["makespan_s"] for our, run in zip(ours, oracle, strict=True)
            ),
            3,
        ),
        "ratios": ratios,
    }


async def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    only = QUICK_ONLY if arguments.quick and arguments.only is None else arguments.only
    contestants = available_contestants(arguments.rivals_python, only=only)
    shape = Shape(shared_tokens=arguments.shared_tokens)
    seeds = [arguments.seed + index for index in range(1 if arguments.quick else arguments.seeds)]
    chosen = arguments.loads or FULL_RUN
    loads = QUICK_LOADS if arguments.quick else {name: LOADS[name] for name in chosen}
    document: dict[str, Any] = {}
    time_scale = QUICK_TIME_SCALE if arguments.quick else TIME_SCALE
    without = [c for c in contestants if c.name in ("ours", "oracle")]
    scenarios = {
        "six": (plan_specs(time_scale=time_scale), loads, contestants),
        "four_two_one": (
            ratio_specs(time_scale=time_scale),
            {"full": QUICK_FULL_LOAD if arguments.quick else FULL_LOAD},
            without,
        ),
    }
    for scenario, (specs, scenario_loads, invited) in scenarios.items():
        if arguments.scenarios and scenario not in arguments.scenarios:
            continue
        found = {}
        async with Fleet(specs, folder / scenario) as fleet:
            for name, load in scenario_loads.items():
                by_name: dict[str, list[dict[str, Any]]] = {c.name: [] for c in invited}
                for index, seed in enumerate(seeds):
                    # Every contestant is first once: what else runs on the machine changes.
                    turn = index % len(invited)
                    for contestant in invited[turn:] + invited[:turn]:
                        result = await run_once(
                            contestant, fleet, load=load, seed=seed, shape=shape
                        )
                        by_name[contestant.name].append(result)
                        say(f"{scenario} {name} seed {seed} {contestant.name}: {brief(result)}")
                found[name] = {"sessions": load[1], "concurrency": load[0], **compare(by_name)}
                if scenario == "four_two_one":
                    found[name]["shares"] = shares_off(by_name["ours"], fleet.speeds)
                keep(arguments.out, {**document, scenario: found})
        document[scenario] = found
    if "six" in document and "moderate" in document["six"]:
        document = {**document["six"]["moderate"], **document}
    if not arguments.scenarios or "latency" in arguments.scenarios:
        document["latency"] = await measure_latency(
            contestants, folder / "latency", quick=arguments.quick, say=say
        )
    document["time_scale"] = time_scale
    document["contestants"] = {c.name: c.version for c in contestants}
    keep(arguments.out, document)
    return document


def keep(path: Path | None, document: dict[str, Any]) -> None:
    """A long run that is cut off has not been for nothing."""
    if path is not None:
        path.write_text(json.dumps(document))


def brief(result: dict[str, Any]) -> str:
    keys = ("makespan_s", "p50_ms", "p99_ms", "hit_frac", "timeouts", "errors", "sessions_lost",
            "cpu_ms_per_request")  # fmt: skip
    return " ".join(f"{key}={result[key]}" for key in keys)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def table(found: dict[str, Any]) -> str:
    """One load as a table in Markdown."""
    lines = [
        "| router | makespan s | times ours | p50 ms | p99 ms | cache hits | timeouts | errors "
        "| $ a session | CPU ms a request |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    rows = {"rlmix": found["ours"], **found["others"], "oracle, no router": found["oracle"]}
    for name, row in rows.items():
        ratio = 1.0 if name == "rlmix" else found["ratios"].get(name.split(",")[0], 0.0)
        lines.append(
            f"| {name} | {row['makespan_s']:.2f} | {ratio:.2f} | {row['p50_ms']:.0f} | "
            f"{row['p99_ms']:.0f} | {row['hit_frac']:.2f} | {row['timeouts']} | {row['errors']} | "
            f"{row['usd_per_session']:.4f} | {row['cpu_ms_per_request']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="one seed, smaller; under 60 s")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the document here too, after every load")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--rivals-python", help="python that has sglang_router or smg")
    parser.add_argument("--only", nargs="*", help="contestants by name; ours and oracle always run")
    parser.add_argument("--loads", nargs="*", choices=list(LOADS))
    parser.add_argument("--scenarios", nargs="*", choices=["six", "four_two_one", "latency"])
    parser.add_argument("--shared-tokens", type=int, default=0, help="a common system prompt")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlmix-bench-router-") as folder:
        document = asyncio.run(measure(arguments, Path(folder)))
    if arguments.json:
        print(json.dumps(document))
        return
    for scenario in ("six", "four_two_one"):
        for load, found in document.get(scenario, {}).items():
            print(f"\n{scenario}, {load} load: {found['concurrency']} sessions at a time, "
                  f"{found['sessions']} in all\n")  # fmt: skip
            print(table(found))
            if "shares" in found:
                print("\n" + json.dumps(found["shares"]))
            print(f"\nbest sglang-router / ours {found['ratio_best']}, "
                  f"ours / oracle {found['ratio_oracle']}")  # fmt: skip
    if "latency" in document:
        print("\n" + json.dumps(document["latency"], indent=1))


if __name__ == "__main__":
    main()
