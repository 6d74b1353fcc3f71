"""Records and tables of the agentic study, from run folders as a finished run leaves them."""

import json
from pathlib import Path

import pytest

from rlmix.config.compose import load_config
from rlmix.studies.agentic import ARMS, FLEETS, AgenticCell, cells, is_finished, record_run
from rlmix.studies.agentic_findings import WARNINGS, distance_table, fall_table
from rlmix.studies.agentic_report import cost_table, figure, judged, outcome_table
from rlmix.studies.crossings import crossing_table

SEVERAL = {"pass_at_1": 0.4, "pass_at_k": 0.75, "k": 4, "n": 4, "tasks": 50, "void": 0, "facts": {}}
CELL = AgenticCell(arm="grpo", fleet="mixed", seed=1)


def finished(folder: Path, rewards: list[float], *, trained: float) -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "reward/mean": reward,
            "mismatch/k3_kl": 0.25,
            "correction/masked_frac": 0.0,
            "correction/sc_tail_ratio": None,
        }
        for step, reward in enumerate(rewards, 1)
    ]
    # The run was resumed: its first update was measured twice.
    lines = [json.dumps(row) for row in [rows[0] | {"reward/mean": 9.0}, *rows]]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    summary = {
        "exit_reason": "finished", "steps": len(rewards), "wall_s": 10.0 * len(rewards),
        "cost_usd": 0.5 * len(rewards), "void_frac": 0.0,
        "eval": {"warm_start": 0.3, "trained": trained},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "manifest.json").write_text(json.dumps({"attempts": [{}, {}]}))
    return folder


def record(tmp_path: Path, rewards: list[float], *, trained: float) -> dict:
    run = finished(tmp_path / "run", rewards, trained=trained)
    path = record_run(CELL, run, tmp_path / "records", several=SEVERAL)
    assert path.name == "grpo-mixed-seed1.json"
    return json.loads(path.read_text())


def test_a_record_has_each_update_once_as_it_was_measured_last(tmp_path: Path) -> None:
    found = record(tmp_path, [0.2, 0.4], trained=0.5)
    assert found["curves"]["reward/mean"] == [[1, 0.2], [2, 0.4]]
    assert found["curves"]["correction/sc_tail_ratio"] == []
    assert found["attempts"] == 2
    assert found["cost_usd"] == 1.0


def test_a_run_that_failed_or_was_never_begun_is_not_finished(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", [0.2], trained=0.2)
    assert is_finished(run)
    summary = json.loads((run / "summary.json").read_text()) | {"exit_reason": "failed"}
    (run / "summary.json").write_text(json.dumps(summary))
    assert not is_finished(run)
    assert not is_finished(tmp_path / "nothing")


def test_several_attempts_are_a_valid_evaluation_of_the_runs_last_checkpoint() -> None:
    command, name, agent, *overrides, as_json = CELL.evaluate_arguments(Path("/runs"))
    assert (command, name, as_json) == ("eval", "swe-bench-pro", "--json")
    assert agent == "agent=policy"
    config = load_config(overrides=overrides).config
    assert config.eval.checkpoint == "/runs/grpo-mixed-seed1"
    assert (config.eval.limit, config.eval.n, config.eval.k) == (50, 4, 4)


def test_reward_and_held_out_score_below_half_of_their_best_are_a_collapse(tmp_path: Path) -> None:
    # Best 0.6 over five updates; after k bad ones the mean is 0.6 (5 - k) / 5: 0.24 at k = 3.
    found = judged(record(tmp_path, [0.6] * 10 + [0.0] * 30, trained=0.1))
    assert (found.verdict, found.collapse_step) == ("collapsed", 13)
    assert found.best == pytest.approx(0.6)


def test_a_fall_that_held_out_tasks_do_not_share_is_a_decay(tmp_path: Path) -> None:
    assert judged(record(tmp_path, [0.6] * 10 + [0.1] * 30, trained=0.3)).verdict == "decayed"


def test_tables_and_figure_say_what_the_records_say(tmp_path: Path) -> None:
    records = [record(tmp_path, [0.2, 0.4], trained=0.5)]
    (row,) = [line for line in outcome_table(records).splitlines() if "GRPO" in line]
    assert "| six accelerators | 1 | 0.300 | 0.500 | 0.750 |" in row
    assert "| six accelerators | 1 | 0.5000 | 10.0 |" in cost_table(records)
    drawing = figure(records)
    assert "six accelerators" in drawing
    assert "BF16 pools" not in drawing


def test_fleets_are_compared_seed_by_seed_under_the_same_arm(tmp_path: Path) -> None:
    mixed = record(tmp_path, [0.2] * 5, trained=0.5)
    pairs = [mixed, mixed | {"fleet": "bf16", "eval": {"warm_start": 0.3, "trained": 0.4}}]
    # Another seed on one fleet only, and another arm, are compared with nothing.
    alone = [mixed | {"seed": 2}, mixed | {"arm": "mis"}]
    _, _, row = distance_table(pairs + alone).splitlines()
    assert row == (
        "| GRPO | 1 | +0.100 (+0.100 to +0.100) | +0.000 (+0.000 to +0.000) "
        "| +0.000 (+0.000 to +0.000) |"
    )


def test_a_fall_is_listed_with_what_announced_it_and_a_quiet_run_is_not(tmp_path: Path) -> None:
    quiet = record(tmp_path / "quiet", [0.6] * 40, trained=0.6)
    # Mean of five below half of 0.6 from the third bad update on, 33 to the end: too short a time
    # for a collapse.
    fallen = record(tmp_path / "fallen", [0.6] * 30 + [0.0] * 10, trained=0.0)
    k3 = [[step, 3.0 if step == 29 else 0.1] for step in range(1, 41)]
    fallen["curves"]["mismatch/k3_kl"] = k3
    _, _, row = fall_table([quiet, fallen]).splitlines()
    assert row == (
        "| GRPO | six accelerators | 1 | decayed | 0.000 | 33 | 29 | not measured | 3 at 29 |"
    )
    assert "No run fell" in fall_table([quiet])
    # Samplers that are some updates old do not show what the last updates did.
    unseen = record(tmp_path / "unseen", [0.6] * 40, trained=0.1)
    _, _, row = fall_table([quiet, unseen]).splitlines()
    assert "| stable | 0.100 | never | never |" in row
    table = crossing_table([quiet, fallen], judge=judged, warnings=WARNINGS)
    assert "| decayed | 1 | 1 of 1 | 0 of 0 |" in table
    assert "| stable | 1 | 0 of 1 | 0 of 0 |" in table


def test_a_begun_run_is_resumed_and_a_new_one_is_started_with_valid_settings(
    tmp_path: Path,
) -> None:
    assert len(list(cells())) == len(ARMS) * len(FLEETS) * 3
    for cell in cells(seeds=[2]):
        command, *overrides = cell.train_arguments(tmp_path)
        assert command == "train"
        config = load_config("train", overrides).config
        assert config.weights.publish_every == 8
        assert config.run.seed == 2
        kinds = {pool.weights for pool in config.pools.values()}
        assert kinds == ({"bf16"} if cell.fleet == "bf16" else {"bf16", "fp8", "nvfp4"})
    (tmp_path / CELL.name).mkdir()
    (tmp_path / CELL.name / "manifest.json").touch()
    assert CELL.train_arguments(tmp_path) == ["train", "--resume", str(tmp_path / CELL.name)]
