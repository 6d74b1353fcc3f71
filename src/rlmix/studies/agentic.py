"""The agentic study: whole training runs, one for each arm, fleet and seed, and their records.

Invariant: a record is a function of one finished run's folder; it is complete or absent.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmix.studies.records import short, write_record

ARMS = ("grpo", "mis", "mis_sc_full", "mis_sc")
"""Files of `conf/algo`."""
FLEETS = ("bf16", "mixed")
"""Files of `conf/experiment/study`."""
SEEDS = (0, 1, 2)
KEPT = (
    "reward/mean",
    "mismatch/k3_kl",
    "mismatch/mean_abs",
    "correction/masked_frac",
    "correction/sc_tail_ratio",
    "staleness/mean_versions",
    "loss/grad_norm",
    "loss/entropy",
)
"""Of `metrics.jsonl`, one value for each update."""


SEVERAL_TASKS, ATTEMPTS = 50, 4
"""Held-out tasks that are tried several times, and how often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgenticCell:
    arm: str
    fleet: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.fleet}-seed{self.seed}"

    def train_arguments(self, runs: Path) -> list[str]:
        """Of `rlmix`: what starts this cell, or goes on with it when it was begun."""
        if (runs / self.name / "manifest.json").exists():
            return ["train", "--resume", str(runs / self.name)]
        return [
            "train",
            f"experiment=study/{self.fleet}",
            f"algo={self.arm}",
            f"run.seed={self.seed}",
            f"run.dir={runs}",
            f"run.name={self.name}",
        ]

    def evaluate_arguments(self, runs: Path) -> list[str]:
        """Of `rlmix`: what judges the trained policy by several attempts at each task. Asked again
        it goes on where it stopped."""
        return [
            "eval",
            "swe-bench-pro",
            "agent=policy",
            "eval.data=generated",
            f"eval.checkpoint={runs / self.name}",
            f"eval.limit={SEVERAL_TASKS}",
            f"eval.n={ATTEMPTS}",
            f"eval.k={ATTEMPTS}",
            f"run.dir={runs}",
            f"run.name={self.name}-pass{ATTEMPTS}",
            "--json",
        ]


def cells(
    arms: Sequence[str] = ARMS, fleets: Sequence[str] = FLEETS, seeds: Sequence[int] = SEEDS
) -> Iterator[AgenticCell]:
    """Seed by seed, so that an interrupted study has whole comparisons."""
    for seed in seeds:
        for arm in arms:
            for fleet in fleets:
                yield AgenticCell(arm=arm, fleet=fleet, seed=seed)


def is_finished(run_dir: Path) -> bool:
    summary = _read(run_dir / "summary.json")
    return summary is not None and summary["exit_reason"] == "finished"


def record_run(
    cell: AgenticCell, run_dir: Path, folder: Path, *, several: Mapping[str, Any]
) -> Path:
    """Write the record of a finished run.

    A record: the cell, steps, wall time in seconds, cost in USD, curves as lists over updates, the
    closing evaluation (BF16, held-out tasks, warm start and trained), and pass@1 and pass@k of
    `several`, the document that the evaluation of several attempts printed.
    """
    summary = _read(run_dir / "summary.json")
    assert summary is not None
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    # A resumed run measured some updates again; the last time counts.
    rows = {row["step"]: row for row in map(json.loads, lines)}
    manifest = _read(run_dir / "manifest.json") or {}
    record = {
        "arm": cell.arm,
        "fleet": cell.fleet,
        "seed": cell.seed,
        "steps": summary["steps"],
        "attempts": len(manifest.get("attempts", [])),
        "wall_s": summary["wall_s"],
        "cost_usd": short(summary["cost_usd"]),
        "void_frac": short(summary["void_frac"]),
        "machine": {
            key: manifest.get("machine", {}).get(key)
            for key in ("system", "arch", "cpu_cores", "memory_gib")
        },
        "revision": manifest.get("software", {}).get("git", {}).get("revision"),
        "curves": {
            # Null where an update has no such number, as a tail ratio without heads.
            key: [
                [step, short(rows[step][key])]
                for step in sorted(rows)
                if rows[step].get(key) is not None
            ]
            for key in KEPT
        },
        "eval": summary["eval"],
        "several": {key: short(several[key]) for key in ("pass_at_1", "pass_at_k")}
        | {key: several[key] for key in ("k", "n", "tasks", "void")},
    }
    path = folder / f"{cell.name}.json"
    write_record(path, record)
    return path


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
