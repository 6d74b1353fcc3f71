"""The cells of the token study, and where each keeps its record.

Invariant: a cell's name says all that distinguishes it; a record is complete or absent.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlmix.studies.records import short, write_record
from rlmix.studies.token_run import Cell, Correction, run_cell
from rlmix.studies.token_samplers import FLEETS

ARMS = ("grpo", "tis", "mis", "sc", "mis_sc_full", "mis_sc", "grpo_topp")
"""Files of `conf/algo`; `mis_sc` and `grpo_topp` sample from kept sets and replay them."""
FRESH_ARMS = ("grpo", "mis_sc_full")
"""Arms of the controls whose samplers are refreshed at every update."""
SEEDS = (0, 1, 2)
LR = 1.0
"""Half of the largest power of two at which GRPO learned from exact and fresh samples in pilots
(2; at 4 it collapsed); at 2 no arm was stable with samplers this stale."""
STALE = 64
"""Updates between two refreshes of the samplers."""
STEPS = 400
"""Every pilot that collapsed had done so by 300."""
KEPT = {
    "sampler/good_frac": 1,
    "trainer/good_frac": 1,
    "reward/mean": 10,
    "mismatch/kl": 10,
    "mismatch/k3_kl": 10,
    "correction/head_tail_ratio": 10,
    "correction/masked_frac": 10,
    "sampler/entropy": 10,
    "loss/grad_norm": 10,
}
"""What a record keeps, and of every how many updates (where it was measured at all)."""


def name_of(cell: Cell) -> str:
    kind = "fresh" if cell.refresh_every == 1 else f"stale{cell.refresh_every}"
    return f"{cell.arm}-{cell.fleet}-{kind}-seed{cell.seed}"


def cells(
    corrections: dict[str, Correction],
    *,
    fleets: Sequence[str] = tuple(FLEETS),
    seeds: Sequence[int] = SEEDS,
    steps: int = STEPS,
) -> Iterator[Cell]:
    """Every arm on every fleet with stale samplers, then the fresh controls of two arms.

    Args:
        corrections: arm to what its loss does, read from `conf/algo`.
    """
    for seed in seeds:
        for refresh_every, arms in ((STALE, ARMS), (1, FRESH_ARMS)):
            for fleet in fleets:
                for arm in arms:
                    if arm in corrections:
                        yield Cell(
                            arm=arm,
                            correction=corrections[arm],
                            fleet=fleet,
                            refresh_every=refresh_every,
                            lr=LR,
                            steps=steps,
                            seed=seed,
                        )


def num_cells() -> int:
    """Of the whole study."""
    return len(SEEDS) * len(FLEETS) * (len(ARMS) + len(FRESH_ARMS))


def record_cell(cell: Cell, folder: Path) -> Path:
    """Run a cell unless its record is there; the record appears whole, at the end.

    A record is one JSON document: the cell, and each kept quantity as a list over updates.
    """
    path = folder / f"{name_of(cell)}.json"
    if path.exists():
        return path
    rows: list[dict[str, Any]] = []
    run_cell(cell, rows.append)
    record = {
        "arm": cell.arm,
        "fleet": cell.fleet,
        "refresh_every": cell.refresh_every,
        "lr": cell.lr,
        "steps": cell.steps,
        "seed": cell.seed,
        "failed": rows[-1].get("failed", ""),
        "curves": {key: _column(rows, key) for key in KEPT if any(key in row for row in rows)},
    }
    write_record(path, record)
    return path


def _column(rows: Sequence[dict[str, Any]], key: str) -> list[list[float]]:
    """[update, value] where there is one."""
    stride = KEPT[key]
    return [
        [row["step"], short(row[key])]
        for row in rows
        if key in row and (row["step"] % stride == 0 or row["step"] == 1)
    ]
