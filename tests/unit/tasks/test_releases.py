"""Benchmarks as they are released, in the public schemas; what is invented is their content."""

import asyncio
import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rlmix.core.errors import ConfigError, DataError
from rlmix.evals.forecast import IMAGE_GIB, forecast
from rlmix.evals.run import refuse_unrunnable
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.tasks.benchmark import MINI, Benchmark, open_benchmark
from rlmix.tasks.gates import check_task
from tests.unit.tasks.sources import rows

BINARY = (
    "diff --git a/pack/logo.png b/pack/logo.png\nnew file mode 100644\n"
    "index 0000000000000000000000000000000000000000..e23e2b8f7a1c1f9fd7b2d0f0a4b4b0c5c0c1c2c3\n"
    "GIT binary patch\nliteral 5\nMcmZQzWMXDvWn}>q03HAU\n\nliteral 0\nHcmV?d00001\n\n"
)
CRLF = (
    "diff --git a/pack/sums.py b/pack/sums.py\n--- a/pack/sums.py\n+++ b/pack/sums.py\n"
    "@@ -1,2 +1,2 @@\n def total(a, b):\r\n-    return a - b\r\n+    return a + b\r\n"
)
UNICODE_TESTS = (
    'diff --git "a/tests/test_\\303\\274ber.py" "b/tests/test_\\303\\274ber.py"\n'
    "new file mode 100644\n--- /dev/null\n"
    '+++ "b/tests/test_\\303\\274ber.py"\n@@ -0,0 +1 @@\n+assert "\u00fcber"\n'
)
NAMES = ["tests/test_\u00fcber.py::test_na\u00efve[it's]", 'tests/test_sums.py::test_"quoted"']


def v1_row(**changes: Any) -> dict[str, Any]:
    """All columns of the published config v1, in its types: lists are texts."""
    return {
        **rows.PRO_V1,
        "fail_to_pass": repr(NAMES),  # A Python literal, as published.
        "pass_to_pass": "[]",
        "repo_language": "python",
        "interface": "total(a, b)",
        **changes,
    }


def v1(tmp_path: Path, *values: dict[str, Any], suffix: str = "parquet") -> Path:
    """A release of v1: a table, and the scripts of each instance beside it."""
    folder = tmp_path / "v1"
    for value in values:
        place = folder / "run_scripts" / value["instance_id"]
        place.mkdir(parents=True)
        (place / "run_script.sh").write_bytes(rows.RUN_SCRIPT.encode())
        (place / "parser.py").write_text(rows.PARSER)
        (place / "instance_info.txt").write_text("Test Files: x\n")
    if suffix == "parquet":
        table = pyarrow.Table.from_pylist(list(values))
        pyarrow.parquet.write_table(table, folder / "test-00000-of-00001.parquet")
    else:
        text = "".join(json.dumps(value) + "\n" for value in values)
        (folder / "test.jsonl").write_text(text)
    return folder


def v2(tmp_path: Path, **files: dict[str, str]) -> Path:
    """A V2 tree: one folder per task, the list of hard ones and the list of sums."""
    root = tmp_path / "release"
    for name, changes in files.items():
        for path, text in {**rows.PRO_V2_FILES, **changes}.items():
            file = root / "tasks" / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text.encode())
    (root / "v2").mkdir()
    (root / "v2/hard51_ids.txt").write_text("".join(f"{name}\n" for name in [*files][:1]))
    lines = []
    for file in sorted(root.rglob("*")):
        if file.is_file():
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            lines.append(f"{digest}  ../{file.relative_to(root).as_posix()}\n")
    (root / "v2/SHA256SUMS").write_text("".join(lines))
    return root


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_v1_is_read_with_literal_lists_and_scripts_beside_the_data(
    tmp_path: Path, suffix: str
) -> None:
    folder = v1(tmp_path, v1_row(patch=CRLF + BINARY, test_patch=UNICODE_TESTS), suffix=suffix)
    found = open_benchmark("swe_bench_pro", path=str(folder))
    (task,) = found.tasks
    assert task.hidden.required_tests == tuple(NAMES)
    assert task.hidden.skippable_tests == ()
    assert task.hidden.scripts["run_script.sh"] == rows.RUN_SCRIPT  # Its \r\n stays.
    assert task.gold == (CRLF + BINARY).encode()
    assert task.hidden.hidden_patch == UNICODE_TESTS.encode()
    assert task.image == "jefzda/sweap-images:owner.app-d"
    assert task.public.issue == "total() subtracts\n\n- total() adds\n\ntotal(a, b)"
    assert (task.language, task.repository) == ("python", "owner/app")
    assert "return a + b" not in repr(task.public)
    assert not task.has_repository


