"""What all cells of the token study say together: verdicts by arm and distance between fleets."""

import statistics
from collections.abc import Sequence

from rlmix.studies.collapse import VERDICTS
from rlmix.studies.panels import ARM_TITLES
from rlmix.studies.records import Record, markdown_table, those_of_age, those_with, values_of
from rlmix.studies.token_grid import ARMS
from rlmix.studies.token_report import judged

CLOSE = 0.02
"""Two fleets are close under an arm when their mean final scores differ by no more."""


def verdict_table(records: Sequence[Record]) -> str:
    """Markdown: a row per arm and staleness over all fleets and seeds, and those of the seeds that
    no pilot had used."""
    titles = ["arm", "samplers", "cells", *VERDICTS, "collapsed, seeds 1 and 2"]
    rows = []
    for age, fresh in (("64 updates old", False), ("fresh", True)):
        for arm in ARMS:
            cells = those_with(those_of_age(records, fresh=fresh), arm=arm)
            if not cells:
                continue
            counts = _counts(cells)
            independent = [r for r in cells if r["seed"] != 0]
            rows.append([
                ARM_TITLES[arm], age, str(len(cells)), *(str(counts[v]) for v in VERDICTS),
                f"{_counts(independent)['collapsed']} of {len(independent)}",
            ])  # fmt: skip
    return markdown_table(titles, rows)


def distance_table(records: Sequence[Record]) -> str:
    """Markdown: how far the trainer's final score on six accelerators is from that on others, for
    samplers of equal age, as means over seeds."""
    titles = ["arm", "six accelerators less exact", "less BF16 kernels", "less NVFP4 + FP8 KV"]
    rows = []
    stale = those_of_age(records, fresh=False)
    for arm in ARMS:
        ends = {
            fleet: statistics.mean(values_of(r, "trainer/good_frac")[-1] for r in cells)
            for fleet in ("mixed", "exact", "bf16", "nvfp4")
            if (cells := those_with(stale, arm=arm, fleet=fleet))
        }
        if "mixed" not in ends:
            continue
        texts = [ARM_TITLES[arm]]
        for fleet in ("exact", "bf16", "nvfp4"):
            if fleet not in ends:
                texts.append("not run")
                continue
            gap = ends["mixed"] - ends[fleet]
            texts.append(f"{gap:+.3f}{', close' if abs(gap) <= CLOSE else ''}")
        rows.append(texts)
    return markdown_table(titles, rows)


def _counts(records: Sequence[Record]) -> dict[str, int]:
    found = [judged(record).verdict for record in records]
    return {verdict: found.count(verdict) for verdict in VERDICTS}
