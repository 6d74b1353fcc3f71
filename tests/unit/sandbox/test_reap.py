"""A worker killed in the middle leaves nothing that `reap` does not find."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlmix.sandbox.cgroups import group_name
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.reap import marked_processes, reap, run_folder

from .test_session import gone, processes_with

WORKER = """
import asyncio, sys
from pathlib import Path
from rlmix.core.task import Commit
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxLimits

async def main():
    limits = SandboxLimits(
        memory_mib=256, pids=32, disk_mib=8, output_chars=2000, command_timeout_s=60.0
    )
    try:
        backend = await open_backend("namespaces", limits, Path(sys.argv[1]), sys.argv[2])
    except Exception as error:
        print("skip", error, flush=True)
        return
    sandbox = await backend.create(await backend.prepare((Commit(message="m", files={"a": ""}),)))
    await sandbox.run(f"setsid sleep {sys.argv[3]} & true")
    print("ready", flush=True)
    await sandbox.run(f"sleep {sys.argv[3]}")

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_survives_a_killed_worker(tmp_path: Path, how: signal.Signals) -> None:
    run_id, word = f"reap{os.getpid()}{how.name}", f"64208.{os.getpid()}{int(how)}"
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, str(tmp_path), run_id, word],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    said = worker.stdout.readline()
    if said.startswith("skip"):
        pytest.skip(said)
    assert len(processes_with(word)) >= 1
    worker.send_signal(how)
    worker.wait(10)
    worker.stdout.close()
    assert gone(word)
    # The launcher outlives its worker by the moment in which it removes the control groups.
    deadline_s = time.monotonic() + 10
    while groups_of(run_id) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert groups_of(run_id) == []
    assert run_folder(tmp_path, run_id).is_dir()
    reap(run_id, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert marked_processes(RUN_MARK, run_id) == []


def groups_of(run_id: str) -> list[Path]:
    return list(Path("/sys/fs/cgroup").rglob(f"{group_name(run_id, '')}*"))


def test_reap_kills_a_runs_launcher_and_leaves_other_runs_alone(tmp_path: Path) -> None:
    sleepers = {
        name: subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_MARK: name})
        for name in (f"mine{os.getpid()}", f"other{os.getpid()}")
    }
    mine, other = sleepers.values()
    assert reap(f"mine{os.getpid()}", tmp_path) == 1
    assert mine.wait(5) == -signal.SIGKILL
    assert other.poll() is None
    other.kill()
    other.wait()
