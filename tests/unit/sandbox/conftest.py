"""One backend per test file, on one event loop; nothing may be left when the file is done."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.namespaces import NamespaceBackend
from rlmix.sandbox.protocol import CommandResult, SandboxLimits
from rlmix.sandbox.reap import marked_processes
from rlmix.sandbox.session import ShellSandbox

LIMITS = SandboxLimits(
    memory_mib=256, pids=32, disk_mib=8, output_chars=2000, command_timeout_s=10.0
)
HISTORY = (
    Commit(message="start", files={"a.py": "x = 1\n", "sub/b.txt": "one\ntwo\n"}),
    Commit(message="more", files={"a.py": "x = 2\n"}),
)


@dataclass
class Lab:
    """A backend and the loop it lives on."""

    runner: asyncio.Runner
    backend: NamespaceBackend

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 60))

    def create(self, history: tuple[Commit, ...] = HISTORY) -> ShellSandbox:
        async def make() -> ShellSandbox:
            return await self.backend.create(await self.backend.prepare(history))

        return self.do(make())

    def run(self, *commands: str, timeout_s: float = 10.0) -> list[CommandResult]:
        """Run commands in one fresh sandbox."""
        sandbox = self.create()
        try:
            return [self.do(sandbox.run(command, timeout_s)) for command in commands]
        finally:
            self.do(sandbox.destroy())


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    scratch = tmp_path_factory.mktemp("scratch")
    run_id = scratch.parent.name + scratch.name
    with asyncio.Runner() as runner:
        try:
            backend = runner.run(open_backend("namespaces", LIMITS, scratch, run_id))
        except SandboxError as error:
            pytest.skip(f"this machine forbids sandboxes: {error}")
        assert isinstance(backend, NamespaceBackend)
        yield Lab(runner, backend)
        assert backend.num_live == 0
        runner.run(backend.close())
    assert marked_processes(RUN_MARK, run_id) == []
    assert list(scratch.iterdir()) == []
