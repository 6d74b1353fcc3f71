"""Tables and the figure of the agentic study, from its records alone."""

import statistics
from collections.abc import Sequence

from rlmix.studies.agentic import ARMS, FLEETS
from rlmix.studies.collapse import AGENTIC_SPAN, Outcome, outcome
from rlmix.studies.panels import ARM_TITLES, drawing, line
from rlmix.studies.records import (
    Record,
    markdown_table,
    mean_and_span,
    mean_curve,
    those_with,
    values_of,
)

FLEET_TITLES = {"bf16": "BF16 pools", "mixed": "six accelerators"}


def judged(record: Record) -> Outcome:
    """By the mean reward of each update, and by held-out tasks before and after the run."""
    rewards = values_of(record, "reward/mean")
    found = record["eval"]
    held_out = [(1, found["warm_start"]), (len(rewards), found["trained"])] if found else []
    return outcome(rewards, held_out, AGENTIC_SPAN)


def outcome_table(records: Sequence[Record]) -> str:
    """Markdown: a row per arm and fleet; mean, lowest and highest seed."""
    titles = [
        "arm", "fleet", "seeds", "held-out pass@1, BF16: before", "after", "pass@4",
        "best reward, 5 updates", "at the end", "k3 at the end", "masked", "verdicts",
    ]  # fmt: skip
    rows = []
    for arm in ARMS:
        for fleet in FLEETS:
            if not (chosen := those_with(records, arm=arm, fleet=fleet)):
                continue
            found = [judged(record) for record in chosen]
            verdicts = [one.verdict for one in found]
            texts = [
                ARM_TITLES[arm],
                FLEET_TITLES[fleet],
                ", ".join(str(record["seed"]) for record in chosen),
                mean_and_span([r["eval"]["warm_start"] for r in chosen], 3),
                mean_and_span([r["eval"]["trained"] for r in chosen], 3),
                mean_and_span([r["several"]["pass_at_k"] for r in chosen], 3),
                mean_and_span([one.best for one in found], 3),
                mean_and_span([one.last for one in found], 3),
                mean_and_span([_end(r, "mismatch/k3_kl") for r in chosen], 4),
                mean_and_span([_end(r, "correction/masked_frac") for r in chosen], 4),
                ", ".join(
                    f"{verdicts.count(name)} {name}" for name in dict.fromkeys(sorted(verdicts))
                ),
            ]
            rows.append(texts)
    return markdown_table(titles, rows)


def _end(record: Record, key: str) -> float:
    """Mean over the last updates of a window."""
    return statistics.mean(values_of(record, key)[-AGENTIC_SPAN.window_steps :])


def cost_table(records: Sequence[Record]) -> str:
    """Markdown: modelled USD of the samplers' accelerators and measured seconds, per update."""
    rows = []
    for fleet in FLEETS:
        if chosen := those_with(records, fleet=fleet):
            usd = mean_and_span([r["cost_usd"] / r["steps"] for r in chosen], 4)
            seconds = mean_and_span([r["wall_s"] / r["steps"] for r in chosen], 1)
            rows.append([FLEET_TITLES[fleet], str(len(chosen)), usd, seconds])
    titles = ["fleet", "runs", "modelled USD an update", "measured seconds an update"]
    return markdown_table(titles, rows)


def figure(records: Sequence[Record]) -> str:
    """SVG: a panel per fleet, a line per arm: mean reward over 5 updates, mean over seeds."""
    panels = []
    for fleet in FLEETS:
        lines = [
            line(arm, mean_curve(chosen, "reward/mean", window_steps=AGENTIC_SPAN.window_steps))
            for arm in ARMS
            if (chosen := those_with(records, fleet=fleet, arm=arm))
        ]
        if lines:
            panels.append((FLEET_TITLES[fleet], lines))
    return drawing(
        panels, y_label="reward", described="Mean reward by update, for each fleet and arm"
    )
