"""Each source from its own files to gates that really ran, by the commands of a user."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rlmix.cli.app import app
from rlmix.tasks.prepared import PreparedSource, is_held_out
from rlmix.tasks.sources.read import PUBLIC_SETS

from .fixtures import FIXED_LINE, SETS, MadeSet


def rlmix(capfd: pytest.CaptureFixture[str], *args: object) -> tuple[int, dict[str, Any]]:
    capfd.readouterr()
    stdout = os.dup(1)  # A command with --json keeps it for its document and leaves stderr there.
    done = CliRunner().invoke(app, ["tasks", *map(str, args), "--json"])
    said = capfd.readouterr().out
    os.dup2(stdout, 1)
    os.close(stdout)
    assert said, done.output
    return done.exit_code, json.loads(said)


def prepare(
    capfd: pytest.CaptureFixture[str], name: str, made: MadeSet, out: Path
) -> tuple[int, dict[str, Any]]:
    where = ("--path", made.data, "--images", made.images, "--out", out)
    return rlmix(capfd, "prepare", name, *where)


def test_there_is_a_fixture_of_every_set() -> None:
    assert set(SETS) == set(PUBLIC_SETS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_a_set_is_prepared_and_passes_its_gates_in_the_sandbox(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    expected, out = SETS[name], tmp_path / "out"
    made = expected.make(tmp_path)
    code, document = prepare(capfd, name, made, out)
    assert (code, document["ok"], document["excluded"]) == (0, 1, []), document

    code, document = rlmix(capfd, "check", name, "--path", out, "--timeout", 60)
    assert code == 0, document
    assert (document["total"], document["ok"], document["excluded"]) == (1, 1, [])
    assert (document["runs"], document["weak"]) == (expected.runs, int(expected.is_weak))
    assert document["programs"] == {expected.programs: 1}

    # Neither the rollout's file nor its repository knows the fix.
    assert FIXED_LINE.strip() not in (out / "tasks.jsonl").read_text()
    for file in out.glob("repositories/*/repo/**/*"):
        if file.is_file() and not file.is_symlink():
            assert FIXED_LINE.strip().encode() not in file.read_bytes(), file
    split = "eval" if is_held_out(made.task_id) else "train"
    assert PreparedSource(out, name=name, split=split, limit=None).task_ids() == (made.task_id,)


@pytest.mark.parametrize("name", ["swe_gym", "harbor"])
def test_a_set_without_its_images_says_so_and_fails(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = SETS[name].make(tmp_path)
    (tmp_path / "empty").mkdir()
    bare = MadeSet(data=made.data, images=tmp_path / "empty", task_id=made.task_id)
    code, document = prepare(capfd, name, bare, tmp_path / "out")
    assert (code, document["ok"]) == (1, 0)
    (one,) = document["excluded"]
    assert one["id"] == made.task_id
    assert one["reason"].startswith(f"no unpacked image {tmp_path}/empty/{made.task_id} (image: ")
    code, document = rlmix(capfd, "check", name, "--path", tmp_path / "out")
    assert (code, document["ok"], document["total"]) == (1, 0, 1)


def test_an_image_that_is_gone_when_the_gates_run_excludes_its_task(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    made, out = SETS["harbor"].make(tmp_path), tmp_path / "out"
    assert prepare(capfd, "harbor", made, out)[0] == 0
    made.images.rename(tmp_path / "elsewhere")
    code, document = rlmix(capfd, "check", "harbor", "--path", out)
    assert code == 1
    (one,) = document["excluded"]
    assert "cannot be run: sandbox: the unpacked image" in one["reason"]
    assert "No such file or directory" in one["reason"]


def test_preparing_and_checking_a_set_again_changes_no_file(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o755)
    made, out = SETS["harbor"].make(tmp_path), tmp_path / "out"

    def contents() -> dict[str, tuple[float, bytes]]:
        listed = (out / "repositories").rglob("*")
        files = {p: p.lstat().st_mtime for p in listed if p.is_file() and not p.is_symlink()}
        sets = {p: p.stat().st_mtime for p in out.glob("*.json*")}
        return {str(p): (at, p.read_bytes()) for p, at in (files | sets).items()}

    assert prepare(capfd, "harbor", made, out)[0] == 0
    before = contents()
    assert rlmix(capfd, "check", "harbor", "--path", out, "--runs", 1)[0] == 0
    gates = out / "gates.jsonl"
    checked = gates.read_text()
    assert prepare(capfd, "harbor", made, out)[0] == 0
    assert gates.read_text() == checked
    assert {p: one for p, one in contents().items() if p != str(gates)} == before

    # Another row makes another task, which nobody has checked.
    other = made.data / made.task_id / "tests/test.sh"
    other.write_text(other.read_text() + "# nothing else\n")
    assert prepare(capfd, "harbor", made, out)[0] == 0
    assert gates.read_text() == ""
