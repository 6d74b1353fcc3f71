"""Tables and figures of the token study, from its records alone."""

import statistics
from collections.abc import Sequence

from rlmix.studies.collapse import TOKEN_SPAN, Outcome, lead_steps, outcome
from rlmix.studies.crossings import warning_titles
from rlmix.studies.panels import ARM_TITLES, drawing, line
from rlmix.studies.records import (
    Record,
    markdown_table,
    mean_and_span,
    mean_curve,
    those_of_age,
    those_with,
    values_of,
)
from rlmix.studies.token_grid import ARMS
from rlmix.studies.token_samplers import FLEETS

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
    held_out = [(int(step), value) for step, value in record["curves"]["trainer/good_frac"]]
    return outcome(values_of(record, "sampler/good_frac"), held_out)


def _cell_text(records: Sequence[Record], score: str) -> str:
    """Verdicts and ends of the seeds of one cell: `0.98 (0.97 to 0.99)`."""
    if not records:
        return "not run"
    found = [judged(record) for record in records]
    ends = [record["curves"][score][-1][1] for record in records]
    text = mean_and_span(ends, 2)
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
    chosen = those_of_age(records, fresh=fresh)
    if not chosen:
        return "Not run yet."
    fleets = [f for f in FLEETS if those_with(chosen, fleet=f)]
    rows = [
        [
            ARM_TITLES[arm],
            *(_cell_text(those_with(chosen, arm=arm, fleet=f), score) for f in fleets),
        ]
        for arm in ARMS
        if those_with(chosen, arm=arm)
    ]
    return markdown_table(["arm", *(FLEET_TITLES[f] for f in fleets)], rows)


def warning_table(records: Sequence[Record]) -> str:
    """Markdown: of the collapsed cells, how many updates before it each signal passed its line."""
    rows = []
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
        rows.append(cells)
    if not rows:
        return "No cell collapsed."
    return markdown_table(["arm", "fleet", "seed", "collapse at", *warning_titles(WARNINGS)], rows)


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
    chosen = those_of_age(records, fresh=False)
    panels = []
    for fleet, title in FLEET_TITLES.items():
        lines = [
            line(arm, mean_curve(cells, "sampler/good_frac", window_steps=TOKEN_SPAN.window_steps))
            for arm in ARMS
            if (cells := those_with(chosen, fleet=fleet, arm=arm))
        ]
        if lines:
            panels.append((title, lines))
    return drawing(
        panels,
        y_label="good tokens",
        described="Share of good tokens by update, for each fleet and arm",
    )
