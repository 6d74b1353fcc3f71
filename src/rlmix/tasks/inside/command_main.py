"""Runs a task's own test command after the diff was applied.

The command's output goes through a pipe to this process, which the tested code can neither trace
nor read: it is not dumpable, and its report descriptor is not inherited. Everything the command
left running is ended before its machine-readable report is opened.
"""

import base64
import contextlib
import ctypes
import os
import selectors
import signal
import stat
import subprocess
import sys
import time
import zlib

from rlmix.tasks.inside.protected import is_foreign
from rlmix.tasks.inside.restore import git_apply, paths_of, put_back, restore_protected
from rlmix.tasks.inside.tree import files_below, write_file

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
HEAD_BYTES, TAIL_BYTES = 256 << 10, 3 << 20
"""Of the output: a summary stands at the end."""
MAX_JUNIT_BYTES = 8 << 20
MAX_PACKED_BYTES = 1 << 20
"""Of each packed attachment; the report as a whole is bounded too."""


class Output:
    """The head and the tail of a stream."""

    def __init__(self):
        self.head, self.tail, self.dropped = bytearray(), bytearray(), 0

    def write(self, data):
        room = HEAD_BYTES - len(self.head)
        self.head += data[:room]
        self.tail += data[max(0, room) :]
        extra = len(self.tail) - TAIL_BYTES
        if extra > 0:
            del self.tail[:extra]
            self.dropped += extra

    def content(self):
        middle = b"\n[%d bytes left out]\n" % self.dropped if self.dropped else b""
        return bytes(self.head) + middle + bytes(self.tail)


def run_command(command, repo, env, timeout_s):
    """(exit status or None when it ran out of time, output)."""
    child = subprocess.Popen(
        ["/bin/bash", "-c", command],
        cwd=repo,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert child.stdout is not None
    output, fd = Output(), child.stdout.fileno()
    os.set_blocking(fd, False)
    deadline_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        is_open = True
        while child.poll() is None:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                break
            # Who stays behind may keep the pipe open, so its end is not what is waited for.
            if not is_open:
                time.sleep(min(0.02, left_s))
            elif selector.select(min(0.1, left_s)):
                is_open = drain(fd, output)
    status = child.poll()
    end_descendants(deadline_s + 5.0)
    if is_open:
        drain(fd, output, most=64)
    return status, output.content()


def drain(fd, output, most=1):
    """Read what is there; False at the end of the stream."""
    for _ in range(most):
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return True
        if not data:
            return False
        output.write(data)
    return True


def end_descendants(until_s):
    """Kill every process below this one, whatever session it moved to. As their reaper, this
    process becomes the parent of those whose parent died."""
    while time.monotonic() < until_s:
        below = descendants()
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.005)


def descendants():
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            if fields[0] != b"Z":
                parents[int(name)] = int(fields[1])
    below, grew = {os.getpid()}, True
    while grew:
        found = {pid for pid, parent in parents.items() if parent in below} - below
        below |= found
        grew = bool(found)
    return below - {os.getpid()}


def read_junit(path):
    """A regular file of bounded size; anything else is no report."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_JUNIT_BYTES:
            return None
        return file.read(MAX_JUNIT_BYTES + 1)


def packed(content):
    """zlib and base64; the tail alone when the whole does not fit."""
    while True:
        data = zlib.compress(content, 1)
        if len(data) <= MAX_PACKED_BYTES:
            return base64.b64encode(data).decode()
        content = content[len(content) // 2 :]


PYTEST_PLUGIN = """
from pathlib import Path
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session, config, items):
    path = Path(__file__).with_name("test_{nonce}.py")
    try:
        module = pytest.Module.from_parent(session, path=path)
    except TypeError:
        import py
        module = pytest.Module.from_parent(session, fspath=py.path.local(str(path)))
    items.extend(module.collect())
"""
PYTEST_CANARIES = """
def test_{nonce}_fails():
    raise AssertionError("this test fails in a sound runner")

