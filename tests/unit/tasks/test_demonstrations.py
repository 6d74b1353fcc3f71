"""Clean demonstrations solve their tasks, and the shell model answers as real bash does."""

import os
import subprocess
from pathlib import Path
from random import Random

from rlmix.tasks.demonstrations import CLEAN, Spread, demonstrate, sed_command
from rlmix.tasks.generate import build_task
from rlmix.tasks.shell_model import ShellModel

WILD = Spread(
    guess_frac=0.3, wrong_fix_frac=0.3, wrong_place_frac=0.2, half_done_frac=0.4, slip_frac=0.5
)


def fixed_files(task) -> dict[str, str]:
    files = task.public.base_files()
    for edit in task.edits:
        lines = files[edit.path].split("\n")
        row = lines[edit.line - 1]
        lines[edit.line - 1] = row[: edit.start] + edit.new + row[edit.start + len(edit.old) :]
        files[edit.path] = "\n".join(lines)
    return files


def test_a_clean_demonstration_ends_in_the_reference_fix():
    for index in range(300):
        task = build_task(split="train", seed=1, index=index)
        demo = demonstrate(task, rng=Random(index), spread=CLEAN)
        assert demo.files == fixed_files(task), (task.public.issue, demo.turns)
        assert demo.turns[-1].command.endswith("submit")


def test_the_spread_is_wrong_in_about_the_stated_share_of_sessions():
    spread = Spread(
        guess_frac=0.0, wrong_fix_frac=0.4, wrong_place_frac=0.0, half_done_frac=0.0, slip_frac=0.0
    )
    tasks = [build_task(split="train", seed=2, index=index) for index in range(600)]
    single = [task for task in tasks if len(task.edits) == 1]
    wrong = sum(
        demonstrate(task, rng=Random(f"s{row}"), spread=spread).files != fixed_files(task)
        for row, task in enumerate(single)
    )
    # 0.4 with a standard error of about 0.025 on 400 or more tasks.
    assert 0.30 < wrong / len(single) < 0.50


def test_the_shell_model_answers_like_real_bash_grep_and_sed(tmp_path: Path):
    (tmp_path / "bin").mkdir()
    submit = tmp_path / "bin" / "submit"
    submit.write_text("#!/bin/sh\nexit 0\n")
    submit.chmod(0o755)
    for index in range(60):
        task = build_task(split="train", seed=3, index=index)
        demo = demonstrate(task, rng=Random(index), spread=WILD)
        folder = tmp_path / str(index)
        for path, text in task.public.base_files().items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        for turn in demo.turns:
            done = subprocess.run(
                ["bash", "-c", turn.command],
                cwd=folder,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={"PATH": f"{tmp_path / 'bin'}:{os.defpath}", "LC_ALL": "C"},
                timeout=60,
            )
            assert (done.returncode, done.stdout) == (turn.exit_code, turn.output), turn.command
        for path, text in demo.files.items():
            assert (folder / path).read_text() == text, [turn.command for turn in demo.turns]


def test_a_star_in_the_pattern_is_escaped_because_sed_would_read_it_as_a_repeat():
    assert sed_command(line=3, old="*", new="+", path="a.py") == r"sed -i '3s/\*/+/' a.py"


def test_nothing_is_submitted_after_a_failed_command():
    shell = ShellModel(files={"a.py": "x = 1\n"})
    answer = shell.run("sed -i '1s/1/2/' b.py && submit")
    assert answer.exit_code == 2
    assert not answer.submitted
    assert shell.run("sed -i '1s/1/2/' a.py && submit").submitted
    assert shell.files["a.py"] == "x = 2\n"
