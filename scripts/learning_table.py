"""Sums up finished runs: a Markdown table of their closing evaluations, and a plot.

    scripts/rlmix train run.name=seed0 run.seed=0      # and so on, then
    .venv/bin/python scripts/learning_table.py runs/seed0 runs/seed1 --svg docs/learning.svg

Everything comes from the runs' own summary.json and metrics.jsonl.
"""

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

from rlmix.observe.jsonl import read_jsonl
from rlmix.observe.report_charts import running_mean
from rlmix.observe.svg import Axes, Series, line_chart

COLOURS = ("#0b62a4", "#c8530a", "#1b7f4d", "#8a3fa0", "#7a5a00", "#b0224f")
STYLE = (
    "svg{font-family:system-ui,sans-serif;background:#fff}"
    "text{fill:#4a515c;font-size:11px}.label{font-size:11.5px}"
    ".grid{stroke:#e2e5ea}.axis{stroke:#9aa2ae}.line{fill:none;stroke:var(--c);stroke-width:1.8}"
    ".dot{fill:var(--c)}.hit{fill:none}"
    + "".join(f".s{slot}{{--c:{colour}}}" for slot, colour in enumerate(COLOURS))
)
SMOOTHED_STEPS = 3


def read(path: Path) -> tuple[dict[str, Any], list[tuple[float, float]]]:
    summary = json.loads((path / "summary.json").read_text())
    rewards = [
        (float(row["step"]), float(row["reward/mean"]))
        for row in read_jsonl(path / "metrics.jsonl")
    ]
    return summary, rewards


def table(runs: list[dict[str, Any]]) -> str:
    lines = [
        "| run | steps | warm start | trained | difference, 95 % interval | wall time |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for run in runs:
        found = run["eval"]
        low, high = found["ci95"]
        lines.append(
            f"| {run['run']} | {run['steps']} | {found['warm_start']:.3f} | {found['trained']:.3f} "
            f"| {found['difference']:+.3f} [{low:+.3f}, {high:+.3f}], {found['tasks']} tasks "
            f"| {run['wall_s'] / 60:.1f} min |"
        )
    return "\n".join(lines)


def plot(runs: list[tuple[dict[str, Any], list[tuple[float, float]]]]) -> str:
    """A stand-alone SVG: mean training reward of each run, averaged over a few steps."""
    series = [
        Series(name=summary["run"], points=running_mean(rewards, SMOOTHED_STEPS), slot=slot)
        for slot, (summary, rewards) in enumerate(runs)
    ]
    axes = Axes(
        x_label="optimizer step",
        y_label=f"training reward, mean of {SMOOTHED_STEPS} steps",
        y_low=0.0,
        y_high=1.0,
        width=720,
        height=300,
    )
    chart = line_chart(series, axes, number=lambda value: f"{value:.3f}")
    names = "".join(
        f'<text class="label" x="{90 + 120 * slot}" y="30" style="fill:{COLOURS[slot]}">'
        f"{escape(one.name)}</text>"
        for slot, one in enumerate(series)
    )
    chart = chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, body = chart.split(">", 1)
    return f"{head}><style>{STYLE}</style>{body.removesuffix('</svg>')}{names}</svg>\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="run directories, finished")
    parser.add_argument("--svg", type=Path, help="where to write the plot")
    arguments = parser.parse_args()
    runs = [read(path) for path in arguments.runs]
    print(table([summary for summary, _ in runs]))
    if arguments.svg is not None:
        arguments.svg.write_text(plot(runs))


if __name__ == "__main__":
    main()