def test_v2_comes_as_a_tree_or_as_a_table_and_both_hold_the_same(tmp_path: Path) -> None:
    tree = open_benchmark(
        "swe_bench_pro_v2",
        path=str(v2(tmp_path, one={}, two={"solution/gold_patch.diff": CRLF + BINARY})),
    )
    one, two = tree.tasks
    assert (one.agent_s, one.verify_s, one.image) == (3000.0, 3000.0, "ghcr.io/owner/pro:one")
    assert one.hidden.skippable_tests == ()  # An empty pass_to_pass: the required ones decide.
    assert two.gold == (CRLF + BINARY).encode()
    strict = {
        "dockerhub_tag": "", "docker_image": "ghcr.io/owner/pro:one",
        "fail_to_pass": NAMES, "pass_to_pass": [],
    }  # fmt: skip
    table = open_benchmark("swe_bench_pro_v2", path=str(v1(tmp_path, v1_row(**strict))))
    assert table.tasks[0].hidden.required_tests == tuple(NAMES)
    assert table.tasks[0].image == "ghcr.io/owner/pro:one"


def test_the_hard_tasks_are_those_of_the_release_and_its_sums_are_verified(tmp_path: Path) -> None:
    root = v2(tmp_path, one={}, two={})
    hard = open_benchmark("swe_bench_pro_v2", subset="hard", path=str(root))
    assert [task.public.task_id for task in hard.tasks] == ["one"]
    text = (root / "v2/hard51_ids.txt").read_bytes()
    assert hard.subset_sha256 == hashlib.sha256(text).hexdigest()
    (root / "v2/hard51_ids.txt").write_text("two\n")
    with pytest.raises(DataError, match=r"hard51_ids\.txt: not the file that .*SHA256SUMS lists"):
        open_benchmark("swe_bench_pro_v2", subset="hard", path=str(root))
    (root / "v2/hard51_ids.txt").unlink()
    with pytest.raises(DataError, match=r"hard51_ids\.txt: missing"):
        open_benchmark("swe_bench_pro_v2", path=str(root))


def test_a_row_that_cannot_be_used_is_excluded_with_its_reason(tmp_path: Path) -> None:
    other = "instance_owner__app-" + "f" * 40 + "-vnan"
    folder = v1(tmp_path, v1_row(), v1_row(instance_id=other, fail_to_pass="not a list"))
    found = open_benchmark("swe_bench_pro", path=str(folder))
    assert len(found.tasks) == found.num_excluded == 1
    assert other in found.excluded[0]
    assert "fail_to_pass" in found.excluded[0]
    shutil.rmtree(folder)
    with pytest.raises(DataError, match="none of its 1 rows can be used"):
        open_benchmark("swe_bench_pro", path=str(v1(tmp_path, v1_row(fail_to_pass="{"))))


def test_a_release_without_repositories_is_planned_and_not_judged(tmp_path: Path) -> None:
    found = open_benchmark("swe_bench_pro_v2", path=str(v2(tmp_path, one={}, two={})))
    plan = forecast(found, {}, n=4, jobs=2)
    assert (plan["attempts"], plan["without_repository"]) == (8, 2)
    assert plan["images"] == [{"image": "ghcr.io/owner/pro:one", "tasks": 2}]
    assert plan["pull"] == ["docker pull ghcr.io/owner/pro:one"]
    assert plan["at_most_h"] == round(8 * 6000 / 2 / 3600, 2)
    assert plan["disk_gib"] == IMAGE_GIB
    with pytest.raises(ConfigError, match=r"2 of 2 tasks .* have no repository there"):
        refuse_unrunnable(found)


def test_a_tree_with_repositories_in_it_is_judged_as_it_lies(tmp_path: Path) -> None:
    """The bundled benchmark is one: under its public name it holds the same tasks."""
    copy = tmp_path / "tree"
    shutil.copytree(MINI, copy, ignore=shutil.ignore_patterns("__pycache__"))
    found: Benchmark = open_benchmark("swe_bench_pro_v2", path=str(copy), subset="hard")
    refuse_unrunnable(found)
    assert [task.public for task in found.tasks] == [
        task.public for task in open_benchmark("mini", subset="hard").tasks
    ]


