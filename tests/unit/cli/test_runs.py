"""`rlmix runs` on real run directories, through the command line."""

import csv
import io
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlmix.observe.run_dir import RunDir

Run = Callable[..., subprocess.CompletedProcess[str]]
Document = Callable[..., dict[str, Any]]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with two runs: `old` failed after two steps, `new` finished."""
    for name, outcome in (("old", "failed"), ("new", "finished")):
        run = RunDir.create(tmp_path / "runs", name, overrides=["loop.steps=2"])
        for step in (1, 2):
            run.metrics.append({"step": step, "reward/mean": 0.25 * step})
        (run.logs / "router.log").write_text("first line\nlast line\n")
        run.close(outcome)
    return tmp_path


@pytest.fixture
def document(rlmix: Run) -> Callable[..., dict[str, Any]]:
    """The JSON document of `rlmix runs ARGS`."""

    def run(*arguments: str) -> dict[str, Any]:
        done = rlmix("runs", *arguments, "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    return run


def test_runs_are_listed_with_and_without_the_word_list(
    root: Path, rlmix: Run, document: Document
) -> None:
    listed = document("list")
    assert listed == document() | {"runs": listed["runs"]}
    rows = {row["name"]: row for row in listed["runs"]}
    assert (rows["old"]["state"], rows["new"]["state"]) == ("failed", "finished")
    assert (rows["new"]["steps"], rows["new"]["reward"]) == (2, 0.5)
    table = rlmix("runs").stdout
    assert "old" in table
    assert "finished" in table


def test_a_model_is_exported_by_step_and_refusals_are_one_sentence_with_code_2(
    root: Path, rlmix: Run
) -> None:
    missing = rlmix("runs", "export", "new", str(root / "model"), "--step", "4")
    assert missing.returncode == 2
    assert "has no whole checkpoint of step 4; there are: none" in missing.stderr
    (root / "model").mkdir()
    (root / "model" / "mine.txt").write_text("kept")
    without = rlmix("runs", "export", "new", "--step", "4")
    assert without.returncode == 2
    assert "name a folder for it" in without.stderr
    both = rlmix("runs", "export", "new", str(root / "m"), "--output", "metrics.csv")
    assert both.returncode == 2
    assert "--output is for the metrics" in both.stderr


def test_another_folder_of_runs_can_be_named(root: Path, document: Document) -> None:
    rows = document("list", "--dir", str(root / "elsewhere"))["runs"]
    assert rows == []


def test_a_run_is_shown_by_name_and_the_newest_by_default(root: Path, document: Document) -> None:
    assert document("show", "old")["state"] == "failed"
    assert document("show")["name"] == "new"


def test_logs_are_found_and_read(root: Path, rlmix: Run, document: Document) -> None:
    (log,) = document("logs", "old")["logs"]
    assert log["process"] == "router"
    assert log["path"].endswith("runs/old/logs/router.log")
    printed = rlmix("runs", "logs", "old", "router", "-n", "1").stdout
    assert printed.splitlines()[1:] == ["last line"]


def test_the_report_is_written_again(root: Path, document: Document) -> None:
    report = Path(str(document("report", "old")["report"]))
    assert report.name == "report.html"
    assert "<!doctype html>" in report.read_text()


def test_metrics_are_exported_as_csv(root: Path, rlmix: Run) -> None:
    printed = rlmix("runs", "export", "new").stdout
    assert [row["step"] for row in csv.DictReader(io.StringIO(printed))] == ["1", "2"]
    rlmix("runs", "export", "new", "--output", "m.csv")
    assert (root / "m.csv").read_text() == printed


def test_stopping_a_run_that_is_not_running_says_so(root: Path, document: Document) -> None:
    answer = document("stop", "old")
    assert (answer["was_running"], answer["is_stopped"]) == (False, True)


def test_an_unknown_run_is_a_wrong_request_that_names_a_likely_one(root: Path, rlmix: Run) -> None:
    done = rlmix("runs", "show", "olf")
    assert done.returncode == 2
    assert "there is old" in done.stderr


def test_options_before_the_command_are_refused_and_not_ignored(root: Path, rlmix: Run) -> None:
    result = rlmix("runs", "--dir", str(root), "list")
    assert result.returncode == 2
    assert "rlmix runs list --dir DIR" in result.stderr
