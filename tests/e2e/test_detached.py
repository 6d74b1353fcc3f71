"""A run without a terminal: started in one that is then killed, watched and stopped from others."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

RLMIX = str(Path(sys.executable).with_name("rlmix"))


def ask(root, *arguments, limit_s=240):
    done = subprocess.run(
        [RLMIX, *arguments, "--dir", str(root), "--json"],
        capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout)


def wait_until(condition, what, limit_s=240):
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, f"no {what}"
        time.sleep(0.2)


def in_terminal(*arguments, cwd):
    """Start a command as the leader of a terminal of its own; (pid, the terminal's other end)."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.environ.update(TERM="xterm", COLUMNS="120", LINES="40")
        os.execv(arguments[0], arguments)
    return pid, terminal


def read_until(terminal, *wanted, limit_s=240):
    """What the terminal showed until all words were there."""
    deadline_s = time.monotonic() + limit_s
    shown = b""
    while not all(word in shown for word in wanted):
        assert time.monotonic() < deadline_s, shown[-2000:]
        try:
            shown += os.read(terminal, 1 << 16)
        except OSError as error:
            raise AssertionError(f"the terminal ended: {shown[-2000:]!r}") from error
    return shown


def test_a_run_outlives_its_terminal_and_is_watched_and_stopped_from_others(tmp_path):
    root = tmp_path / "runs"
    shell, terminal = in_terminal(
        RLMIX, "train", "--detach", "experiment=tiny", "loop.steps=400", "loop.eval_tasks=0",
        f"run.dir={root}", "run.name=far", cwd=tmp_path,
    )  # fmt: skip
    read_until(terminal, b"run far goes on without this terminal", b"rlmix runs attach far")
    os.close(terminal)  # Hangs up, as a lost connection does.
    os.waitpid(shell, 0)
    owner = json.loads((root / "far" / ".lock").read_text())
    driver = psutil.Process(owner["pid"])
    try:
        assert driver.terminal() is None
        wait_until((root / "far" / "control.json").exists, "control file")
        # A live view in another terminal; what kills it leaves the run alone.
        watcher, terminal = in_terminal(RLMIX, "runs", "attach", "far", "--dir", str(root), cwd="/")
        read_until(terminal, b"far", b"b200", b"a100", b"emulated")
        os.kill(watcher, signal.SIGKILL)
        os.waitpid(watcher, 0)
        os.close(terminal)
        # A replica that dies is followed into its next start.
        with (tmp_path / "followed").open("wb") as out:
            following = subprocess.Popen(
                [RLMIX, "runs", "logs", "far", "--pool", "b200", "--replica", "0", "--follow",
                 "--dir", str(root)],
                stdout=out, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        followed = tmp_path / "followed"
        wait_until(lambda: b"engine-b200-0: " in followed.read_bytes(), "line of the engine")
        engine = next(
            child
            for child in driver.children(recursive=True) + list(psutil.process_iter())
            if "rlmix.engine.embedded" in (words := _words(child))
            and f"{root}/far/" in words
            and "--replica b200-0" in words
        )
        engine.kill()
        wait_until(
            lambda: (
                followed.read_bytes().count(b" serving b200/") >= 2
                or b"replica-b200-0-2: " in followed.read_bytes()
            ),
            "line of the next start",
        )
        assert b"a100" not in followed.read_bytes()
        code, shown = ask(root, "runs", "show", "far")
        assert (code, shown["state"]) == (0, "running")
        assert b"far: " in (root / "far" / "logs" / "driver.log").read_bytes()
        code, stopped = ask(root, "runs", "stop", "far")
        assert (code, stopped["is_stopped"], stopped["state"]) == (0, True, "interrupted")
        assert following.wait(timeout=60) == 0
    finally:
        if is_alive(driver):
            driver.kill()
    assert not is_alive(driver)


def is_alive(process):
    """A detached driver has no parent of ours that would collect it: a zombie has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _words(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_detached_request_that_is_wrong_is_refused_here(tmp_path):
    done = subprocess.run(
        [RLMIX, "train", "--detach", f"run.dir={tmp_path}", "loop.stepz=3"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "did you mean loop.steps?" in done.stderr
    assert list(tmp_path.iterdir()) == []
