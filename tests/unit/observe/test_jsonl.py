"""JSONL files: whole lines or none, whatever kills the writer."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rlmix.core.errors import DataError
from rlmix.observe.jsonl import JsonlWriter, read_jsonl, read_last, replace_jsonl
from rlmix.observe.redact import Redactor


def test_appended_records_come_back_in_order(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "a.jsonl")
    writer.append({"step": 1, "loss": np.float32(0.1)})
    writer.append({"step": 2, "text": "line\nbreak"})
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [
        {"step": 1, "loss": 0.1},
        {"step": 2, "text": "line\nbreak"},
    ]


def test_torn_last_line_is_invisible_and_removed_at_the_next_opening(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n{"step":2,"lo')
    assert [row["step"] for row in read_jsonl(path)] == [1]
    assert read_last(path) == {"step": 1}
    writer = JsonlWriter(path)
    assert writer.repaired_bytes == len(b'{"step":2,"lo')
    writer.append({"step": 2})
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_torn_line_longer_than_the_read_chunk_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n' + b'{"x":"' + b"y" * 200_000)
    assert read_last(path) == {"step": 1}
    assert JsonlWriter(path).repaired_bytes == 200_006
    assert path.read_bytes() == b'{"step":1}\n'


def test_file_that_is_one_torn_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"st')
    assert read_last(path) is None
    assert JsonlWriter(path).repaired_bytes == 4
    assert path.read_bytes() == b""


def test_last_record_longer_than_the_read_chunk_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    replace_jsonl(path, [{"step": 1}, {"step": 2, "x": "y" * 150_000}])
    last = read_last(path)
    assert last is not None
    assert (last["step"], len(last["x"])) == (2, 150_000)


def test_damage_in_the_middle_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(DataError, match=r"a\.jsonl line 2: not JSON"):
        list(read_jsonl(path))


def test_missing_file_has_no_records(tmp_path: Path) -> None:
    assert list(read_jsonl(tmp_path / "none.jsonl")) == []
    assert read_last(tmp_path / "none.jsonl") is None


def test_kill_9_while_appending_leaves_whole_lines_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pathlib import Path; from rlmix.observe.jsonl import JsonlWriter\n"
            "writer = JsonlWriter(Path(sys.argv[1]))\n"
            "for n in range(10**9): writer.append({'n': n, 'pad': 'x' * 40_000})",
            str(path),
        ],
        stdin=subprocess.DEVNULL,
    )
    deadline_s = time.monotonic() + 20
    while (not path.exists() or path.stat().st_size < 5_000_000) and time.monotonic() < deadline_s:
        time.sleep(0.002)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    writer = JsonlWriter(path)
    numbers = [row["n"] for row in read_jsonl(path)]
    assert len(numbers) > 100
    assert numbers == list(range(len(numbers)))
    writer.append({"n": len(numbers)})
    assert read_last(path) == {"n": len(numbers)}


def test_secret_values_never_reach_the_file(tmp_path: Path) -> None:
    redactor = Redactor({"WANDB_API_KEY": "abcdef0123456789", "HOME": "/home/someone"})
    writer = JsonlWriter(tmp_path / "a.jsonl", redactor=redactor)
    writer.append({"reason": "401 for key abcdef0123456789 of /home/someone"})
    assert list(read_jsonl(tmp_path / "a.jsonl")) == [
        {"reason": "401 for key *** of /home/someone"}
    ]
