#!/usr/bin/env python
"""The study: which correction keeps which fleet stable. Every part is resumable.

    python scripts/study.py token [--arm NAME]... [--fleet NAME]... [--seed N]... [--processes 2]
    python scripts/study.py agentic [--arm NAME]... [--fleet NAME]... [--seed N]... [--runs FOLDER]
    python scripts/study.py report [--check]

`token` runs the cells of the controlled study that have no record yet, each in a process of its
own, and stops cleanly at any time: a record appears whole or not at all. `agentic` trains, one
whole run after another, and goes on with a run that was interrupted. `report` rebuilds every table
and figure of `docs/studies/stability.md` from the records; with --check it only says whether they
are what the records give (exit code 1 if not).
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUDIES = ROOT / "docs" / "studies"
RECORDS = STUDIES / "data" / "token"
AGENTIC_RECORDS = STUDIES / "data" / "agentic"
PAGE = STUDIES / "stability.md"
FIGURE = STUDIES / "token.svg"
AGENTIC_FIGURE = STUDIES / "agentic.svg"


def corrections(arms: list[str]) -> dict[str, object]:
    """What the loss of each arm does, from `conf/algo`."""
    from rlmix.config.compose import load_config
    from rlmix.studies.token_run import Correction

    found: dict[str, object] = {}
    for arm in arms:
        algo = load_config(overrides=[f"algo={arm}"]).config.algo
        found[arm] = Correction(
            **{key: getattr(algo, key) for key in Correction.__dataclass_fields__}
        )
    return found


def record(cell: object, folder: Path) -> str:
    import torch

    from rlmix.studies.token_grid import name_of, record_cell

    torch.set_num_threads(1)
    record_cell(cell, folder)  # type: ignore[arg-type]
    return name_of(cell)  # type: ignore[arg-type]


def run_token(args: argparse.Namespace) -> int:
    from rlmix.studies.token_grid import ARMS, SEEDS, STEPS, cells, name_of
    from rlmix.studies.token_samplers import FLEETS

    if args.steps and args.records == RECORDS:
        raise SystemExit("study: --steps makes a trial; keep it apart with --records FOLDER")
    chosen = corrections(args.arm or list(ARMS))
    todo = [
        cell
        for cell in cells(
            chosen,  # type: ignore[arg-type]
            fleets=args.fleet or list(FLEETS),
            seeds=args.seed or SEEDS,
            steps=args.steps or STEPS,
        )
        if not (args.records / f"{name_of(cell)}.json").exists()
    ]
    print(f"{len(todo)} cells to run", file=sys.stderr)
    begin = time.monotonic()
    with ProcessPoolExecutor(args.processes) as workers:
        running = [workers.submit(record, cell, args.records) for cell in todo]
        try:
            for done, future in enumerate(as_completed(running), 1):
                each_s = (time.monotonic() - begin) / done
                left_min = each_s * (len(todo) - done) / 60
                print(f"{future.result()}  {done}/{len(todo)}, {left_min:.0f} min left",
                      file=sys.stderr, flush=True)  # fmt: skip
        except KeyboardInterrupt:
            workers.shutdown(wait=False, cancel_futures=True)
            return 130
    return 0


def run_agentic(args: argparse.Namespace) -> int:
    from rlmix.studies.agentic import ARMS, FLEETS, SEEDS, cells, is_finished, record_run

    todo = [
        cell
        for cell in cells(args.arm or ARMS, args.fleet or FLEETS, args.seed or SEEDS)
        if not (args.records / f"{cell.name}.json").exists()
    ]
    for number, cell in enumerate(todo, 1):
        run_dir = args.runs / cell.name
        print(f"{cell.name}  {number}/{len(todo)}", file=sys.stderr, flush=True)
        rlmix = [sys.executable, "-m", "rlmix"]
        if not is_finished(run_dir):
            code = subprocess.run([*rlmix, *cell.train_arguments(args.runs)], cwd=ROOT).returncode
            if not is_finished(run_dir):
                print(f"study: {cell.name} did not finish (exit code {code}); the same command "
                      "goes on with it", file=sys.stderr)  # fmt: skip
                return code or 1
        judged = subprocess.run(
            [*rlmix, *cell.evaluate_arguments(args.runs)], cwd=ROOT, stdout=subprocess.PIPE
        )
        if judged.returncode != 0:
            print(f"study: {cell.name} could not be judged (exit code {judged.returncode}); the "
                  "same command goes on with it", file=sys.stderr)  # fmt: skip
            return judged.returncode
        record_run(cell, run_dir, args.records, several=json.loads(judged.stdout))
    return 0


def rebuilt(page: str, tables: dict[str, str]) -> str:
    """The page with the text between `<!-- NAME -->` and `<!-- end -->` replaced."""
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
        page, number = re.subn(
            pattern, lambda m, t=table: f"{m[1]}\n{t}\n\n{m[2]}", page, flags=re.S
        )
        if number != 1:
            raise SystemExit(f"study: {PAGE.name} has {number} places for {name}; it needs one")
    return page


def report(args: argparse.Namespace) -> int:
    from rlmix.studies import agentic_findings, agentic_report, token_findings
    from rlmix.studies.agentic import cells
    from rlmix.studies.crossings import crossing_table
    from rlmix.studies.records import read_records
    from rlmix.studies.token_grid import num_cells
    from rlmix.studies.token_report import WARNINGS, figure, judged, outcome_table, warning_table

    records, trained = read_records(args.records), read_records(AGENTIC_RECORDS)
    for folder, found, command in (
        (args.records, records, "token"), (AGENTIC_RECORDS, trained, "agentic")
    ):  # fmt: skip
        if not found:
            raise SystemExit(f"study: no record in {folder}; run `study.py {command}` first")
    tables = {
        "token cells": f"{len(records)} of {num_cells()} cells have been run so far.",
        "token stale": outcome_table(records, fresh=False),
        "token fresh": outcome_table(records, fresh=True),
        "token warnings": warning_table(records),
        "token crossings": crossing_table(records, judge=judged, warnings=WARNINGS),
        "token verdicts": token_findings.verdict_table(records),
        "token distances": token_findings.distance_table(records),
        "token samplers": outcome_table(records, fresh=False, score="sampler/good_frac"),
        "agentic cells": f"{len(trained)} of {len(list(cells()))} runs have been made so far.",
        "agentic": agentic_report.outcome_table(trained),
        "agentic distances": agentic_findings.distance_table(trained),
        "agentic crossings": crossing_table(
            trained, judge=agentic_report.judged, warnings=agentic_findings.WARNINGS
        ),
        "agentic falls": agentic_findings.fall_table(trained),
        "agentic cost": agentic_report.cost_table(trained),
    }
    page = rebuilt(PAGE.read_text(), tables)
    drawings = {FIGURE: figure(records), AGENTIC_FIGURE: agentic_report.figure(trained)}
    if args.check:
        is_same = page == PAGE.read_text() and all(
            path.exists() and path.read_text() == text for path, text in drawings.items()
        )
        print("the page is what the records give" if is_same else "the page differs; run report")
        return 0 if is_same else 1
    PAGE.write_text(page)
    for path, text in drawings.items():
        path.write_text(text)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    token = commands.add_parser("token", help="the controlled study, one process per cell")
    token.add_argument("--arm", action="append")
    token.add_argument("--fleet", action="append")
    token.add_argument("--seed", action="append", type=int)
    token.add_argument("--steps", type=int, help="fewer updates, for a trial; not for records")
    token.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    token.add_argument("--records", type=Path, default=RECORDS)
    token.set_defaults(run=run_token)
    agentic = commands.add_parser("agentic", help="whole training runs, one after another")
    agentic.add_argument("--arm", action="append")
    agentic.add_argument("--fleet", action="append")
    agentic.add_argument("--seed", action="append", type=int)
    agentic.add_argument("--runs", type=Path, default=ROOT / "runs" / "study")
    agentic.add_argument("--records", type=Path, default=AGENTIC_RECORDS)
    agentic.set_defaults(run=run_agentic)
    again = commands.add_parser("report", help="rebuild tables and figures")
    again.add_argument("--records", type=Path, default=RECORDS)
    again.add_argument("--check", action="store_true")
    again.set_defaults(run=report)
    args = parser.parse_args()
    return int(args.run(args))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
