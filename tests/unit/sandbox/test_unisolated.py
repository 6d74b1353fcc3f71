"""The fallback without isolation keeps limits and cleans up what can be found."""

import asyncio
import os
from pathlib import Path

from rlmix.sandbox.backend import open_backend

from .conftest import HISTORY, LIMITS
from .test_session import gone


def test_commands_time_outs_diffs_and_cleaning_work_without_isolation(tmp_path: Path) -> None:
    word = f"53197.{os.getpid()}"

    async def scenario() -> None:
        backend = await open_backend("unisolated", LIMITS, tmp_path, "plain", allow_unisolated=True)
        assert not backend.is_isolated
        assert any("NOT isolated" in warning for warning in backend.warnings)
        sandbox = await backend.create(await backend.prepare(HISTORY))
        first = await sandbox.run("echo 3 > a.py; echo $HOME $PWD; submit")
        assert first.submitted
        home, folder = first.output.split()
        assert Path(home).parent == Path(folder).parent
        slow = await sandbox.run(f"echo a; sleep {word}", timeout_s=0.3)
        assert (slow.exit_code, slow.timed_out, slow.output[:2]) == (124, True, "a\n")
        assert gone(word)
        await sandbox.run(f"setsid sleep {word} & true")
        assert b"+3\n" in await sandbox.capture_diff()
        await sandbox.destroy()
        assert gone(word)
        assert not Path(folder).exists()
        await backend.close()

    asyncio.run(scenario())
    assert list(tmp_path.iterdir()) == []
