"""Starts real runs as a user would, and looks for what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlmix.sandbox.reap import run_folder

RUN_LIMIT_S = 240


@dataclass
class RunningCommand:
    """`rlmix train` in a process group of its own."""

    process: subprocess.Popen[bytes]
    root: Path
    name: str

    @property
    def path(self) -> Path:
        return self.root / self.name

    def rows(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        path = self.path / file
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [row for row in self.rows("events.jsonl") if row["kind"] == kind]

    def wait_until(self, condition: Callable[[], bool], what: str, limit_s: float = 120) -> None:
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert self.process.poll() is None, f"ended while waiting for {what}: {self.stderr()}"
            assert time.monotonic() < deadline_s, f"no {what} after {limit_s} s: {self.stderr()}"
            time.sleep(0.1)

    def finish(self, limit_s: float = RUN_LIMIT_S) -> tuple[int, str]:
        """Exit code and stdout."""
        code = self.process.wait(timeout=limit_s)
        return code, (self.root / f"{self.name}.out").read_text()

    def stderr(self) -> str:
        return (self.root / f"{self.name}.err").read_text()[-3000:]

    def marked_processes(self) -> list[psutil.Process]:
        """Every live process that belongs to this run: its own tree, and what names its folder."""
        found = {}
        for process in psutil.process_iter():
            try:
                words = " ".join(process.cmdline())
                marks = process.environ()
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
            is_ours = str(self.path) in words or marks.get("RLMIX_TEST_RUN") == str(self.path)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = process
        return list(found.values())

    def assert_no_process_left(self, within_s: float = 20) -> None:
        deadline_s = time.monotonic() + within_s
        while left := self.marked_processes():
            if time.monotonic() > deadline_s:
                pytest.fail(f"left behind: {[(p.pid, p.cmdline()[:6]) for p in left]}")
            time.sleep(0.2)

    def assert_nothing_left(self, within_s: float = 20) -> None:
        """Neither processes nor sandbox folders, soon after the driver's end."""
        self.assert_no_process_left(within_s)
        run_id = json.loads((self.path / "manifest.json").read_text())["run_id"]
        folder = run_folder(Path(tempfile.gettempdir()), run_id)
        deadline_s = time.monotonic() + within_s
        while folder.exists() and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert not folder.exists()

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., RunningCommand]]:
    """`start_run(name, *overrides, experiment=...)`; what still runs at the end is killed."""
    started: list[RunningCommand] = []

    def start(name: str, *arguments: str, experiment: str = "tiny") -> RunningCommand:
        rlmix = str(Path(sys.executable).with_name("rlmix"))
        command = [rlmix, "train", f"experiment={experiment}", f"run.dir={tmp_path}"]
        if "--resume" not in arguments:
            command.append(f"run.name={name}")
        with (
            (tmp_path / f"{name}.out").open("wb") as out,
            (tmp_path / f"{name}.err").open("wb") as err,
        ):
            process = subprocess.Popen(
                [*command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, "RLMIX_TEST_RUN": str(tmp_path / name)},
            )
        started.append(RunningCommand(process=process, root=tmp_path, name=name))
        return started[-1]

    yield start
    for run in started:
        run.kill()
        for process in run.marked_processes():
            process.kill()
