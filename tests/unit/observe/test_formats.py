"""What a run leaves behind says in which form it is, and other forms are refused."""

import json
from pathlib import Path

import pytest

from rlmix.core.errors import VersionError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory
from rlmix.observe.manifest import read_manifest
from rlmix.observe.run_dir import RunDir
from rlmix.observe.runs import find_run, read_runs, show_run
from rlmix.observe.trajectories import read_trajectories, write_trajectories


def change(path: Path, **fields: object) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **fields}) + "\n")


@pytest.fixture
def run_path(tmp_path: Path) -> Path:
    with RunDir.create(tmp_path, "x") as run:
        return run.path


def test_a_run_of_a_newer_major_version_is_neither_shown_nor_resumed(run_path: Path) -> None:
    assert json.loads((run_path / "manifest.json").read_text())["schema_version"] == "1.0"
    change(run_path / "manifest.json", schema_version="2.0")
    before = sorted(path.name for path in run_path.iterdir())
    found = find_run(run_path.parent, "x")
    for read in (show_run, RunDir.open):
        with pytest.raises(VersionError, match=r"manifest\.json: schema_version is 2\.0, written"):
            read(found)
    assert sorted(path.name for path in run_path.iterdir()) == before
    rows, unreadable = read_runs(run_path.parent)
    assert rows == []
    assert "schema_version is 2.0" in unreadable["x"]


def test_what_a_newer_minor_version_added_is_passed_over(run_path: Path) -> None:
    manifest = json.loads((run_path / "manifest.json").read_text())
    attempt = manifest["attempts"][0]
    attempt |= {"weather": "rain", "owner": {**attempt["owner"], "room": 3}}
    change(run_path / "manifest.json", schema_version="1.4", colour="red", attempts=[attempt])
    read = read_manifest(run_path)
    assert (read.name, read.schema_version, read.attempts[0].number) == ("x", "1.4", 1)


def test_every_trajectory_says_its_version_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    void = Trajectory(
        session_id="s", group_id="g", task_id="t", prompt_ids=(1,), turns=(),
        stop_reason=StopReason.ENGINE_LOST, outcome=Outcome.VOID, reward=0.0,
    )  # fmt: skip
    write_trajectories(tmp_path, 1, [void])
    path = tmp_path / "step_000001.jsonl"
    change(path, schema_version="1.8", added="later")
    assert read_trajectories(path) == [void]
    change(path, schema_version="2.0")
    with pytest.raises(VersionError, match=r"step_000001\.jsonl line 1: schema_version is 2\.0"):
        read_trajectories(path)
