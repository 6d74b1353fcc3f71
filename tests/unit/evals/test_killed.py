"""An evaluation that is killed and asked again: no attempt twice, the same result."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlmix.evals.ledger import read_attempts
from rlmix.tasks.benchmark import MINI

IDS = ("python-interval-merge", "shell-count-words", "python-csv-quotes")
LIMIT_S = 200.0


def command(folder: Path, ids: Path, script: Path) -> list[str]:
    return [
        sys.executable, "-c", "from rlmix.cli import main; main()", "eval", "swe-bench-pro",
        f"run.dir={folder}", "run.name=e", f"eval.subset={ids}", "eval.n=2", "eval.k=2",
        f"agent=scripted:{script}", "--jobs", "1", "--json",
    ]  # fmt: skip


def whole(argv: list[str]) -> dict[str, Any]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_killed_in_the_middle_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Two of three tasks are solved by the script; the process is killed after two attempts."""
    ids, script = tmp_path / "ids.txt", tmp_path / "commands.json"
    ids.write_text("".join(f"{name}\n" for name in IDS))
    fixes = [(MINI / name / "solution/gold_patch.diff").read_text() for name in IDS]
    commands = {
        name: [f"cat > /tmp/p <<'E'\n{fix}E\ngit apply /tmp/p", "submit"]
        for name, fix in zip(IDS[:2], fixes[:2], strict=True)
    }
    script.write_text(json.dumps({**commands, IDS[2]: ["sleep 0.5", "submit"]}))
    argv = command(tmp_path / "a", ids, script)
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    ledger, until_s = tmp_path / "a/e/attempts.jsonl", time.monotonic() + LIMIT_S
    while not (ledger.is_file() and len(ledger.read_bytes().splitlines()) >= 2):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < until_s, "two attempts took too long"
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = [one.key for one in read_attempts(tmp_path / "a/e")]
    assert 2 <= len(before) < 6
    left = json.loads((tmp_path / "a/e/sandboxes.json").read_text())
    again = whole(argv)
    assert not Path(left["folder"]).exists()
    assert not (tmp_path / "a/e/sandboxes.json").exists()
    after = [one.key for one in read_attempts(tmp_path / "a/e")]
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == 6
    never_killed = whole(command(tmp_path / "b", ids, script))
    for key in ("pass_at_1", "pass_at_k", "ci95", "ci95_k", "void", "empty", "task_scores"):
        assert again[key] == never_killed[key], key
    assert again["pass_at_k"] == 2 / 3
    assert again["probes"]["tasks"] == 3
    assert again["probes"]["not_clean"] == []


def test_asked_to_end_it_leaves_as_on_an_interrupt(tmp_path: Path) -> None:
    ids, script = tmp_path / "ids.txt", tmp_path / "commands.json"
    ids.write_text(f"{IDS[0]}\n")
    script.write_text(json.dumps({IDS[0]: ["sleep 1000"]}))
    process = subprocess.Popen(
        command(tmp_path, ids, script), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    note, until_s = tmp_path / "e/sandboxes.json", time.monotonic() + LIMIT_S
    while not (tmp_path / "e/probes.jsonl").is_file():
        assert process.poll() is None, "it ended by itself"
        assert time.monotonic() < until_s, "no sandbox was looked at"
        time.sleep(0.01)
    folder = Path(json.loads(note.read_text())["folder"])
    assert folder.is_dir()
    process.terminate()
    said, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, json.loads(said)["error"]) == (130, "interrupted")
    assert not folder.exists()
    assert not note.exists()
    assert read_attempts(tmp_path / "e") == []
