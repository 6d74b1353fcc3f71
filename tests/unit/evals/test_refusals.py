"""Wrong requests for an evaluation: one sentence, exit code 2, and nothing made."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import ConfigError, DataError
from rlmix.core.trajectory import Outcome
from rlmix.evals.comparison import check_comparable
from rlmix.evals.endpoint import base_url
from rlmix.evals.ledger import Attempt
from rlmix.evals.run import _same_model
from rlmix.evals.score import score
from rlmix.tasks.benchmark import open_benchmark
from rlmix.tasks.releases import verify_listed

ONE = "python-interval-merge"


def ask(folder: Path, *args: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [
            sys.executable, "-c", "from rlmix.cli import main; main()", "eval", "swe-bench-pro",
            f"run.dir={folder / 'runs'}", "run.name=e", *args, "--json",
        ],
        capture_output=True,
        text=True,
        timeout=280,
    )  # fmt: skip
    document: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, document


def test_a_comparison_that_cannot_be_is_refused_before_the_work(tmp_path: Path) -> None:
    ids, other = tmp_path / "one.txt", tmp_path / "other"
    ids.write_text(f"{ONE}\n")
    other.mkdir()
    (other / "report.json").write_text(
        json.dumps({"task_scores": [], "facts": {"benchmark": "generated", "agent": "gold"}})
    )
    code, found = ask(tmp_path, f"eval.subset={ids}", "agent=gold", "--against", str(other))
    assert code == 2
    assert "--against: the two evaluations differ in benchmark" in found["error"]
    assert not (tmp_path / "runs").exists()


def test_other_numbers_of_attempts_are_not_compared() -> None:
    """Any of four is easier than any of one: the McNemar test would be one of the numbers."""
    facts = {"benchmark": "mini", "agent": "gold", "n": 1}
    check_comparable(facts, dict(facts))
    with pytest.raises(ConfigError, match="differ in n, so"):
        check_comparable(facts, {**facts, "n": 4})


def test_fewer_predictions_than_attempts_are_refused_and_not_counted_as_failed(
    tmp_path: Path,
) -> None:
    """One diff of each task under the default of four attempts would read 0.25 where all pass."""
    file = tmp_path / "p.json"
    file.write_text(json.dumps([{"instance_id": ONE, "patch": "x"}]))
    code, found = ask(tmp_path, f"agent=predictions:{file}")
    assert code == 2
    assert "holds at most 1 diff(s) of a task and eval.n=4" in found["error"]
    assert "set eval.n=1 and eval.k=1" in found["error"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("text", [b"", b"# nothing\n", b"\xff\xfe\x00"])
def test_a_list_that_names_no_task_is_refused(tmp_path: Path, text: bytes) -> None:
    file = tmp_path / "ids.txt"
    file.write_bytes(text)
    with pytest.raises(ConfigError, match=r"ids\.txt names no task"):
        open_benchmark("mini", subset=str(file))


@pytest.mark.parametrize("data", ["mini", "generated"])
def test_a_folder_for_bundled_tasks_is_refused_and_not_ignored(data: str) -> None:
    with pytest.raises(ConfigError, match="is bundled and reads no folder"):
        open_benchmark(data, path="/somewhere", limit=1)


@pytest.mark.parametrize("text", ["http://[::1", "http://h:99999/v1", "http://h:abc/v1"])
def test_urls_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give endpoint:http://HOST:PORT/v1"):
        base_url(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"\xff\xfe", "no list of sums"),
        (b"one two\n", "is no line of SHA-256 and name"),
        (b"0" * 64 + b"  gone.txt\n", "gone.txt: missing"),
        (b"0" * 64 + b"  SHA256SUMS\n", "not the file that"),
    ],
)
def test_damaged_sums_of_a_release_are_told(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "SHA256SUMS").write_bytes(text)
    with pytest.raises(DataError, match=said):
        verify_listed(tmp_path)


def test_another_model_behind_the_same_url_is_another_question(tmp_path: Path) -> None:
    _same_model(tmp_path, "a")
    _same_model(tmp_path, "a")
    with pytest.raises(ConfigError, match="holds attempts of the endpoint's model 'a', and 'b'"):
        _same_model(tmp_path, "b")


def test_a_void_attempt_is_no_empty_diff() -> None:
    """Three attempts without a byte: one failed, one was lost to the machine, one passed."""
    (task,) = [one for one in open_benchmark("mini").tasks if one.public.task_id == ONE]
    made = [
        Attempt(
            task_id=ONE, number=number, outcome=outcome.value, detail="", diff_bytes=0,
            agent_s=0.0, verify_s=0.0,
        )
        for number, outcome in enumerate((Outcome.FAIL, Outcome.VOID, Outcome.PASS))
    ]  # fmt: skip
    result = score([task], made, k=1, n=3)
    assert (result.num_empty, result.num_void) == (2, 1)
