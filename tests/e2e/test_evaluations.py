"""Evaluations with real engines: beside a training run, and of its checkpoints afterwards."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_a_run_evaluates_while_it_trains_and_its_best_version_can_be_judged_again(start_run):
    run = start_run(
        "side", "loop.steps=8", "eval.every_steps=2", "eval.limit=4", "eval.n=1", "eval.k=1",
        "--json",
    )  # fmt: skip
    code, _ = run.finish()
    assert code == 0, run.stderr()
    file = run.path / "evaluations/evaluations.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert rows[0]["step"] == 0
    assert rows[-1]["step"] == 8
    assert all(row["is_unchanged"] and row["attempts"] == 4 for row in rows)
    assert len({row["policy_sha256"] for row in rows}) == len(rows)
    skipped = [event["step"] for event in run.events("evaluation_skipped")]
    assert sorted([*skipped, *[row["step"] for row in rows]]) == [0, 2, 4, 6, 8]
    # Some step ended while an evaluation was under way: nobody waited.
    begun = {event["step"]: event["run_s"] for event in run.events("evaluation_started")}
    ended = {event["step"]: event["run_s"] for event in run.events("evaluation_done")}
    steps = [row["time/run_s"] for row in run.rows()]
    assert any(begun[step] < s < ended[step] for step in ended for s in steps)
    best = json.loads((run.path / "evaluations/best.json").read_text())
    assert best["pass_at_1"] == max(row["pass_at_1"] for row in rows)
    assert "Learning curve" in (run.path / "report.html").read_text()
    run.assert_nothing_left()

    done = subprocess.run(
        [
            sys.executable, "-c", "from rlmix.cli import main; main()", "eval", "swe-bench-pro",
            "agent=policy", f"eval.checkpoint={run.path}:best", "eval.data=generated",
            "eval.limit=4", "eval.n=1", "eval.k=1", f"run.dir={run.path.parent}", "run.name=again",
            "--json",
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["facts"]["policy"] == f"side:{best['step']}"
    assert document["facts"]["policy_sha256"] == best["policy_sha256"]
    assert (document["facts"]["engine"]["weights"], document["facts"]["engine"]["kv"]) == (
        "bf16", "bf16",
    )  # fmt: skip
    run.assert_nothing_left()
