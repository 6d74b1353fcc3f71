"""Simulates mixed and homogeneous fleets at several contexts, prices and limits, and times it.

    .venv/bin/python scripts/bench_simulator.py --svg docs/scaling.svg    as in docs/scaling.md
    .venv/bin/python scripts/bench_simulator.py --quick --json

Everything in the table is modelled (`rlmix.scaling`): rooflines, no accelerator was used. The one
thing that is measured is how long the simulator takes.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.observe.svg import Axes, Series, line_chart
from rlmix.plan.build import build_plan
from rlmix.scaling.compare import Fleet, run_fleet, scaled_fleet
from rlmix.scaling.scenarios import MIXED, Request, fleets_of, request_of
from rlmix.scaling.simulator import Outcome

CONTEXTS = (8_192, 32_768, 65_536)
B200_LIMIT = 8
"""B200s, and as many B300s, that can be had for sampling where they are limited: one machine each.
B300s without limit beside scarce B200s would be no scarcity."""
SIMULATED: dict[tuple[Any, ...], Outcome] = {}
STYLE = (
    "svg{font-family:system-ui,sans-serif;background:#fff}"
    "text{fill:#4a515c;font-size:11px}.label{font-size:11.5px}"
    ".grid{stroke:#e2e5ea}.axis{stroke:#9aa2ae}.line{fill:none;stroke:var(--c);stroke-width:1.8}"
    ".dot{fill:var(--c)}.hit{fill:none}"
    ".s0{--c:#0b62a4}.s1{--c:#c8530a}.s2{--c:#1b7f4d}.s3{--c:#8a3fa0}.s4{--c:#7a5a00}"
)
COLOURS = ("#0b62a4", "#c8530a", "#1b7f4d", "#8a3fa0", "#7a5a00")


def request(hours: float, *overrides: str, b200: int | None) -> Request:
    settings = ["experiment=qwen36_mixed", f"scaling.simulate.hours={hours:g}", *overrides]
    config = load_config("train", settings).config
    facts = facts_of(config)
    plan = build_plan(config, facts=facts, python="python")
    quota = None if b200 is None else {"b200": b200, "b300": b200}
    return request_of(config, plan, facts, quota_gpus=quota)


def compared(hours: float, *, context: int, prices: str, b200: int | None) -> list[dict[str, Any]]:
    """One row for each fleet."""
    asked = request(
        hours,
        f"scaling.simulate.context_tokens={context}",
        f"scaling.simulate.prices={prices}",
        b200=b200,
    )
    rows = []
    for fleet in fleets_of(asked):
        outcome = priced(run_once(fleet, asked, context), asked)
        rows.append({
            "context": context, "prices": prices, "b200": b200, "gpus": fleet.gpus,
            "missing": fleet.missing, "bought": dict(fleet.replicas), **outcome, "name": fleet.name,
        })  # fmt: skip
    mixed = rows[0]
    for row in rows:
        for key in ("usd_per_update", "pools_usd_per_update"):
            mine, other = mixed[key], row[key]
            row[f"mixed_{key}_ratio"] = mine / other if mine and other else None
    return rows


def run_once(fleet: Fleet, asked: Request, context: int) -> Outcome:
    """Prices and quotas change nothing in the history of a fixed fleet, so it is simulated once."""
    key = (context, tuple(sorted((name, n) for name, n in fleet.replicas.items() if n)))
    if key not in SIMULATED:
        SIMULATED[key] = run_fleet(fleet, asked.market, asked.scenario)
    return SIMULATED[key]


def priced(outcome: Outcome, asked: Request) -> dict[str, Any]:
    """The outcome at the prices of a request."""
    pools = sum(n * asked.market.model(name).usd_per_hour for name, n in outcome.replicas.items())
    whole = pools + asked.scenario.trainer_usd_per_hour
    updates = outcome.updates_per_h
    return outcome.to_dict() | {
        "usd_per_hour": whole,
        "usd_per_update": whole / updates if updates else None,
        "pools_usd_per_update": pools / updates if updates else None,
    }


def scaled(hours: float) -> list[dict[str, Any]]:
    """Fixed for the usual demand, fixed for the peak, and scaled, while the trainer is three times
    as fast in the middle third of the time. Short contexts: there the staleness bound leaves the
    trainer room to be faster."""
    overrides = ("scaling.simulate.context_tokens=8192", "scaling.simulate.trainer_step_s=120",
                 "scaling.simulate.burst_factor=3")  # fmt: skip
    asked = request(hours, *overrides, b200=None)
    usual = fleets_of(asked)[0]
    market = replace(asked.market, need=replace(asked.market.need, step_s=40.0))
    peak = scaled_fleet("mixed_for_the_peak", asked.today, market)
    rows = []
    for name, fleet, rules in (
        ("mixed_for_the_usual", usual, None),
        ("mixed_for_the_peak", peak, None),
        ("mixed_scaled", usual, asked.rules),
    ):
        named = replace(fleet, name=name)
        outcome = run_fleet(named, asked.market, asked.scenario, rules=rules)
        rows.append({"gpus": fleet.gpus, **outcome.to_dict()})
    return rows


def timed(num_gpus: int, hours: float, *, batch_frac: float | None = None) -> dict[str, Any]:
    """CPU seconds for a simulated day of the mixed fleet at that size, the start included.

    Args:
        batch_frac: 0 handles every session at its own moment; None: as configured.
    """
    overrides = [] if batch_frac is None else [f"scaling.simulate.batch_frac={batch_frac}"]
    asked = request(hours, "scaling.simulate.max_sessions=20000", *overrides, b200=None)
    fleet = fleets_of(asked)[0]
    factor = num_gpus / fleet.gpus
    replicas = {pool: max(1, round(n * factor)) for pool, n in fleet.replicas.items()}
    gpus = sum(n * asked.market.model(pool).gpus for pool, n in replicas.items())
    steps = round(asked.scenario.sessions_per_step * factor / 8) * 8
    scenario = replace(asked.scenario, sessions_per_step=max(8, steps))
    # Time of this process alone: the machine may be shared.
    started_s = time.process_time()
    outcome = run_fleet(replace(fleet, replicas=replicas), asked.market, scenario)
    took_s = time.process_time() - started_s
    return {
        "gpus": gpus,
        "hours": hours,
        "batch_frac": asked.scenario.batch_frac,
        "updates_per_h": outcome.updates_per_h,
        "open_sessions": outcome.open_sessions,
        "sessions": outcome.started,
        "events": outcome.events,
        "cpu_s_per_day": took_s * 24.0 / hours,
    }


def plot(rows: list[dict[str, Any]]) -> str:
    """Price of an update by context, list prices, B200s without limit; one line a fleet."""
    shown = [row for row in rows if row["prices"] == "list" and row["b200"] is None]
    names = list(dict.fromkeys(row["name"] for row in shown))
    series = [
        Series(
            name=name,
            points=[
                (row["context"] / 1024, row["usd_per_update"])
                for row in shown
                if row["name"] == name and row["usd_per_update"] is not None
            ],
            slot=slot,
        )
        for slot, name in enumerate(names)
    ]
    axes = Axes(
        x_label="mean context, thousand tokens",
        y_label="USD per update, pools and trainer, modelled",
        y_low=0.0,
        width=720,
        height=320,
    )
    chart = line_chart(series, axes, number=lambda value: f"{value:.2f}")
    chart = chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, body = chart.split(">", 1)
    words = "".join(
        f'<text class="label" x="80" y="{26 + 16 * slot}" style="fill:{COLOURS[slot]}">'
        f"{name}</text>"
        for slot, name in enumerate(names)
    )
    return f"{head}><style>{STYLE}</style>{body.removesuffix('</svg>')}{words}</svg>\n"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| context | prices | B200s | fleet | GPUs | USD/update | pools | updates/h | "
        "mixed against it | pools only |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        limit = "any" if row["b200"] is None else str(row["b200"])
        lines.append(
            f"| {row['context'] // 1024}K | {row['prices']} | {limit} | `{row['name']}` | "
            f"{row['gpus']} | {_money(row['usd_per_update'])} | "
            f"{_money(row['pools_usd_per_update'])} | {row['updates_per_h']:.1f} | "
            f"{_change(row, 'usd_per_update')} | {_change(row, 'pools_usd_per_update')} |"
        )
    return "\n".join(lines)


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _change(row: dict[str, Any], key: str) -> str:
    ratio = row[f"mixed_{key}_ratio"]
    if row["name"] == MIXED or ratio is None:
        return "-"
    return f"{100 * (ratio - 1):+.0f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one context, list prices, under 60 s")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--svg", type=Path, help="where to write the plot")
    arguments = parser.parse_args()
    contexts, prices = (
        (CONTEXTS[1:2], ("list",)) if arguments.quick else (CONTEXTS, ("list", "market"))
    )
    hours = 2.0 if arguments.quick else 6.0
    rows = [
        row
        for context in contexts
        for price in prices
        for limit in (None, B200_LIMIT)
        for row in compared(
            hours * context / CONTEXTS[1], context=context, prices=price, b200=limit
        )
    ]
    fixed_or_scaled = [] if arguments.quick else scaled(6.0)
    times = (
        [timed(200, 1.0)]
        if arguments.quick
        else [timed(64, 24.0), timed(2000, 24.0), timed(64, 4.0, batch_frac=0.0),
              timed(2000, 1.0, batch_frac=0.0)]
    )  # fmt: skip
    if arguments.svg is not None:
        arguments.svg.write_text(plot(rows))
    if arguments.json:
        print(json.dumps({"rows": rows, "scaled": fixed_or_scaled, "times": times}, indent=1))
        return
    print(table(rows))
    for row in fixed_or_scaled:
        print(
            f"| `{row['name']}` | {row['gpus']} | {_money(row['usd_per_update'])} | "
            f"{row['updates_per_h']:.1f} | {row['trainer_wait_frac']:.0%} | {row['operations']} |"
        )
    for row in times:
        print(row)


if __name__ == "__main__":
    main()
