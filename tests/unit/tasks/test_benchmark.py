"""The bundled benchmark: whole, in the public layout, solved by its references and by nothing."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from rlmix.core.errors import ConfigError, DataError, SandboxError
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.tasks import benchmark
from rlmix.tasks.benchmark import MINI, check_sums, open_benchmark, repositories
from rlmix.tasks.gates import check_task

LIMITS = SandboxLimits(
    memory_mib=512, pids=64, disk_mib=32, output_chars=2000, command_timeout_s=20.0
)


def test_the_bundled_benchmark_has_python_and_shell_and_tasks_over_several_files() -> None:
    mini = open_benchmark("mini")
    languages = [task.language for task in mini.tasks]
    assert (languages.count("python"), languages.count("shell"), len(mini.tasks)) == (8, 4, 12)
    hard = open_benchmark("mini", subset="hard")
    assert len(hard.tasks) == 4
    assert all(task.gold.count(b"diff --git") > 1 for task in hard.tasks)
    assert all(task.hidden.scripts and task.hidden.required_tests for task in mini.tasks)
    assert len(repositories(mini.tasks)) == 12


def test_a_session_sees_neither_tests_nor_reference() -> None:
    for task in open_benchmark("mini").tasks:
        seen = repr(task.public)
        assert not any("test_hidden" in path for path in task.public.base_files())
        added = [line[1:] for line in task.gold.decode().split("\n") if line.startswith("+ ")]
        assert not any(line.strip() in seen for line in added if len(line.strip()) > 25)


def test_every_reference_solves_its_task_and_no_change_none(tmp_path: Path) -> None:
    async def check_all() -> list[str]:
        backend = await open_backend("auto", LIMITS, tmp_path, f"b{os.getpid()}")
        try:
            reasons = []
            for task in open_benchmark("mini").tasks:
                result = await check_task(
                    task.public, task.hidden, task.gold, backend, runs=1, timeout_s=40.0
                )
                if not result.is_ok:
                    reasons.append(f"{result.task_id}: {result.reason}")
            return reasons
        finally:
            await backend.close()

    try:
        assert asyncio.run(check_all()) == []
    except SandboxError as error:
        pytest.skip(f"this machine forbids sandboxes: {error}")


def test_a_changed_missing_or_extra_file_is_told(tmp_path: Path) -> None:
    copy = tmp_path / "mini"
    shutil.copytree(MINI, copy, ignore=shutil.ignore_patterns("__pycache__"))
    check_sums(copy)
    file = copy / "python-cache-expiry/instruction.md"
    file.write_text("easier")
    with pytest.raises(DataError, match=r"instruction\.md: not the file that SHA256SUMS lists"):
        check_sums(copy)
    file.unlink()
    with pytest.raises(DataError, match=r"instruction\.md: missing"):
        check_sums(copy)
    shutil.copyfile(MINI / "python-cache-expiry/instruction.md", file)
    (copy / "more").write_text("x")
    with pytest.raises(DataError, match="more: not in SHA256SUMS"):
        check_sums(copy)


def test_a_subset_may_be_a_file_of_ids(tmp_path: Path) -> None:
    ids = tmp_path / "mine.txt"
    ids.write_text("# two of them\nshell-wait-for\npython-csv-quotes  # quotes\n\n")
    part = open_benchmark("mini", subset=str(ids))
    assert [task.public.task_id for task in part.tasks] == ["python-csv-quotes", "shell-wait-for"]
    assert part.name == "mini/mine"
    ids.write_text("nothing\n")
    with pytest.raises(ConfigError, match=r"1 of its 1 tasks are not in mini, e\.g\. 'nothing'"):
        open_benchmark("mini", subset=str(ids))
    with pytest.raises(ConfigError, match="no such list; allowed: all, hard"):
        open_benchmark("mini", subset="easy")


def test_an_unknown_benchmark_and_an_unprepared_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"eval\.data='maxi'; allowed: generated, mini, "):
        open_benchmark("maxi")
    with pytest.raises(ConfigError, match=r"eval\.path=null: eval\.data=swe_bench_pro needs"):
        open_benchmark("swe_bench_pro")
    assert benchmark.SUMS == "SHA256SUMS"


def test_held_out_generated_tasks_are_a_benchmark_whose_checksum_is_their_content() -> None:
    first = open_benchmark("generated", limit=3, seed=0)
    assert [task.public.task_id for task in first.tasks] == [
        f"generated/eval/0/{index}" for index in range(3)
    ]
    assert all(task.public.split == "eval" and task.gold for task in first.tasks)
    assert first.checksum == open_benchmark("generated", limit=3, seed=0).checksum
    assert first.checksum != open_benchmark("generated", limit=3, seed=1).checksum
    assert len(open_benchmark("mini", limit=5).tasks) == 5
