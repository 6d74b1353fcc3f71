"""The gates of a task, and a prepared set from rows and images to a checked source."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlmix.cli.app import app
from rlmix.core.errors import ConfigError, DataError
from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.tasks.gates import GateResult, check_task
from rlmix.tasks.prepare.set import copy_hard_ids, folder_name, prepare_set, slug
from rlmix.tasks.prepared import PreparedSource, is_held_out
from tests.unit.tasks.conftest import Court
from tests.unit.tasks.prepare.images import (
    BUGGY,
    FIX,
    FIXED,
    HIDDEN_PATCH,
    leaking_image,
    sh,
    write,
)

UNIT_TEST = (
    "import unittest\nfrom pack.sums import total\n\n\nclass TestTotal(unittest.TestCase):\n"
    "    def test_adds(self): self.assertEqual(total([2, 3]), 5)\n"
)


def public(**files: str) -> PublicTask:
    base = {"pack/__init__.py": "", "pack/sums.py": BUGGY, **files}
    return PublicTask(
        task_id="t", split="train", issue="x", history=(Commit(message="m", files=base),)
    )


def hidden(test: str = UNIT_TEST, names: tuple[str, ...] = ("test_h.TestTotal.test_adds",),
           command: str = "python -m unittest -v test_h") -> HiddenTask:  # fmt: skip
    return HiddenTask(
        task_id="t",
        tests={"test_h.py": test},
        required_tests=names,
        reference_diff="",
        test_command=command,
    )


def gate(court: Court, task: HiddenTask, reference: str = FIX, runs: int = 2) -> GateResult:
    work = check_task(public(), task, reference.encode(), court.backend, runs=runs, timeout_s=20.0)
    return court.runner.run(work)


def test_a_sound_task_passes_after_four_runs(court: Court) -> None:
    result = gate(court, hidden())
    assert (result.is_ok, result.num_runs, result.is_weak) == (True, 4, False)


def test_a_task_that_nothing_solves_is_excluded(court: Court) -> None:
    result = gate(court, hidden(UNIT_TEST.replace(", 5)", ", 6)")))
    assert result.reason == (
        "reference earns 0: 0 of 1 required tests passed; test_h.TestTotal.test_adds: fail"
    )


def test_a_task_that_no_change_solves_is_excluded(court: Court) -> None:
    result = gate(court, hidden(UNIT_TEST.replace(", 5)", ", total([2, 3]))")))
    assert result.reason == "no change earns 1: 1 required tests passed"


def test_a_test_that_changes_its_mind_is_flaky(court: Court) -> None:
    flaky = UNIT_TEST + (
        "    def test_flaky(self):\n        import os\n"
        "        self.assertTrue(os.stat('/proc/self').st_ino % 2)\n"
    ) + "".join(
        f"    def test_{n}(self):\n        import time\n"
        "        self.assertTrue(time.monotonic_ns() // 1000 % 2)\n" for n in range(12)
    )  # fmt: skip
    result = gate(court, hidden(flaky, command="python -m unittest -v test_h",
                                names=tuple(f"test_h.TestTotal.test_{n}" for n in range(3))),
                  runs=6)  # fmt: skip
    assert not result.is_ok
    assert result.reason.startswith(("flaky: ", "reference earns 0"))


def test_without_a_reference_only_no_change_is_tried_and_the_task_is_weak(court: Court) -> None:
    result = gate(court, hidden(), reference="")
    assert (result.is_ok, result.num_runs, result.is_weak) == (True, 2, True)


def test_a_slow_reference_is_excluded(court: Court) -> None:
    slow = UNIT_TEST + "    def test_sleeps(self):\n        import time\n        time.sleep(4)\n"
    work = check_task(public(), hidden(slow), FIX.encode(), court.backend, runs=1, timeout_s=7.0)
    result = court.runner.run(work)
    assert result.reason.startswith("slow: ")


# --- a whole set

ROW = {
    "repo": "owner/pack",
    "instance_id": "owner__pack-1",
    "patch": FIX,
    "problem_statement": "total() subtracts",
    "image_name": "hub/pack:1",
}
PATCH = (
    "diff --git a/test_h.py b/test_h.py\nnew file mode 100644\n--- /dev/null\n+++ b/test_h.py\n"
    f"@@ -0,0 +1,{len(UNIT_TEST.splitlines())} @@\n"
    + "".join(f"+{line}\n" for line in UNIT_TEST.splitlines())
)


def make_set(tmp_path: Path, **changes: object) -> tuple[Path, Path, Path]:
    """(data, images, out) of a SWE-rebench set with one good row, one without image, one bad."""
    image = leaking_image(tmp_path / "made")
    base = sh("git rev-parse HEAD", image / "testbed").strip()
    row = {
        **ROW,
        "base_commit": base,
        "test_patch": PATCH,
        "FAIL_TO_PASS": ["test_h.TestTotal.test_adds"],
        "PASS_TO_PASS": [],
        "install_config": {"test_cmd": "python -m unittest -v test_h"},
        **changes,
    }
    rows = [row, {**row, "instance_id": "owner__pack-2", "image_name": "hub/none"}, {"repo": "x"}]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in rows))
    images = tmp_path / "images"
    images.mkdir()
    (image / "testbed").rename(image / "pack")  # SWE-rebench works in /NAME.
    image.rename(images / slug("hub/pack:1"))
    return data, images, tmp_path / "out"


def test_a_set_is_prepared_checked_and_trained_on(tmp_path: Path, court: Court) -> None:
    data, images, out = make_set(tmp_path)
    runner = CliRunner()
    args = ["tasks", "prepare", "swe_rebench", "--path", str(data), "--images", str(images)]
    made = runner.invoke(app, [*args, "--out", str(out)])
    assert made.exit_code == 0, made.output
    reasons = [json.loads(line) for line in (out / "excluded.jsonl").read_text().splitlines()]
    assert [row["task_id"] for row in reasons] == ["data.jsonl:2", "owner__pack-2"]
    assert reasons[-1]["reason"].startswith(f"no unpacked image {images}/owner__pack-2")

    checked = runner.invoke(app, ["tasks", "check", "swe_rebench", "--path", str(out)])
    assert checked.exit_code == 0, checked.output
    assert "1 of 1 tasks pass their gates (0 weakly)" in checked.output

    split = "eval" if is_held_out("owner__pack-1") else "train"
    source = PreparedSource(out, name="swe_rebench", split=split, limit=None)
    (task_id,) = source.task_ids()
    seen = source.public(task_id)
    assert "return a + b" not in repr(seen)
    verdict = court.judge(source.reference(task_id), seen, source.hidden(task_id))
    assert verdict.detail == "1 required tests passed"
    # `*.log` and build/ are ignored there, so the agent's note has another name.
    found = court.diff("git log --all --format=%s > history.txt", seen)
    assert found.count(b"\n+earlier") == 3
    assert b"the fix" not in found


def test_a_strict_set_with_a_bad_row_is_refused_and_nothing_is_prepared(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, images, out = make_set(tmp_path)
    data.write_bytes(b"{broken\n" + data.read_bytes())
    args = ["tasks", "prepare", "swe_rebench", "--path", str(data), "--images", str(images)]
    strict = CliRunner().invoke(app, [*args, "--out", str(out), "--strict"])
    assert strict.exit_code == 2
    assert "--strict: 2 of 4 rows cannot be read" in strict.output
    assert not out.exists()
    lenient = CliRunner().invoke(app, [*args, "--out", str(out), "--json"])
    assert lenient.exit_code == 0, lenient.output
    document = json.loads(capfd.readouterr().out)
    assert (document["total"], document["ok"]) == (4, 1)
    first = document["bad_rows"][0]
    assert (first["file"], first["row"], first["column"]) == (str(data), 0, "row")
    assert first["problem"].startswith("no valid JSON")
    assert {one["row"] for one in document["bad_rows"]} == {0, 3}

    check = ["tasks", "check", "swe_rebench", "--path", str(out), "--runs", "1"]
    assert CliRunner().invoke(app, check).exit_code == 0
    assert CliRunner().invoke(app, [*check, "--strict"]).exit_code == 1


def test_a_set_may_be_named_from_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, images, out = (path.relative_to(tmp_path) for path in make_set(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = prepare_set("swe_rebench", data, images, out, revision="r", limit=1)
    assert len(done.done) == 1, done.excluded
    split = "eval" if is_held_out("owner__pack-1") else "train"
    source = PreparedSource(out, name="swe_rebench", split=split, limit=None)
    prepared = source.public("owner__pack-1").prepared
    assert prepared is not None
    assert Path(prepared.folder).is_absolute()


def test_preparing_a_set_again_keeps_what_is_there(tmp_path: Path) -> None:
    data, images, out = make_set(tmp_path)
    first = prepare_set("swe_rebench", data, images, out, revision="r", limit=None)
    manifest = next(out.glob("repositories/*/manifest.json"))
    stamp = manifest.stat().st_mtime_ns
    again = prepare_set("swe_rebench", data, images, out, revision="r", limit=None)
    assert again.done == first.done
    assert manifest.stat().st_mtime_ns == stamp


def test_a_reference_that_does_not_apply_excludes_its_task(tmp_path: Path) -> None:
    data, images, out = make_set(tmp_path, patch=FIX.replace("result -= value", "result *= value"))
    done = prepare_set("swe_rebench", data, images, out, revision="r", limit=None)
    assert done.done == ()
    reason = next(one.reason for one in done.excluded if one.task_id == "owner__pack-1")
    assert reason.startswith("the reference fix does not apply to the base: ")
    assert list((out / "repositories").iterdir()) == []


def test_a_task_that_failed_its_gates_is_not_trained_on(tmp_path: Path) -> None:
    data, images, out = make_set(tmp_path)
    prepare_set("swe_rebench", data, images, out, revision="r", limit=None)
    write(out, {"gates.jsonl": json.dumps({"task_id": "owner__pack-1", "reason": "flaky"}) + "\n"})
    for split in ("train", "eval"):
        assert PreparedSource(out, name="swe_rebench", split=split, limit=None).task_ids() == ()


def test_checking_a_part_of_a_set_forgets_no_task_that_failed_before(
    tmp_path: Path, court: Court
) -> None:
    data, images, out = make_set(tmp_path)
    prepare_set("swe_rebench", data, images, out, revision="r", limit=None)
    write(out, {"gates.jsonl": json.dumps({"task_id": "other", "reason": "flaky"}) + "\n"})
    args = ["tasks", "check", "swe_rebench", "--path", str(out), "--limit", "1", "--runs", "1"]
    assert CliRunner().invoke(app, args).exit_code == 0
    rows = [json.loads(line) for line in (out / "gates.jsonl").read_text().splitlines()]
    assert [(row["task_id"], row["reason"]) for row in rows] == [
        ("other", "flaky"),
        ("owner__pack-1", ""),
    ]


def test_ids_that_differ_in_odd_letters_only_have_folders_of_their_own(tmp_path: Path) -> None:
    assert slug("a/b") == slug("a__b")
    assert folder_name("a__b") == "a__b"
    assert len({folder_name(name) for name in ("a/b", "a__b", "a:b", ".a__b", "x" * 300)}) == 5
    assert len(folder_name("x" * 300)) < 240


@pytest.mark.parametrize("as_json", [True, False])
def test_a_reason_with_an_odd_file_name_is_told_all_the_same(tmp_path: Path, as_json: bool) -> None:
    data, images, out = make_set(tmp_path)
    write(images / slug("hub/pack:1"), {os.fsdecode(b"srv/caf\xe9 [red].py"): FIXED})
    args = ["prepare", "swe_rebench", "--path", data, "--images", images, "--out", out]
    program = "from rlmix.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "tasks", *args, *(["--json"] if as_json else [])],
        capture_output=True, text=True, env={**os.environ, "COLUMNS": "300"},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "/srv/caf? [red].py holds a line of the fix" in done.stdout


def test_a_list_of_hard_tasks_goes_along(tmp_path: Path) -> None:
    write(tmp_path, {"data/v2/hard51_ids.txt": "one\n"})
    copy_hard_ids(tmp_path / "data", tmp_path / "out")
    assert (tmp_path / "out/v2/hard51_ids.txt").read_text() == "one\n"


def test_a_reference_with_bytes_that_are_no_utf8_comes_back_as_it_was(tmp_path: Path) -> None:
    text = json.dumps({"task_id": "t", "diff": b"+caf\xe9\n".decode("utf-8", "surrogateescape")})
    write(tmp_path, {"set.json": '{"schema_version": 2, "source": "mimo", "revision": "r"}',
                     "tasks.jsonl": "", "gold.jsonl": text + "\n"})  # fmt: skip
    source = PreparedSource(tmp_path, name="mimo", split="train", limit=None)
    assert source.reference("t") == b"+caf\xe9\n"


def test_a_folder_that_is_no_prepared_set_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prepared set there; make one with `rlmix tasks pre"):
        PreparedSource(tmp_path, name="mimo", split="train", limit=None)
    write(tmp_path, {"set.json": '{"schema_version": 2, "source": "mimo", "revision": "r"}',
                     "tasks.jsonl": ""})  # fmt: skip
    with pytest.raises(ConfigError, match=r"holds mimo, and tasks\.source=r2e_gym"):
        PreparedSource(tmp_path, name="r2e_gym", split="train", limit=None)
    with pytest.raises(DataError, match="'x' is not in"):
        PreparedSource(tmp_path, name="mimo", split="train", limit=None).public("x")


def test_wrong_requests_exit_2_with_one_sentence(tmp_path: Path) -> None:
    runner = CliRunner()
    for args, said in (
        (["check", "swebench"], "unknown set; allowed: generated, harbor, mimo"),
        (["check", "generated", "--path", str(tmp_path)], "generated tasks come from no folder"),
        (["prepare", "generated"], "there is nothing to prepare; `rlmix tasks check generated`"),
        (["prepare", "mimo", "--path", "x"], "--images and --out missing"),
        (["check", "mimo"], "give the prepared set with --path DIR"),
        (["prepare", "mimo", "--path", str(tmp_path), "--images", "/none", "--out", "o"],
         "--images /none: no such folder"),
    ):  # fmt: skip
        result = runner.invoke(app, ["tasks", *args])
        assert result.exit_code == 2, result.output
        assert said in result.output


def test_generated_tasks_pass_their_gates_by_command() -> None:
    result = CliRunner().invoke(app, ["tasks", "check", "generated", "--limit", "3", "--runs", "1"])
    assert result.exit_code == 0, result.output
    assert "generated: 3 of 3 tasks pass their gates (0 weakly)" in result.output
    assert HIDDEN_PATCH.startswith("diff --git")
