"""Tables and the figure of the agentic study, from its records alone."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rlmix.studies.agentic import ARMS, FLEETS
from rlmix.studies.collapse import AGENTIC_SPAN, Outcome, outcome, smoothed
from rlmix.studies.panels import ARM_TITLES, drawing, line

Record = Mapping[str, Any]

FLEET_TITLES = {"bf16": "BF16 pools", "mixed": "six accelerators"}


def judged(record: Record) -> Outcome:
    """By the mean reward of each update, and by held-out tasks before and after the run."""
    rewards = [value for _, value in record["curves"]["reward/mean"]]
    found = record["eval"]
    held_out = [(1, found["warm_start"]), (len(rewards), found["trained"])] if found else []
    return outcome(rewards, held_out, AGENTIC_SPAN)


def _of(records: Sequence[Record], **wanted: object) -> list[Record]:
    return [r for r in records if all(r[key] == value for key, value in wanted.items())]


def _span_text(values: Sequence[float], digits: int = 3) -> str:
    mean = f"{statistics.mean(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def outcome_table(records: Sequence[Record]) -> str:
    """Markdown: a row per arm and fleet; mean, lowest and highest seed."""
    lines = [
        "| arm | fleet | seeds | held-out pass@1, BF16: before | after | "
        "best reward, 5 updates | at the end | k3 at the end | masked | verdicts |",
        "| --- |" + " --- |" * 9,
    ]
    for arm in ARMS:
        for fleet in FLEETS:
            if not (chosen := _of(records, arm=arm, fleet=fleet)):
                continue
            found = [judged(record) for record in chosen]
            verdicts = [one.verdict for one in found]
            texts = [
                ARM_TITLES[arm],
                FLEET_TITLES[fleet],
                ", ".join(str(record["seed"]) for record in chosen),
                _span_text([r["eval"]["warm_start"] for r in chosen]),
                _span_text([r["eval"]["trained"] for r in chosen]),
                _span_text([one.best for one in found]),
                _span_text([one.last for one in found]),
                _span_text([_end(r, "mismatch/k3_kl") for r in chosen], 4),
                _span_text([_end(r, "correction/masked_frac") for r in chosen], 4),
                ", ".join(
                    f"{verdicts.count(name)} {name}" for name in dict.fromkeys(sorted(verdicts))
                ),
            ]
            lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def _end(record: Record, key: str) -> float:
    """Mean over the last updates of a window."""
    values = [value for _, value in record["curves"][key]][-AGENTIC_SPAN.window_steps :]
    return statistics.mean(values)


def cost_table(records: Sequence[Record]) -> str:
    """Markdown: modelled USD of the samplers' accelerators and measured seconds, per update."""
    lines = ["| fleet | runs | modelled USD an update | measured seconds an update |"]
    lines.append("| --- | --- | --- | --- |")
    for fleet in FLEETS:
        if chosen := _of(records, fleet=fleet):
            usd = _span_text([r["cost_usd"] / r["steps"] for r in chosen], 4)
            seconds = _span_text([r["wall_s"] / r["steps"] for r in chosen], 1)
            lines.append(f"| {FLEET_TITLES[fleet]} | {len(chosen)} | {usd} | {seconds} |")
    return "\n".join(lines)


def figure(records: Sequence[Record]) -> str:
    """SVG: a panel per fleet, a line per arm: mean reward over 5 updates, mean over seeds."""
    panels = []
    for fleet in FLEETS:
        lines = [
            line(arm, _mean_curve(chosen))
            for arm in ARMS
            if (chosen := _of(records, fleet=fleet, arm=arm))
        ]
        if lines:
            panels.append((FLEET_TITLES[fleet], lines))
    return drawing(
        panels, y_label="reward", described="Mean reward by update, for each fleet and arm"
    )


def _mean_curve(records: Sequence[Record]) -> list[tuple[float, float]]:
    curves = [
        smoothed([v for _, v in r["curves"]["reward/mean"]], AGENTIC_SPAN.window_steps)
        for r in records
    ]
    shortest = min(map(len, curves))
    return [(float(i + 1), statistics.mean(c[i] for c in curves)) for i in range(shortest)]