def test_the_hub_without_a_network_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "from rlmix.tasks.benchmark import open_benchmark\n"
        "try:\n    open_benchmark('swe_bench_pro', path='hub')\n"
        "except ValueError as error:\n    print(error)\n"
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    lines = done.stdout.strip().splitlines()
    assert len(lines) == 1, done.stdout
    assert lines[0].startswith("eval.path=hub: ScaleAI/SWE-bench_Pro cannot be fetched")
    assert lines[0].endswith("go online, or give eval.path a local copy")
    with pytest.raises(ConfigError, match="swe_bench is not fetched; allowed: swe_bench_pro"):
        open_benchmark("swe_bench", path="hub")


RUN_UNICODE = '#!/bin/bash\nfor file in ${1//,/ }; do python3 "$file"; done\nexit 3\n'
READ_UNICODE = """import json, sys
lines = open(sys.argv[1], encoding="utf-8").read().split("\\n")
tests = [{"name": line[5:], "status": "PASSED"} for line in lines if line.startswith("pass ")]
json.dump({"tests": tests}, open(sys.argv[3], "w"))
"""
TEST_UNICODE = (
    "import os, sys\nsys.path.insert(0, '.')\nsys.stdout.reconfigure(encoding='utf-8')\n"
    "from pack.sums import total\n"
    "logo = open('pack/logo.bin', 'rb').read() if os.path.exists('pack/logo.bin') else b''\n"
    "if total(2, 3) == 5 and logo == b'\\x00\\xff\\x00':\n"
    "    print('pass tests/test_\u00fcber.py::test_na\u00efve')\n"
)


def diff_of(folder: Path, before: dict[str, bytes], after: dict[str, bytes]) -> str:
    """What git says about the change."""

    def git(*words: str) -> bytes:
        command = ["git", "-c", "core.autocrlf=false", "-c", "user.name=n", "-c", "user.email=e"]
        return subprocess.run(
            [*command, *words], cwd=folder, check=True, capture_output=True
        ).stdout

    folder.mkdir()
    git("init", "-q")
    for files in (before, after):
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        git("add", "-A")
        if files is before:
            git("commit", "-q", "--allow-empty", "-m", "before")
    return git("diff", "--cached", "--binary").decode()


def test_crlf_binary_patches_and_unicode_names_survive_to_the_verdict(tmp_path: Path) -> None:
    """The reference changes a line that ends in CRLF and adds bytes; the hidden test's name and
    path are no ASCII; pass_to_pass is empty; the script ends with 3, which decides nothing."""
    source = b"def total(a, b):\r\n    return a - b\r\n"
    fixed = {"pack/sums.py": source.replace(b"-", b"+"), "pack/logo.bin": b"\x00\xff\x00"}
    gold = diff_of(tmp_path / "g", {"pack/sums.py": source, "pack/__init__.py": b""}, fixed)
    assert "GIT binary patch" in gold
    hidden = diff_of(tmp_path / "h", {}, {"tests/test_\u00fcber.py": TEST_UNICODE.encode()})
    name = "tests/test_\u00fcber.py"
    config = {
        "repo": "owner/app", "fail_to_pass": repr([f"{name}::test_na\u00efve"]),
        "pass_to_pass": "[]", "selected_test_files_to_run": json.dumps([name]),
    }  # fmt: skip
    files = {
        "solution/gold_patch.diff": gold,
        "tests/test_patch.patch": hidden,
        "tests/run_script.sh": RUN_UNICODE,
        "tests/parser.py": READ_UNICODE,
        "tests/config.json": json.dumps(config),
        "environment/repository/pack/sums.py": source.decode(),
        "environment/repository/pack/__init__.py": "",
        "environment/repository/keep": "x\n",
    }
    (task,) = open_benchmark("swe_bench_pro_v2", path=str(v2(tmp_path, one=files))).tasks

    async def check() -> str:
        limits = SandboxLimits(
            memory_mib=512, pids=64, disk_mib=64, output_chars=2000, command_timeout_s=60.0
        )
        backend = await open_backend("auto", limits, tmp_path / "s", "t")
        try:
            found = await check_task(
                task.public, task.hidden, task.gold, backend, runs=1, timeout_s=60.0
            )
        finally:
            await backend.close()
        return found.reason

    assert asyncio.run(check()) == ""
