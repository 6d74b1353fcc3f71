"""What all runs of the agentic study say together: one fleet against the other, and what announced
a fall."""

import statistics
from collections.abc import Callable, Sequence

from rlmix.studies import token_report
from rlmix.studies.agentic import ARMS
from rlmix.studies.agentic_report import FLEET_TITLES, judged
from rlmix.studies.collapse import COLLAPSED_FRAC
from rlmix.studies.crossings import crossed
from rlmix.studies.panels import ARM_TITLES
from rlmix.studies.records import Record, markdown_table, those_with, values_of

WARNINGS = {
    "mismatch/k3_kl": token_report.WARNINGS["mismatch/k3_kl"],
    "correction/sc_tail_ratio": token_report.WARNINGS["correction/head_tail_ratio"],
}
"""Those of the token study that a run has, with its lines. A tail ratio is known where
centering has heads."""


def distance_table(records: Sequence[Record]) -> str:
    """Markdown: six accelerators less BF16 pools under each arm, seed by seed: mean difference,
    lowest and highest."""
    rows = []
    for arm in ARMS:
        pairs = [
            (mixed, homogeneous)
            for mixed in those_with(records, arm=arm, fleet="mixed")
            for homogeneous in those_with(records, arm=arm, fleet="bf16", seed=mixed["seed"])
        ]
        if pairs:
            rows.append([
                ARM_TITLES[arm],
                str(len(pairs)),
                _gap(pairs, lambda r: r["eval"]["trained"]),
                _gap(pairs, lambda r: r["several"]["pass_at_k"]),
                _gap(pairs, lambda r: judged(r).last),
            ])  # fmt: skip
    titles = ["arm", "seeds", "held-out pass@1", "pass@4", "reward at the end"]
    return markdown_table(titles, rows)


def _gap(pairs: Sequence[tuple[Record, Record]], score: Callable[[Record], float]) -> str:
    gaps = [score(mixed) - score(homogeneous) for mixed, homogeneous in pairs]
    return f"{statistics.mean(gaps):+.3f} ({min(gaps):+.3f} to {max(gaps):+.3f})"


def fall_table(records: Sequence[Record]) -> str:
    """Markdown: the runs that did not stay stable, lost the warm start's score on held-out tasks,
    or in which a signal passed its line: when."""
    rows = []
    for record in records:
        found = judged(record)
        spoke = [crossed(record, key, threshold) for key, (_, threshold) in WARNINGS.items()]
        if found.verdict == "stable" and True not in spoke and not lost(record):
            continue
        k3 = values_of(record, "mismatch/k3_kl")
        rows.append([
            ARM_TITLES[record["arm"]],
            FLEET_TITLES[record["fleet"]],
            str(record["seed"]),
            found.verdict,
            f"{record['eval']['trained']:.3f}",
            "never" if found.down_since is None else str(found.down_since),
            *(_first(record, key, threshold) for key, (_, threshold) in WARNINGS.items()),
            f"{max(k3):.2g} at {k3.index(max(k3)) + 1}",
        ])  # fmt: skip
    if not rows:
        return "No run fell and no signal passed its line."
    titles = ["arm", "fleet", "seed", "verdict", "held-out after", "reward below half since"]
    lines = [f"{title} first above {threshold:g}" for title, threshold in WARNINGS.values()]
    return markdown_table([*titles, *lines, "highest k3"], rows)


def lost(record: Record) -> bool:
    """Whether the trained policy solves fewer than half as many held-out tasks as the warm start.
    Rewards come from samplers some updates old, so that a fall at the end is seen only here."""
    return bool(record["eval"]["trained"] < COLLAPSED_FRAC * record["eval"]["warm_start"])


def _first(record: Record, key: str, threshold: float) -> str:
    points = record["curves"].get(key)
    if not points:
        return "not measured"
    return next((str(int(step)) for step, value in points if value > threshold), "never")
