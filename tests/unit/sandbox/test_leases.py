"""A sandbox has an end even when its owner forgets it."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rlmix.core.errors import SandboxError
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.cgroups import group_name, open_groups
from rlmix.sandbox.reap import GROUP_LIST, reap, run_folder, write_group_list

from .conftest import HISTORY, LIMITS
from .test_session import gone


@pytest.mark.parametrize("name", ["namespaces", "weak"])
def test_a_sandbox_older_than_its_lease_is_killed_by_its_launcher(
    tmp_path: Path, name: str
) -> None:
    word = f"{25000 + os.getpid()}.75"

    async def scenario() -> None:
        limits = replace(LIMITS, lease_s=4.0)
        try:
            backend = await open_backend(name, limits, tmp_path, f"lease{os.getpid()}")
        except SandboxError as error:
            pytest.skip(str(error))
        sandbox = await backend.create(await backend.prepare(HISTORY))
        command = f"setsid -f env -i sleep {word}; sleep {word}"
        running = asyncio.create_task(sandbox.run(command, 60))
        with pytest.raises(SandboxError, match=r"its lease of 4 s ended"):
            await asyncio.wait_for(running, 30)
        fresh = await backend.create(await backend.prepare(HISTORY))
        assert (await fresh.run("echo new")).output == "new\n"
        await backend.close()

    asyncio.run(scenario())
    assert gone(word)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def group_parents() -> Iterator[list[Path]]:
    pool = open_groups(LIMITS, group_name(f"reap{os.getpid()}", "w"))
    if not pool.in_force:
        pytest.skip("this user may make no control group here")
    pool.take()
    yield list(pool.parents.values())
    pool.close()


def test_reap_removes_the_groups_that_a_killed_worker_listed(
    tmp_path: Path, group_parents: list[Path]
) -> None:
    run_id = f"reap{os.getpid()}"
    folder = run_folder(tmp_path, run_id) / "worker_1"
    folder.mkdir(parents=True)
    write_group_list(folder, group_parents)
    assert (folder / GROUP_LIST).read_text().splitlines() == sorted(
        map(str, set(group_parents)), key=list(map(str, group_parents)).index
    )
    assert all((path / "box0").is_dir() for path in group_parents)
    reap(run_id, tmp_path)
    assert not any(path.exists() for path in group_parents)
    assert list(tmp_path.iterdir()) == []
