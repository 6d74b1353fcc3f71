#!/usr/bin/env python
"""Plants faults into one side of a small random model and asks the diagnosis what they are.

    python scripts/diff_faults.py [--quick] [--json] [--write]

Both sides compute with the consistent operators, so without a fault they agree to the bit and a
fault is the only difference. Every fault of `rlmix.diff.faults` (the limits of conf/diff were
chosen with them) and `rlmix.diff.later_faults` (made after these were frozen) is planted into a
dense model and one with experts, then every pair of a list. Exit code 0 when each is named, with
its operator and class, and nothing else is. `--quick`: a third of them. `--write`: puts the table
into docs/diff-logprobs.md.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from rlmix.config.compose import load_config
from rlmix.diff.faults import FROZEN, Fault, planted
from rlmix.diff.findings import FRAMEWORK_CLASSES, OPERATOR_CLASSES, Thresholds
from rlmix.diff.judge import replay
from rlmix.diff.lab import ground, sides, text
from rlmix.diff.later_faults import LATER, PAIRS
from rlmix.diff.program import run, trace

PAGE = Path(__file__).parents[1] / "docs" / "diff-logprobs.md"
BEGIN, END = "<!-- faults begin -->\n", "<!-- faults end -->\n"


def limits() -> Thresholds:
    diff = load_config().config.diff
    return Thresholds(**{name: getattr(diff, name) for name in Thresholds.__dataclass_fields__})


def is_right(told: set[tuple[str, str]], faults: tuple[Fault, ...]) -> bool:
    """Whether every fault is named, and nothing that is none of them."""

    def fits(one: tuple[str, str], fault: Fault) -> bool:
        return one[0] == fault.operator and one[1] in (fault.cause, *fault.also)

    return all(any(fits(one, fault) for one in told) for fault in faults) and all(
        any(fits(one, fault) for fault in faults) for one in told
    )


def measure(*, is_moe: bool, step: int) -> list[dict[str, object]]:
    """One row for each fault and pair: what was planted, what was told."""
    found = ground(is_moe=is_moe)
    trainer, reference = sides(found)
    seen, known = trace(trainer, text()), limits()
    by_name = {fault.name: fault for fault in FROZEN + LATER}
    asked: list[tuple[Fault, ...]] = [(), *((fault,) for fault in (FROZEN + LATER)[::step])]
    asked += [tuple(by_name[name] for name in pair) for pair in PAIRS[::step]]
    rows: list[dict[str, object]] = []
    for faults in asked:
        if any(fault.needs_experts for fault in faults) and not is_moe:
            continue
        pool = planted(found, *faults)
        told = {
            (one.place.name, one.judgement.cause)
            for one in replay(trainer, pool, reference, seen.steps, known)
        }
        gap = float((run(pool, text()) - seen.logprobs_T).abs().mean())
        rows.append(
            {
                "fault": " + ".join(fault.name for fault in faults) or "none",
                "model": "moe" if is_moe else "dense",
                "made": "after" if any(f in LATER for f in faults) else "before",
                "planted": sorted((fault.operator, fault.cause) for fault in faults),
                "told": sorted(told),
                "mean_abs": gap,
                "is_right": is_right(told, faults),
            }
        )
    return rows


def confusion(rows: list[dict[str, object]]) -> list[str]:
    """Classes planted over classes told, single faults only."""
    counts: dict[tuple[str, str], int] = {}
    for row in rows:
        planted_here, told = row["planted"], row["told"]
        assert isinstance(planted_here, list)
        assert isinstance(told, list)
        if len(planted_here) == 1:
            names = sorted({cause for _, cause in told}) or ["nothing"]
            key = (planted_here[0][1], " and ".join(names))
            counts[key] = counts.get(key, 0) + 1
    lines = ["| planted | told | times |", "| --- | --- | --- |"]
    order = (*OPERATOR_CLASSES, *FRAMEWORK_CLASSES)
    for (cause, told_here), count in sorted(counts.items(), key=lambda p: order.index(p[0][0])):
        lines.append(f"| {cause} | {told_here} | {count} |")
    return lines


def table(rows: list[dict[str, object]]) -> list[str]:
    """Every fault, dense and with experts side by side."""
    by_fault: dict[str, dict[str, dict[str, object]]] = {}
    for row in rows:
        by_fault.setdefault(str(row["fault"]), {})[str(row["model"])] = row
    lines = ["| fault | limits | told | mean abs, dense | moe |", "| --- | --- | --- | --- | --- |"]
    for fault, models in by_fault.items():
        told = {
            ", ".join(f"{operator}: {cause}" for operator, cause in row["told"]) or "nothing"  # type: ignore[union-attr]
            for row in models.values()
        }
        gaps = [f"{models[m]['mean_abs']:.2g}" if m in models else "-" for m in ("dense", "moe")]
        made = next(iter(models.values()))["made"]
        wrong = "" if all(row["is_right"] for row in models.values()) else " **wrong**"
        cells = (f"`{fault}`", str(made), " / ".join(sorted(told)) + wrong, *gaps)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the faults")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--write", action="store_true", help="put the table into the docs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = 3 if options.quick else 1
    rows = [row for is_moe in (False, True) for row in measure(is_moe=is_moe, step=step)]
    wrong = [row for row in rows if not row["is_right"]]
    summary = f"{len(rows) - len(wrong)} of {len(rows)} named as planted"
    if options.json:
        print(json.dumps({"rows": rows, "right": len(rows) - len(wrong), "all": len(rows)}))
    lines = [summary + ".", "", *confusion(rows), "", *table(rows), ""]
    if options.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}" + "\n".join(lines) + f"{END}{rest.split(END)[1]}")
    elif not options.json:
        print("\n".join(lines))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