def test_{nonce}_passes():
    pass
"""
UNITTEST_CANARIES = """
import unittest

class Canary(unittest.TestCase):
    def test_{nonce}_fails(self):
        raise AssertionError("this test fails in a sound runner")

    def test_{nonce}_passes(self):
        pass

def run_tests(self, run=unittest.TestProgram.runTests):
    names = "test_{nonce}_fails", "test_{nonce}_passes"
    self.test = unittest.TestSuite([self.test, *map(Canary, names)])
    run(self)

unittest.TestProgram.runTests = run_tests
"""
PYTEST_OPTIONS = "--junitxml={folder}/report.xml -o junit_family=xunit1 -p no:cacheprovider"


def runner_settings(runner, folder, nonce, has_canary):
    """Environment that makes a Python runner run one test that fails and one that passes after all
    others, and pytest write JUnit XML."""
    env, files = {}, {}
    if runner == "pytest":
        env["PYTEST_ADDOPTS"] = PYTEST_OPTIONS.format(folder=folder)
        files = {f"rlmix_{nonce}.py": PYTEST_PLUGIN, f"test_{nonce}.py": PYTEST_CANARIES}
    elif runner == "unittest":
        files = {"sitecustomize.py": UNITTEST_CANARIES}
    if has_canary:
        for name, text in files.items():
            write_file(folder, name, text.replace("{nonce}", nonce).encode(), 0o644)
        env["PYTHONPATH"] = folder
        if runner == "pytest":
            env["PYTEST_ADDOPTS"] += f" -p rlmix_{nonce}"
    return env


def own_python(folder):
    """A folder with this interpreter, to be looked at after those of the image."""
    place = os.path.join(folder, "bin")
    os.mkdir(place)
    for name in ("python", "python3"):
        os.symlink(os.path.realpath(sys.executable), os.path.join(place, name))
    return place


def prepare(data, say):
    """Diff, protected paths, hidden patch, hidden files; False when the command must not run."""
    repo, base, home = data["repo"], data["base"], data["home"]
    before = set(files_below(repo))
    if data["diff"]:
        status, _ = git_apply(data["diff"], repo, base, home)
        if status != 0:
            say("unappliable", str(status))
            return False
    foreign = [path for path in files_below(repo) if path not in before and is_foreign(path)]
    if foreign:
        say("foreign", foreign[0])
        return False
    for path in restore_protected(repo, base):
        say("reverted", path)
    if data["hidden_patch"]:
        for path in paths_of(data["hidden_patch"], repo, base, home):
            if put_back(path, repo, f"{base}/repo"):
                say("reverted", path)
        status, _ = git_apply(data["hidden_patch"], repo, base, home)
        if status != 0:
            say("hidden_unappliable", str(status))
            return False
    for path, text in data["tests"].items():
        write_file(repo, path, text.encode(), 0o644)
    say("applied")
    return True


def main(data, report_fd):
    nonce = data["nonce"]

    def say(kind, text=""):
        line = f"{nonce} {kind} {text}".replace("\n", "?") + "\n"
        view = memoryview(line.encode("utf-8", "replace"))
        while view:
            view = view[os.write(report_fd, view) :]

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    say("begin")
    if not prepare(data, say):
        return
    folder = os.path.join(data["home"], nonce)
    os.mkdir(folder, 0o700)
    env = {**os.environ, "HOME": data["home"], "TMPDIR": data["home"], **data["env"]}
    env["PATH"] += ":" + own_python(folder)
    env.update(runner_settings(data["runner"], folder, nonce, data["has_canary"]))
    if data["has_canary"]:
        say("canary", nonce)
    status, output = run_command(data["command"], data["repo"], env, data["timeout_s"])
    say("output", packed(output))
    junit = read_junit(os.path.join(folder, "report.xml"))
    if junit is not None:
        say("junit", packed(junit))
    say("exit", "none" if status is None else str(status))
    say("done")


main(data, report_fd)  # noqa: F821  (given by the launcher)
