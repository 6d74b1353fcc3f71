"""The learning curve of a run that evaluated on its way."""

import json
from pathlib import Path

from rlmix.observe.report import report_html
from rlmix.observe.run_dir import RunDir


def row(step: int, rate: float | None) -> dict[str, object]:
    low, high = (None, None) if rate is None else (rate - 0.1, rate + 0.1)
    return {
        "step": step, "pass_at_1": rate, "ci95": [low, high], "pass_at_k": rate, "k": 4, "n": 4,
        "tasks": 12, "void": 0, "wall_s": 30.0,
    }  # fmt: skip


def test_the_curve_shows_every_evaluation_once_and_marks_the_best(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "r") as run:
        (run.path / "evaluations").mkdir()
        rows = [row(0, 0.25), row(5, 0.5), row(5, 0.625), row(10, 0.6), row(15, None)]
        file = run.path / "evaluations/evaluations.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in rows))
        page = report_html(run.path)
    assert "Learning curve" in page
    assert "optimizer step 5 \u00b7 pass@1 \u00b7 0.625" in page
    assert "optimizer step 10 \u00b7 pass@1 \u00b7 0.600" in page
    assert "0.500 to 0.700" in page  # The band at step 10.
    best = page.index(">best<")
    assert "0.625" in page[best - 300 : best]
    assert "optimizer step 15" not in page


def test_a_run_without_evaluations_has_no_curve(tmp_path: Path) -> None:
    with RunDir.create(tmp_path, "r") as run:
        assert "Learning curve" not in report_html(run.path)
