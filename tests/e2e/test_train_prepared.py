"""A whole run on a prepared set whose task brings its own image: one override and a folder."""

import json
from pathlib import Path

import pytest

from rlmix.observe.trajectories import read_trajectories
from rlmix.tasks.prepare.set import prepare_set
from rlmix.tasks.prepared import is_held_out
from tests.unit.tasks.sets.fixtures import harbor

pytestmark = pytest.mark.slow


def test_a_run_on_a_prepared_set_samples_judges_and_steps(start_run, tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    made = harbor(tmp_path / "made")
    assert not is_held_out(made.task_id)
    out = tmp_path / "set"
    done = prepare_set("harbor", made.data, made.images, out, revision="r1", limit=None)
    assert len(done.done) == 1, done.excluded

    run = start_run("p", "tasks.source=harbor", f"tasks.path={out}", "loop.steps=1", "--json")
    code, stdout = run.finish()
    assert code == 0, run.stderr()
    assert json.loads(stdout)["steps"] == 1
    plan = json.loads((run.path / "plan.json").read_text())["tasks"]
    assert (plan["train"], plan["in_image"], plan["images"]) == (1, 1, ["hub/shell:1"])
    assert plan["refusals"] == []

    (row,) = run.rows()
    assert row["rollout/void_frac"] == 0
    sessions = [
        trajectory
        for file in sorted((run.path / "trajectories").glob("step_*.jsonl"))
        for trajectory in read_trajectories(file)
    ]
    assert {session.task_id for session in sessions} == {"sum-it"}
    assert all(session.reward in (0.0, 1.0) for session in sessions)
    run.assert_nothing_left()
