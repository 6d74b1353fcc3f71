"""`rlmix diff-logprobs` as a command: exit codes, documents, refusals. Numbers: tests/unit/diff."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from rlmix.cli.diff_logprobs import code_of
from rlmix.diff.compare_dump import compare_dump
from rlmix.diff.dump_files import read_dump
from rlmix.diff.report_data import Cause, DiffReport

Run = Callable[..., CompletedProcess[str]]

TEXT = {"ids": [5, 6, 7, 8], "sampled": [2, 3], "logprobs": [-1.0, -2.0]}


def dump(folder: Path, **changes: object) -> Path:
    path = folder / "dump.jsonl"
    path.write_text(json.dumps({**TEXT, **changes}) + "\n")
    return path


def test_exact_mode_with_pools_in_other_formats_is_a_wrong_request(rlmix: Run) -> None:
    done = rlmix("diff-logprobs", "numerics.consistency=exact", "--json")
    assert done.returncode == 2
    assert (
        "set weights, activations and kv of these pools to bf16" in json.loads(done.stdout)["error"]
    )


def test_two_columns_of_a_dump_are_compared_without_a_model(rlmix: Run, tmp_path: Path) -> None:
    path = dump(tmp_path, trainer_logprobs=[-1.0, -2.0625])
    done = rlmix("diff-logprobs", "--file", str(path), "--report", str(tmp_path / "r"), "--json")
    document = json.loads(done.stdout)
    assert done.returncode == 0
    assert (document["tokens"], document["mismatch_count"]) == (2, 1)
    assert document["mean_abs"] == pytest.approx(0.03125)
    assert document["by_pool"]["file"]["first_mismatch"] == 3
    assert set(document["by_pool"]["file"]) >= {"k3_kl", "verdict", "class", "share"}
    assert json.loads((tmp_path / "r" / "report.json").read_text()) == document
    page = (tmp_path / "r" / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "| file | 2 | 1 | 0.03125 |" in (tmp_path / "r" / "report.md").read_text()


def test_what_is_beyond_the_limit_is_1_with_a_cause_and_3_without(tmp_path: Path) -> None:
    def found(limit: float, **changes: object) -> DiffReport:
        return compare_dump(
            read_dump(dump(tmp_path, trainer_logprobs=[-1.0, -3.0], **changes)),
            source="test",
            model=None,
            numerics="native",
            temperature=1.0,
            tolerances={},
            tolerance_nats=limit,
            tile=16,
        )

    inside, beyond = found(0.6), found(0.4)
    assert (code_of(inside), code_of(beyond)) == (0, 3)
    assert beyond.pools[0].verdict == "inconclusive"
    cause = Cause(
        operator="logprob", layers=(-1,), verdict="framework", cause="sampling", evidence="",
        confidence=0.9, share=1.0, alone=0.5, left=0.0, next_experiment="",
    )  # fmt: skip
    named = replace(beyond, pools=(replace(beyond.pools[0], causes=(cause,)),))
    assert code_of(named) == 1
    incomparable = found(0.6, logprobs=[0.7, -2.0])
    assert code_of(incomparable) == 3
    assert "above 0" in incomparable.obstacles[0].sentence


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--file", "ghost.jsonl"), "no such file"),
        (("--run", "ghost"), "no run 'ghost'"),
        (("diff.sessions=0", "--file", "a", "--server", "b"), "give one of"),
        (("--server", "nonsense", "diff.sessions=1"), "give the address of a running server"),
        (("--server", "http://127.0.0.1:9", "diff.sessions=1"), "--server http://127.0.0.1:9: "),
        (("--file", "a", "--report", "/dev/null"), "a file is there; give a folder"),
    ],
)
def test_wrong_requests_are_refused(rlmix: Run, arguments: tuple[str, ...], says: str) -> None:
    done = rlmix("diff-logprobs", *arguments, "--json")
    assert done.returncode == 2
    assert says in json.loads(done.stdout)["error"]
