"""Makes a new repository of the base's files: one commit of its own, nothing before, nothing after.

Tags that a version is derived from are kept with their distance: the tagged commits and those after
hold an empty tree, so `git describe` answers as before and no earlier state can be read.
"""

from collections.abc import Sequence
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.sandbox.repository import write_capture
from rlmix.tasks.prepare.git import IDENTITY, git
from rlmix.tasks.prepare.inspect import Tag
from rlmix.tasks.prepare.worktree import set_times

MAX_DISTANCE = 100_000
_CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = false
"""


def recreate(folder: Path, *, tracked: list[str], tags: Sequence[Tag]) -> str:
    """Give `folder/repo` a git folder, and `folder/capture` the one that diffs are taken with.

    Args:
        tracked: paths of the base commit; they are recorded even where git ignores them.
        tags: those to keep, each at its distance from the base.

    Returns:
        The base's commit id in the new repository.

    Raises:
        DataError: more commits since the tag than anybody needs.
    """
    for tag in tags:
        if tag.distance > MAX_DISTANCE:
            said = f"{tag.distance} commits since tag {tag.name}"
            raise DataError(f"{said}; allowed: {MAX_DISTANCE}")
    repo = folder / "repo"
    write_capture(folder / "capture")
    _empty_repository(repo)
    env = {"GIT_DIR": str(repo / ".git"), "GIT_WORK_TREE": str(repo)}
    # These attributes keep git from converting a byte; they stay, so that a file whose line ends
    # differ from what .gitattributes asks for is not shown as changed.
    info = repo / ".git/info"
    info.mkdir()
    (info / "attributes").write_bytes((folder / "capture/info/attributes").read_bytes())
    git("add", "-A", ".", cwd=repo, env=env)
    present = [path for path in tracked if (repo / path).is_symlink() or (repo / path).is_file()]
    git(
        "add", "-f", "--pathspec-from-file=-", "--pathspec-file-nul", cwd=repo, env=env,
        stdin="\0".join(f":(literal){path}" for path in present).encode("utf-8", "surrogateescape"),
    )  # fmt: skip
    tree = git("write-tree", cwd=repo, env=env).decode().strip()
    git("fast-import", "--quiet", "--force", cwd=repo, env=env, stdin=_history(tree, tags))
    git("-c", "pack.threads=1", "repack", "-adq", cwd=repo, env=env)
    git("prune", "--expire=now", cwd=repo, env=env)
    for extra in (
        "description",
        "hooks",
        "branches",
        "logs",
        "ORIG_HEAD",
        "COMMIT_EDITMSG",
    ):
        _remove(repo / ".git" / extra)
    set_times(folder)
    git("update-index", "-q", "--refresh", cwd=repo, env=env, check=False)
    return git("rev-parse", "HEAD", cwd=repo, env=env).decode().strip()


def _empty_repository(repo: Path) -> None:
    place = repo / ".git"
    for name in ("objects", "refs/heads", "refs/tags"):
        (place / name).mkdir(parents=True)
    (place / "HEAD").write_text("ref: refs/heads/main\n")
    (place / "config").write_text(_CONFIG)


def _history(tree: str, tags: Sequence[Tag]) -> bytes:
    out: list[bytes] = []
    count = 1 + max((tag.distance for tag in tags), default=0)
    for number in range(count):
        message = b"base" if number == count - 1 else b"earlier"
        out.append(b"commit refs/heads/main\nmark :%d\n" % (number + 1))
        out.append(b"committer %s\ndata %d\n%s\n" % (IDENTITY.encode(), len(message), message))
        if number == count - 1:
            out.append(b'M 040000 %s ""\n' % tree.encode())
    for tag in tags:
        name, place = tag.name.encode("utf-8", "surrogateescape"), count - tag.distance
        if tag.is_annotated:  # `git describe` asks for these first, or for no others.
            out.append(b"tag %s\nfrom :%d\ntagger %s\n" % (name, place, IDENTITY.encode()))
            out.append(b"data %d\n%s\n" % (len(name), name))
        else:
            out.append(b"reset refs/tags/%s\nfrom :%d\n\n" % (name, place))
    return b"".join(out)


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    elif path.exists():
        path.unlink()
