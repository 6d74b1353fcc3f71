import asyncio
import subprocess
from pathlib import Path

import pytest

from rlmix.core.errors import DataError
from rlmix.core.task import Commit
from rlmix.sandbox import repository
from rlmix.sandbox.repository import TemplateStore, build_template, fast_import_stream

HISTORY = (
    Commit(message="first\nwith a body", files={"a.py": "x = 1\n", "d/é x.txt": "no newline"}),
    Commit(message="second", files={"a.py": "x = 2\n"}),
)


def git(folder: Path, *argv: str) -> str:
    return subprocess.run(
        ["git", "-c", "safe.directory=*", "-C", str(folder), *argv],
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture
def template(tmp_path: Path) -> repository.RepositoryTemplate:
    return build_template(tmp_path / "t", fast_import_stream(HISTORY))


def test_the_history_is_real_and_the_tree_is_clean(
    template: repository.RepositoryTemplate,
) -> None:
    repo = template.path / "repo"
    assert git(repo, "log", "--format=%s %aI") == (
        "second 2023-11-15T22:13:20+00:00\nfirst with a body 2023-11-14T22:13:20+00:00\n"
    )
    assert git(repo, "status", "--short") == ""
    assert git(repo, "show", "HEAD~1:a.py") == "x = 1\n"
    assert (repo / "d/é x.txt").read_text() == "no newline"


def test_the_same_history_gives_the_same_base_commit(tmp_path: Path) -> None:
    first = build_template(tmp_path / "1", fast_import_stream(HISTORY))
    second = build_template(tmp_path / "2", fast_import_stream(HISTORY))
    assert first.base_commit == second.base_commit
    assert len(first.base_commit) == 40


def test_every_object_is_reachable_from_the_base(template: repository.RepositoryTemplate) -> None:
    repo = template.path / "repo"
    counted = git(repo, "rev-list", "--objects", template.base_commit)
    stored = git(repo, "cat-file", "--batch-all-objects", "--batch-check")
    assert len(stored.splitlines()) == len(counted.splitlines())
    assert git(repo, "for-each-ref", "--format=%(refname)") == "refs/heads/main\n"


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../up", "a/../../b", ".git/hooks/x", "d/.GIT/x", "", "a//b", "a\nb"]
)
def test_a_path_outside_the_repository_is_refused(path: str) -> None:
    with pytest.raises(DataError, match="is not allowed; give a relative path"):
        fast_import_stream((Commit(message="x", files={path: ""}),))


def test_an_empty_history_is_refused() -> None:
    with pytest.raises(DataError, match="at least one commit"):
        fast_import_stream(())


def test_concurrent_sessions_of_a_task_share_one_build(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TemplateStore(tmp_path)
        templates = await asyncio.gather(*(store.get(HISTORY) for _ in range(8)))
        assert len({id(template) for template in templates}) == 1
        assert len(list(tmp_path.iterdir())) == 1

    asyncio.run(scenario())


def test_old_templates_are_removed_but_not_ones_in_use(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TemplateStore(tmp_path, max_templates=2)
        used = await store.get((Commit(message="0", files={"a": "0"}),))
        store.hold(used)
        for number in range(1, 5):
            await store.get((Commit(message="x", files={"a": str(number)}),))
        assert used.path.is_dir()
        assert len(list(tmp_path.iterdir())) == 2

    asyncio.run(scenario())
