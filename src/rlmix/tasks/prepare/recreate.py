"""Makes a new repository of the base's files: one commit of its own, nothing before, nothing after.

A tag that a version is derived from is kept with its distance: the tagged commit and those between
hold an empty tree, so `git describe` answers as before and no earlier state can be read.
"""

from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.sandbox.repository import write_capture
from rlmix.tasks.prepare.git import IDENTITY, git
from rlmix.tasks.prepare.worktree import set_times

MAX_DISTANCE = 100_000
_CONFIG = """[core]
\trepositoryformatversion = 0
\tfilemode = true
\tbare = false
\tlogallrefupdates = false
"""


def recreate(folder: Path, *, tracked: list[str], tag: str, distance: int) -> str:
    """Give `folder/repo` a git folder, and `folder/capture` the one that diffs are taken with.

    Args:
        tracked: paths of the base commit; they are recorded even where git ignores them.
        tag: nearest tag, empty for none; `distance` commits lie between it and the base.

    Returns:
        The base's commit id in the new repository.

    Raises:
        DataError: more commits since the tag than anybody needs.
    """
    if distance > MAX_DISTANCE:
        raise DataError(f"{distance} commits since tag {tag}; allowed: {MAX_DISTANCE}")
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
    git("fast-import", "--quiet", "--force", cwd=repo, env=env, stdin=_history(tree, tag, distance))
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


def _history(tree: str, tag: str, distance: int) -> bytes:
    out: list[bytes] = []
    count = distance + 1 if tag else 1
    for number in range(count):
        message = b"base" if number == count - 1 else b"earlier"
        out.append(b"commit refs/heads/main\nmark :%d\n" % (number + 1))
        out.append(b"committer %s\ndata %d\n%s\n" % (IDENTITY.encode(), len(message), message))
        if number == count - 1:
            out.append(b'M 040000 %s ""\n' % tree.encode())
    if tag:
        # An annotated tag: `git describe` looks at those first.
        out.append(b"tag %s\nfrom :1\ntagger %s\n" % (tag.encode(), IDENTITY.encode()))
        out.append(b"data %d\n%s\n" % (len(tag.encode()), tag.encode()))
    return b"".join(out)


def _remove(path: Path) -> None:
    if path.is_dir():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    elif path.exists():
        path.unlink()
