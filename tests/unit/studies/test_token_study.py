"""The machinery of the token study, on cells too short to show an outcome."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlmix.studies.records import read_records
from rlmix.studies.token_grid import cells, name_of, record_cell
from rlmix.studies.token_policy import initial_weights
from rlmix.studies.token_report import figure, judged, outcome_table
from rlmix.studies.token_run import Cell, Correction, sample, tail_ratio, warm_start
from rlmix.studies.token_samplers import FLEETS, pool_weights

ROOT = Path(__file__).parents[3]
PLAIN = Correction(
    importance="none", low=0.5, high=5.0, centering=False, top_p=1.0, replay=False, scale="none"
)
KEPT_SETS = Correction(
    importance="mis", low=0.5, high=5.0, centering=True, top_p=0.9, replay=True, scale="none"
)


def cell(correction: Correction, fleet: str, **changes: object) -> Cell:
    values = {"arm": "grpo", "refresh_every": 64, "lr": 1.0, "steps": 3, "seed": 0}
    return Cell(correction=correction, fleet=fleet, **values | changes)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def short_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmix.studies.token_run.WARMUP_STEPS", 20)


def curve(folder: Path, one: Cell, key: str) -> list[float]:
    record = json.loads(record_cell(one, folder).read_text())
    return [value for _, value in record["curves"][key]]


def test_a_cell_is_a_function_of_its_description(tmp_path: Path) -> None:
    one = cell(KEPT_SETS, "mixed")
    first = record_cell(one, tmp_path / "a").read_text()
    assert record_cell(one, tmp_path / "b").read_text() == first
    other = record_cell(cell(KEPT_SETS, "mixed", seed=1), tmp_path / "c").read_text()
    assert other != first


def test_fresh_exact_samples_have_no_gap_and_coarser_formats_have_more(tmp_path: Path) -> None:
    gaps = [
        curve(tmp_path, cell(PLAIN, fleet, steps=1), "mismatch/kl")[0]
        for fleet in ("exact", "bf16", "nvfp4", "int3")
    ]
    assert abs(gaps[0]) < 1e-6
    assert gaps[0] < gaps[1] < gaps[2] < gaps[3]


def test_stale_exact_samples_have_a_gap_from_the_second_update_on(tmp_path: Path) -> None:
    stale = curve(tmp_path, cell(PLAIN, "exact", steps=25), "mismatch/k3_kl")
    fresh = curve(tmp_path, cell(PLAIN, "exact", steps=25, refresh_every=1), "mismatch/k3_kl")
    assert stale[-1] > 1e-3
    assert max(fresh) < 1e-6


def test_every_arm_of_a_seed_begins_with_the_same_weights_and_sessions(tmp_path: Path) -> None:
    first = [
        curve(tmp_path, cell(c, "nvfp4", arm=arm), "sampler/good_frac")[0]
        for arm, c in (
            ("grpo", PLAIN),
            ("mis", replace(PLAIN, importance="mis")),
        )
    ]
    assert first[0] == first[1]


def test_kept_sets_hold_nine_tenths_and_no_more_than_they_need() -> None:
    weights = warm_start(0)
    prompts = torch.arange(8)
    generator = torch.Generator().manual_seed(1)
    kind = FLEETS["exact"][0]
    found = sample(weights, kind.kernel, prompts, top_p=0.9, generator=generator)
    whole = sample(weights, kind.kernel, prompts, top_p=1.0, generator=generator)
    assert torch.isfinite(whole.logprobs_NLV).all()
    sizes = torch.isfinite(found.logprobs_NLV).sum(2)
    assert int(sizes.min()) >= 1
    assert int(sizes.max()) < 16
    assert torch.allclose(found.logprobs_NLV.exp().sum(2), torch.ones(8, 32), atol=1e-5)


def test_int3_has_seven_levels_in_a_row() -> None:
    weights = initial_weights(torch.Generator().manual_seed(0))
    held = pool_weights(weights, FLEETS["int3"][0])
    row = held["hidden"][0]
    assert len(row.unique()) <= 7
    assert float(row.abs().max()) == pytest.approx(float(weights["hidden"][0].abs().max()))


def test_the_grid_has_seven_arms_on_five_fleets_and_two_fresh_controls() -> None:
    arms = ("grpo", "tis", "mis", "sc", "mis_sc_full", "mis_sc", "grpo_topp")
    grid = list(cells(dict.fromkeys(arms, PLAIN)))
    assert len(grid) == 3 * (7 * 5 + 2 * 5)
    assert len({name_of(one) for one in grid}) == len(grid)


def test_the_table_says_how_often_a_cell_collapsed() -> None:
    falling = [[i, 0.8 if i <= 60 else 0.1] for i in range(1, 201)]
    record = {
        "arm": "grpo", "fleet": "int3", "refresh_every": 64, "seed": 0, "steps": 200,
        "curves": {"sampler/good_frac": falling, "trainer/good_frac": [[50, 0.8], [100, 0.12]]},
    }  # fmt: skip
    assert judged(record).verdict == "collapsed"
    table = outcome_table([record], fresh=False)
    # Below half after 15 bad updates.
    assert "| 0.12, **collapsed 1/1 at 75** |" in table
    assert "GRPO" in figure([record])


def test_the_command_runs_an_arm_and_does_not_run_it_twice(tmp_path: Path) -> None:
    command = [
        sys.executable, "scripts/study.py", "token", "--arm", "mis_sc", "--fleet", "bf16",
        "--seed", "0", "--steps", "1", "--processes", "1", "--records", str(tmp_path),
    ]  # fmt: skip
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    assert "1 cells to run" in first.stderr
    assert [record["arm"] for record in read_records(tmp_path)] == ["mis_sc"]
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "0 cells to run" in again.stderr


def test_the_tail_ratio_is_the_mass_outside_the_samplers_eight_likeliest() -> None:
    # Sampler: 8 x 0.1 and 8 x 0.025, so 0.2 outside. Trainer: 8 x 0.12 and 8 x 0.005, so 0.04.
    sampler_TV = torch.tensor([[0.1] * 8 + [0.025] * 8]).log()
    trainer_TV = torch.tensor([[0.12] * 8 + [0.005] * 8]).log()
    assert tail_ratio(trainer_TV, sampler_TV) == pytest.approx(5.0, rel=1e-4)
    assert tail_ratio(sampler_TV, sampler_TV) == pytest.approx(1.0)
