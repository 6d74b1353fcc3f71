"""Tables and figures of the token study, from its records alone."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from rlmix.observe import svg
from rlmix.studies.collapse import Outcome, lead_steps, outcome, smoothed
from rlmix.studies.token_grid import ARMS
from rlmix.studies.token_samplers import FLEETS

Record = Mapping[str, Any]

ARM_TITLES = {
    "grpo": "GRPO",
    "tis": "TIS",
    "mis": "MIS",
    "sc": "SC",
    "mis_sc_full": "SC + MIS",
    "mis_sc": "SC + MIS + top-p replay",
    "grpo_topp": "GRPO + top-p replay",
}
FLEET_TITLES = {
    "exact": "exact",
    "bf16": "BF16 kernels",
    "nvfp4": "NVFP4 + FP8 KV",
    "mixed": "six accelerators",
    "int3": "INT3 (study format)",
}
KL_ALARM = 1.0
"""Nats a token of exact KL that count as an early warning."""
TAIL_ALARM = 20.0
"""sc_tail_ratio that preceded the reference's gradient spikes."""


def judged(record: Record) -> Outcome:
    curves = record["curves"]
    success = [value for _, value in curves["sampler/good_frac"]]
    held_out = [(int(step), value) for step, value in curves["trainer/good_frac"]]
    return outcome(success, held_out)


def _of(records: Iterable[Record], **wanted: object) -> list[Record]:
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def _cell_text(records: Sequence[Record]) -> str:
    """Verdicts and ends of the seeds of one cell: `0.98 (0.97 to 0.99)`."""
    if not records:
        return "not run"
    found = [judged(record) for record in records]
    ends = [record["curves"]["trainer/good_frac"][-1][1] for record in records]
    text = f"{statistics.mean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})"
    for verdict in ("collapsed", "decayed"):
        if number := sum(f.verdict == verdict for f in found):
            steps = [f.collapse_step for f in found if f.collapse_step is not None]
            when = f" at {round(statistics.median(steps))}" if verdict == "collapsed" else ""
            text += f", **{verdict} {number}/{len(found)}{when}**"
    return text


def outcome_table(records: Sequence[Record], *, fresh: bool) -> str:
    """Markdown: a row per arm, a column per fleet; what the trainer's own weights score at the
    end (mean, lowest and highest seed), and how many seeds collapsed or decayed."""
    chosen = [r for r in records if (r["refresh_every"] == 1) == fresh]
    fleets = [f for f in FLEETS if _of(chosen, fleet=f)]
    lines = ["| arm | " + " | ".join(FLEET_TITLES[f] for f in fleets) + " |"]
    lines.append("| --- |" + " --- |" * len(fleets))
    for arm in ARMS:
        if _of(chosen, arm=arm):
            texts = [_cell_text(_of(chosen, arm=arm, fleet=f)) for f in fleets]
            lines.append(f"| {ARM_TITLES[arm]} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def warning_table(records: Sequence[Record]) -> str:
    """Markdown: of the collapsed cells, how many updates before it each signal passed its line."""
    lines = ["| arm | fleet | seed | collapse | exact KL above 1 nat | sc_tail_ratio above 20 |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for record in records:
        step = judged(record).collapse_step
        if step is None or record["refresh_every"] == 1:
            continue
        leads = [
            _lead(record, "mismatch/kl", KL_ALARM, step),
            _lead(record, "correction/sc_tail_ratio", TAIL_ALARM, step),
        ]
        names = f"{ARM_TITLES[record['arm']]} | {FLEET_TITLES[record['fleet']]}"
        lines.append(f"| {names} | {record['seed']} | {step} | {leads[0]} | {leads[1]} |")
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


def figure(records: Sequence[Record], *, width: int = 330, height: int = 210) -> str:
    """SVG: a panel per fleet with stale samplers, a line per arm: smoothed share of good tokens of
    the sessions trained on, mean over seeds."""
    chosen = [r for r in records if r["refresh_every"] != 1]
    fleets = [f for f in FLEETS if _of(chosen, fleet=f)]
    body = []
    for i, fleet in enumerate(fleets):
        lines = [
            svg.Series(name=ARM_TITLES[arm], points=_mean_curve(cells), slot=slot)
            for slot, arm in enumerate(ARMS)
            if (cells := _of(chosen, fleet=fleet, arm=arm))
        ]
        axes = svg.Axes(
            x_label="update", y_label="good tokens", y_low=0.0, y_high=1.0,
            width=width, height=height,
        )  # fmt: skip
        chart = svg.line_chart(lines, axes, number=lambda value: f"{value:.3f}")
        x, y = (i % 3) * (width + 10), (i // 3) * (height + 34)
        title = escape(FLEET_TITLES[fleet])
        body.append(
            f'<text class="title" x="{x + 62}" y="{y + 18}">{title}</text>'
            f'<svg x="{x}" y="{y + 24}" width="{width}" height="{height}">{chart}</svg>'
        )
    rows = -(-len(fleets) // 3)
    key_x, key_y = ((len(fleets) % 3) * (width + 10) + 62, (rows - 1) * (height + 34) + 30)
    if len(fleets) % 3 == 0:
        key_x, key_y, rows = 62, rows * (height + 34) + 30, rows + 1
    for slot, arm in enumerate(ARMS):
        y = key_y + 20 * slot
        body.append(
            f'<g class="s{slot}"><path class="line thick" d="M{key_x} {y} h26"/></g>'
            f'<text x="{key_x + 34}" y="{y + 4}">{escape(ARM_TITLES[arm])}</text>'
        )
    size = (3 * (width + 10), rows * (height + 34))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="Share of good tokens by update, for each fleet and arm"><style>{_STYLE}'
        f"</style>{''.join(body)}</svg>\n"
    )


def _mean_curve(cells: Sequence[Record]) -> list[tuple[float, float]]:
    curves = [smoothed([v for _, v in r["curves"]["sampler/good_frac"]]) for r in cells]
    shortest = min(map(len, curves))
    steps = range(0, shortest, max(1, shortest // 80))
    return [(float(i + 1), statistics.mean(curve[i] for curve in curves)) for i in steps]


_COLOURS = ["#2563a8", "#c2571a", "#2f8f5b", "#8a4fb3", "#b8860b", "#c23b5a", "#5a6b7b", "#3aa6a6"]
_STYLE = (
    "text{fill:#555;font:11px sans-serif}.title{font-weight:600;font-size:13px}"
    ".grid{stroke:#ddd}.axis{stroke:#999}.line{fill:none;stroke:var(--c);stroke-width:1.6}"
    ".line.thick{stroke-width:2.8}.dot{fill:var(--c)}.hit{fill:transparent}"
    + "".join(f".s{i}{{--c:{colour}}}" for i, colour in enumerate(_COLOURS))
)
