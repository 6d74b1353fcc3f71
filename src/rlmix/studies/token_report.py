"""Tables and figures of the token study, from its records alone."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlmix.studies.collapse import Outcome, lead_steps, outcome, smoothed
from rlmix.studies.panels import ARM_TITLES, drawing, line
from rlmix.studies.token_grid import ARMS
from rlmix.studies.token_samplers import FLEETS

Record = Mapping[str, Any]

FLEET_TITLES = {
    "exact": "exact",
    "bf16": "BF16 kernels",
    "nvfp4": "NVFP4 + FP8 KV",
    "mixed": "six accelerators",
    "int3": "INT3 (study format)",
}
WARNINGS = {
    "mismatch/kl": ("exact KL", 1.0),
    "mismatch/k3_kl": ("k3", 1.0),
    "correction/head_tail_ratio": ("tail ratio", 20.0),
}
"""Signal to its title and its line: nats a token; a tail ratio that preceded the reference's
gradient spikes."""


def judged(record: Record) -> Outcome:
    curves = record["curves"]
    success = [value for _, value in curves["sampler/good_frac"]]
    held_out = [(int(step), value) for step, value in curves["trainer/good_frac"]]
    return outcome(success, held_out)


def _of(records: Iterable[Record], **wanted: object) -> list[Record]:
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def _cell_text(records: Sequence[Record], score: str) -> str:
    """Verdicts and ends of the seeds of one cell: `0.98 (0.97 to 0.99)`."""
    if not records:
        return "not run"
    found = [judged(record) for record in records]
    ends = [record["curves"][score][-1][1] for record in records]
    text = f"{statistics.mean(ends):.2f}"
    if len(ends) > 1:
        text += f" ({min(ends):.2f} to {max(ends):.2f})"
    for verdict in ("collapsed", "decayed"):
        if number := sum(f.verdict == verdict for f in found):
            steps = [f.collapse_step for f in found if f.collapse_step is not None]
            when = f" at {round(statistics.median(steps))}" if verdict == "collapsed" else ""
            text += f", **{verdict} {number}/{len(found)}{when}**"
    return text


def outcome_table(
    records: Sequence[Record], *, fresh: bool, score: str = "trainer/good_frac"
) -> str:
    """Markdown: a row per arm, a column per fleet; what the trainer's own weights (or samplers,
    by `score`) reach at the end (mean, lowest and highest seed), and how many seeds collapsed or
    decayed."""
    chosen = [r for r in records if (r["refresh_every"] == 1) == fresh]
    if not chosen:
        return "Not run yet."
    fleets = [f for f in FLEETS if _of(chosen, fleet=f)]
    lines = ["| arm | " + " | ".join(FLEET_TITLES[f] for f in fleets) + " |"]
    lines.append("| --- |" + " --- |" * len(fleets))
    for arm in ARMS:
        if _of(chosen, arm=arm):
            texts = [_cell_text(_of(chosen, arm=arm, fleet=f), score) for f in fleets]
            lines.append(f"| {ARM_TITLES[arm]} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def warning_table(records: Sequence[Record]) -> str:
    """Markdown: of the collapsed cells, how many updates before it each signal passed its line."""
    titles = [f"{title} above {threshold:g}" for title, threshold in WARNINGS.values()]
    lines = ["| arm | fleet | seed | collapse at | " + " | ".join(titles) + " |"]
    lines.append("| --- |" + " --- |" * (3 + len(titles)))
    for record in records:
        step = judged(record).collapse_step
        if step is None:
            continue
        fresh = ", fresh" if record["refresh_every"] == 1 else ""
        cells = [
            ARM_TITLES[record["arm"]],
            FLEET_TITLES[record["fleet"]] + fresh,
            str(record["seed"]),
            str(step),
            *(_lead(record, key, line, step) for key, (_, line) in WARNINGS.items()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else "No cell collapsed."


def _lead(record: Record, key: str, threshold: float, collapse_step: int) -> str:
    points = record["curves"].get(key)
    if not points:
        return "not measured"
    held = _dense(points, record["steps"])
    lead = lead_steps(held, threshold=threshold, collapse_step=collapse_step)
    return "not before" if lead is None else f"{lead} before"


def _dense(points: Sequence[Sequence[float]], steps: int) -> list[float]:
    """The value at each update: the last one measured, 0 before the first."""
    values, i, held = [], 0, 0.0
    for step in range(1, steps + 1):
        while i < len(points) and points[i][0] <= step:
            held = points[i][1]
            i += 1
        values.append(held)
    return values


def figure(records: Sequence[Record]) -> str:
    """SVG: a panel per fleet with stale samplers, a line per arm: smoothed share of good tokens of
    the sessions trained on, mean over seeds."""
    chosen = [r for r in records if r["refresh_every"] != 1]
    panels = []
    for fleet, title in FLEET_TITLES.items():
        lines = [
            line(arm, _mean_curve(cells))
            for arm in ARMS
            if (cells := _of(chosen, fleet=fleet, arm=arm))
        ]
        if lines:
            panels.append((title, lines))
    return drawing(
        panels,
        y_label="good tokens",
        described="Share of good tokens by update, for each fleet and arm",
    )


def _mean_curve(cells: Sequence[Record]) -> list[tuple[float, float]]:
    curves = [smoothed([v for _, v in r["curves"]["sampler/good_frac"]]) for r in cells]
    shortest = min(map(len, curves))
    steps = range(0, shortest, max(1, shortest // 80))
    return [(float(i + 1), statistics.mean(curve[i] for curve in curves)) for i in steps]
