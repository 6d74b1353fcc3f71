"""What `train --detach` says and leaves when the other process never had its run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_what_the_other_process_refuses_is_refused_here_in_the_same_words(
    rlmix: Run, tmp_path: Path
) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "manifest.json").write_text("{}")
    done = rlmix("train", "experiment=tiny", "run.dir=runs", "run.name=x", "--detach")
    assert done.returncode == 2
    assert done.stderr.startswith("error: run.name=x: ")
    assert len(done.stderr.strip().splitlines()) == 1
    assert os.listdir(tmp_path / "runs") == ["x"]


def test_an_interrupt_before_the_run_is_there_ends_the_other_process(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    command = [sys.executable, "-m", "rlmix", "train", "experiment=tiny", f"run.dir={root}"]
    asking = subprocess.Popen(
        [*command, "run.name=x", "--detach"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    deadline_s = time.monotonic() + 60
    while not (list(root.glob(".x.*.log")) and psutil.Process(asking.pid).children()):
        assert time.monotonic() < deadline_s
        time.sleep(0.005)
    (other,) = psutil.Process(asking.pid).children()
    time.sleep(0.2)  # Until it waits; the other one imports for a second and more.
    asking.send_signal(signal.SIGINT)
    asking.communicate(timeout=60)
    assert asking.returncode == 130
    other.wait(timeout=60)
    assert list(root.glob(".x.*.log")) == []
    assert not (root / "x" / "report.html").exists(), "it went on without anybody knowing"
