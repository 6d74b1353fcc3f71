"""What the escapes run in: tight limits, a victim on the host, and proof that each was tried.

Every attempt prints one line, its name and what the kernel answered. A test compares the names with
those it asked for, so an attempt that silently did not run fails the test.
"""

import asyncio
import os
import subprocess
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.protocol import CommandResult, SandboxLimits
from rlmix.sandbox.reap import marked_processes
from rlmix.sandbox.session import ShellSandbox

LIMITS = SandboxLimits(
    memory_mib=128, pids=24, disk_mib=8, output_chars=20_000, command_timeout_s=20.0, cpus=1.0
)
HISTORY = (Commit(message="start", files={"a.py": "x = 1\n"}),)

PRELUDE = """
import ctypes, errno, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
ARM = os.uname().machine != "x86_64"

def call(x86, generic, *args):
    number = generic if ARM else x86
    arguments = [ctypes.c_long(one) if isinstance(one, int) else one for one in args]
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "")
    return result

def attempt(name, action):
    try:
        action()
        answer = "SUCCEEDED"
    except OSError as error:
        answer = errno.errorcode.get(error.errno, str(error))
    print(name, answer, flush=True)
"""


@dataclass
class Lab:
    """A backend, its loop, and things on the host that must stay as they are."""

    name: str
    runner: asyncio.Runner
    backend: LaunchedBackend
    folder: Path

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 90))

    def create(self) -> ShellSandbox:
        async def make() -> ShellSandbox:
            return await self.backend.create(await self.backend.prepare(HISTORY))

        return self.do(make())

    def run(self, *commands: str, timeout_s: float = 20.0) -> list[CommandResult]:
        sandbox = self.create()
        try:
            return [self.do(sandbox.run(command, timeout_s)) for command in commands]
        finally:
            self.do(sandbox.destroy())

    def attempts(self, script: str) -> dict[str, str]:
        """Run a Python script of `attempt(name, action)` calls; name -> the kernel's answer."""
        (result,) = self.run("cat > /dev/null; python3 - <<'END'\n" + PRELUDE + script + "\nEND")
        assert result.exit_code == 0, result.output
        return dict(line.rsplit(" ", 1) for line in result.output.splitlines())


@pytest.fixture(scope="module", params=["namespaces", "weak"])
def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    scratch = tmp_path_factory.mktemp(f"red_{request.param}")
    run_id = f"red{os.getpid()}{request.param}"
    with asyncio.Runner() as runner:
        try:
            backend = runner.run(open_backend(request.param, LIMITS, scratch, run_id))
        except SandboxError as error:
            pytest.skip(f"this machine forbids {request.param}: {error}")
        assert isinstance(backend, LaunchedBackend)
        folder = tmp_path_factory.mktemp("host")
        folder.chmod(0o755)
        yield Lab(request.param, runner, backend, folder)
        groups = list(backend._groups.parents.values())
        runner.run(backend.close())
    assert marked_processes(RUN_MARK, run_id) == []
    assert list(scratch.iterdir()) == []
    assert not any(path.exists() for path in groups)


@pytest.fixture
def victim(lab: Lab) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the host, and a sandbox beside the attacker's, that must both survive."""
    neighbour = lab.create()
    lab.do(neighbour.run("echo mine > note"))
    process = subprocess.Popen(["sleep", "600"])
    yield process
    assert process.poll() is None, "the attempt ended a process of the host"
    process.kill()
    process.wait()
    assert lab.do(neighbour.run("cat note")).output == "mine\n"
    lab.do(neighbour.destroy())
