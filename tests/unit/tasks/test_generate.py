"""Tasks are deterministic, really broken, really mended by the reference, and split cleanly."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlmix.core.errors import DataError
from rlmix.tasks.generate import BuiltTask, build_task
from rlmix.tasks.kinds import EVAL_ONLY_KINDS, TRAIN_KINDS

NUM_TASKS = 600


@pytest.fixture(scope="module")
def train() -> list[BuiltTask]:
    return [build_task(split="train", seed=0, index=index) for index in range(NUM_TASKS)]


@pytest.fixture(scope="module")
def held_out() -> list[BuiltTask]:
    return [build_task(split="eval", seed=0, index=index) for index in range(400)]


def kinds_of(tasks: list[BuiltTask]) -> Counter[str]:
    return Counter(edit.kind for task in tasks for edit in task.edits)


def write_tree(task: BuiltTask, folder: Path) -> None:
    for path, text in task.public.base_files().items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def hidden_tests_pass(task: BuiltTask, folder: Path) -> bool:
    for path, text in task.hidden.tests.items():
        (folder / path).write_text(text)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "unittest", *task.hidden.required_tests],
        cwd=folder,
        capture_output=True,
        timeout=60,
        env={"PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode == 0


def test_the_same_arguments_give_the_same_task_and_others_do_not():
    first = build_task(split="train", seed=5, index=7)
    assert first == build_task(split="train", seed=5, index=7)
    assert first.public.history != build_task(split="train", seed=6, index=7).public.history
    assert first.public.history != build_task(split="train", seed=5, index=8).public.history


def test_at_least_ten_bug_kinds_occur_and_eval_adds_kinds_that_train_never_shows(train, held_out):
    assert set(kinds_of(train)) == set(TRAIN_KINDS)
    assert len(TRAIN_KINDS) >= 10
    assert set(EVAL_ONLY_KINDS) <= set(kinds_of(held_out))
    unseen = sum(task.public.tags["held_out_kind"] == "true" for task in held_out)
    assert 0.12 <= unseen / len(held_out) <= 0.28


def test_a_fifth_of_the_tasks_needs_two_edits_or_a_second_look(train):
    counts = Counter(task.public.tags["difficulty"] for task in train)
    assert (counts["hard"] + counts["look"]) / len(train) >= 0.20
    assert counts["plain"] / len(train) >= 0.40


def test_eval_shares_no_function_file_or_issue_name_with_train(train, held_out):
    def names(tasks: list[BuiltTask]) -> set[str]:
        found = set()
        for task in tasks:
            found |= {path for path in task.public.base_files() if "/" not in path}
            for text in task.public.base_files().values():
                found |= set(re.findall(r"def (\w+)\(", text)) - {"test_target"}
                found |= set(re.findall(r"^([A-Z]+_[A-Z]+) =", text, re.M))
        return {name for name in found if not name.startswith("test_")}

    assert names(train).isdisjoint(names(held_out))


def test_every_task_has_a_history_one_to_three_files_and_a_short_function(train):
    for task in train:
        assert len(task.public.history) >= 2
        sources = [path for path in task.public.base_files() if "/" not in path]
        assert 1 <= len(sources) <= 3
        lines = task.public.base_files()[task.edits[0].path].split("\n")
        for edit in task.edits:
            assert lines[edit.line - 1][edit.start :].startswith(edit.old)


def test_the_issue_does_not_name_file_or_line(train):
    for task in train:
        assert ".py" not in task.public.issue
        assert "line" not in re.sub(r"\w*_?\w*line\w*", "", task.public.issue)


def test_hidden_tests_fail_before_and_pass_with_the_reference_diff_in_real_python(
    train, held_out, tmp_path
):
    wanted = set(TRAIN_KINDS) | set(EVAL_ONLY_KINDS)
    checked = 0
    for task in [*train, *held_out]:
        if not wanted & {edit.kind for edit in task.edits}:
            continue
        wanted -= {edit.kind for edit in task.edits}
        folder = tmp_path / str(checked)
        folder.mkdir()
        write_tree(task, folder)
        assert not hidden_tests_pass(task, folder), task.public.task_id
        subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
        subprocess.run(
            ["git", "apply", "-"], cwd=folder, check=True, input=task.hidden.reference_diff.encode()
        )
        assert hidden_tests_pass(task, folder), task.public.task_id
        checked += 1
    assert not wanted
    assert checked >= 8


def test_a_plausible_wrong_fix_does_not_pass(train, tmp_path):
    for position, task in enumerate(task for task in train[:40] if len(task.edits) == 1):
        if position == 8:
            break
        edit = task.edits[0]
        folder = tmp_path / str(position)
        folder.mkdir()
        write_tree(task, folder)
        lines = (folder / edit.path).read_text().split("\n")
        row = lines[edit.line - 1]
        lines[edit.line - 1] = row[: edit.start] + edit.wrong[0] + row[edit.start + len(edit.old) :]
        (folder / edit.path).write_text("\n".join(lines))
        assert not hidden_tests_pass(task, folder), (task.public.task_id, edit)


def test_an_unknown_split_is_refused_with_the_allowed_ones():
    with pytest.raises(DataError, match="train, eval"):
        build_task(split="test", seed=0, index=0)
