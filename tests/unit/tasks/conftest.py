"""A sandbox backend for a test file, and a way to judge an edit made in one of its sandboxes."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from rlmix.core.errors import SandboxError
from rlmix.core.task import HiddenTask, PublicTask
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxBackend, SandboxLimits
from rlmix.tasks.rule import Verdict
from rlmix.tasks.verdict import judge

COMMAND_LIMITS = SandboxLimits(
    memory_mib=512, pids=64, disk_mib=64, output_chars=4000, command_timeout_s=20.0
)


@dataclass
class Court:
    """Judges edits."""

    runner: asyncio.Runner
    backend: SandboxBackend

    def diff(self, command: str, public: PublicTask) -> bytes:
        async def scenario() -> bytes:
            sandbox = await self.backend.create(await self.backend.prepare(public.repository))
            try:
                done = await sandbox.run(command)
                assert done.exit_code == 0, done
                return await sandbox.capture_diff()
            finally:
                await sandbox.destroy()

        return self.runner.run(asyncio.wait_for(scenario(), 60))

    def judge(
        self, diff: bytes, public: PublicTask, hidden: HiddenTask, timeout_s: float = 20.0
    ) -> Verdict:
        work = judge(public, hidden, diff, self.backend, timeout_s=timeout_s)
        return self.runner.run(asyncio.wait_for(work, 100))


@pytest.fixture(scope="module")
def court(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Court]:
    scratch = tmp_path_factory.mktemp("scratch")
    with asyncio.Runner() as runner:
        try:
            name = f"c{os.getpid()}"
            backend = runner.run(open_backend("namespaces", COMMAND_LIMITS, scratch, name))
        except SandboxError as error:
            pytest.skip(f"this machine forbids sandboxes: {error}")
        yield Court(runner, backend)
        runner.run(backend.close())
    assert list(scratch.iterdir()) == []
