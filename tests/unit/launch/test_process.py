"""Child processes: ready, ended, stopped, and never left behind."""

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from rlmix.core.errors import LaunchError
from rlmix.launch.process import ChildProcess, describe_exit

PYTHON = [sys.executable, "-I", "-S", "-c"]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int, timeout_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not is_running(pid)


def start(code: str, tmp_path, *args: str, **options) -> ChildProcess:
    return ChildProcess.start(
        [*PYTHON, code, *args], name="child", log_path=tmp_path / "logs" / "child.log", **options
    )


def test_the_ready_file_is_waited_for_and_its_content_returned(tmp_path):
    ready = tmp_path / "ready.json"
    ready.write_text("{}")  # left by an earlier incarnation
    code = (
        "import os, sys, time; time.sleep(0.1); path = sys.argv[1]\n"
        "open(path + '.new', 'w').write('{\"url\": \"http://x\"}')\n"
        "os.rename(path + '.new', path)\n"
        "time.sleep(60)"
    )

    async def scenario():
        child = start(code, tmp_path, str(ready), ready_path=ready)
        content = await child.wait_ready(10)
        await child.stop()
        return content

    assert asyncio.run(scenario()) == {"url": "http://x"}


def test_a_child_that_ends_early_is_an_error_with_its_exit_code_and_last_words(tmp_path):
    async def scenario():
        child = start(
            "print('port 5 is taken'); raise SystemExit(3)", tmp_path, ready_path=tmp_path / "r"
        )
        await child.wait_ready(10)

    with pytest.raises(LaunchError, match=r"(?s)exit code 3 before it was ready.*port 5 is taken"):
        asyncio.run(scenario())


def test_a_child_that_is_never_ready_is_an_error_after_the_limit(tmp_path):
    async def scenario():
        child = start("import time; time.sleep(60)", tmp_path, ready_path=tmp_path / "r")
        try:
            await child.wait_ready(0.2)
        finally:
            child.kill()

    with pytest.raises(LaunchError, match=r"not ready after 0\.2 s"):
        asyncio.run(scenario())


def test_a_program_that_does_not_exist_is_named_in_the_log(tmp_path):
    async def scenario():
        child = ChildProcess.start(
            ["/no/such/program"], name="x", log_path=tmp_path / "x.log", ready_path=tmp_path / "r"
        )
        await child.wait_ready(10)

    with pytest.raises(LaunchError, match=r"(?s)exit code 127.*cannot run /no/such/program"):
        asyncio.run(scenario())


def test_environment_is_added_and_stdin_is_empty(tmp_path):
    async def scenario():
        child = start(
            "import os, sys; text = sys.stdin.read()\n"
            "print(os.environ['WORD'], 'PATH' in os.environ, repr(text))",
            tmp_path,
            env={"WORD": "hello"},
        )
        return await child.wait_exit(10)

    assert asyncio.run(scenario()) == 0
    assert (tmp_path / "logs" / "child.log").read_text() == "hello True ''\n"


def test_stop_kills_a_group_that_ignores_the_polite_signal(tmp_path):
    marker = tmp_path / "pids"
    code = (
        "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "other = os.fork()\n"
        "if other: open(sys.argv[1], 'w').write(f'{os.getpid()} {other}')\n"
        "time.sleep(60)"
    )

    async def scenario():
        child = start(code, tmp_path, str(marker))
        while not marker.exists() or not marker.read_text():
            await asyncio.sleep(0.01)
        started_s = time.monotonic()
        returncode = await child.stop(grace_s=0.3)
        return returncode, time.monotonic() - started_s, await child.stop()

    returncode, took_s, again = asyncio.run(scenario())
    assert returncode == again == -signal.SIGKILL
    assert 0.3 <= took_s < 10.0
    assert all(wait_gone(int(pid)) for pid in marker.read_text().split())


def test_what_a_dead_leader_left_in_its_group_is_killed_when_the_death_is_noticed(tmp_path):
    marker = tmp_path / "pid"
    code = (
        "import os, sys, time\n"
        "other = os.fork()\n"
        "if other == 0: time.sleep(60)\n"
        "open(sys.argv[1], 'w').write(str(other)); os._exit(5)"
    )

    async def scenario():
        return await start(code, tmp_path, str(marker)).wait_exit(10)

    assert asyncio.run(scenario()) == 5
    assert wait_gone(int(marker.read_text()))


def test_a_child_dies_with_a_parent_that_was_killed_with_sigkill(tmp_path):
    marker = tmp_path / "pid"
    parent_code = (
        "import sys, time; from pathlib import Path\n"
        "from rlmix.launch.process import ChildProcess\n"
        "child = ChildProcess.start(['sleep', '60'], name='c', log_path=Path(sys.argv[2]))\n"
        "time.sleep(0.3); Path(sys.argv[1]).write_text(str(child.pid)); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", parent_code, str(marker), str(tmp_path / "c.log")]
    )
    while not marker.exists() or not marker.read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    pid = int(marker.read_text())
    assert is_running(pid)
    parent.kill()
    parent.wait()
    assert wait_gone(pid)


def test_exits_are_described_in_words():
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "signal SIGKILL"


def test_a_half_written_ready_file_is_reported_and_not_taken_for_ready(tmp_path):
    ready = tmp_path / "r"
    code = "import sys, time; open(sys.argv[1], 'w').write('{'); time.sleep(60)"

    async def scenario():
        child = start(code, tmp_path, str(ready), ready_path=ready)
        try:
            await child.wait_ready(10)
        finally:
            child.kill()

    with pytest.raises(LaunchError, match="not JSON"):
        asyncio.run(scenario())
