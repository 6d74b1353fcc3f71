"""Checks a prepared repository against what it must not hold. Reads the result, trusts no step."""

from pathlib import Path

from rlmix.tasks.prepare.archives import holds
from rlmix.tasks.prepare.git import closure_of, git, objects_in
from rlmix.tasks.prepare.inspect import CHANNELS
from rlmix.tasks.prepare.lines import find_lines
from rlmix.tasks.prepare.overlay import Unproven
from rlmix.tasks.prepare.worktree import MTIME_S, names_of, tree_id, walk

ALLOWED = frozenset({"HEAD", "config", "index", "info", "objects", "refs", "packed-refs"})
"""All that a git folder of ours holds."""


def prove(
    folder: Path,
    *,
    commit: str,
    original: Path,
    gone: frozenset[str],
    lines: tuple[bytes, ...],
    was_replaced: frozenset[str],
    was_committed: bool,
) -> tuple[str, tuple[str, ...]]:
    """(tree id, sentences that hold).

    Args:
        original: the image's work tree, to compare bytes and modes with.
        was_replaced: kept files whose content was changed on purpose.
        was_committed: the base is a commit, so the image's files may differ from it.

    Raises:
        Unproven: a check failed; the message says which.
    """
    repo = folder / "repo"
    everything, reached = set(objects_in(repo)), closure_of(repo, "HEAD", "--tags")
    _check(everything == reached, f"{len(everything ^ reached)} objects are not of the base")
    names = {path.name for path in (repo / ".git").iterdir()}
    _check(names <= ALLOWED, f"the git folder holds {sorted(names - ALLOWED)}")
    info = {path.name for path in (repo / ".git/info").iterdir()}
    _check(info <= {"attributes", "refs"}, f"the git folder holds info/{sorted(info)}")
    for channel, said in CHANNELS.items():
        if channel != "packed-refs":
            _check(not (repo / ".git" / channel).exists(), f"the git folder holds {said}")
    heads = git("for-each-ref", "--format=%(refname)", cwd=repo).decode().split()
    others = [ref for ref in heads if ref != "refs/heads/main" and not ref.startswith("refs/tags/")]
    _check(not others and heads.count("refs/heads/main") == 1, f"references {heads}")
    git("fsck", "--full", "--strict", "--no-dangling", cwd=repo)
    trees = git("log", "--format=%T", "HEAD", cwd=repo).decode().split()
    empty = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
    _check(all(tree == empty for tree in trees[1:]), "an earlier commit holds files")

    listing = git("ls-tree", "-r", "-z", "--name-only", "--full-tree", commit, cwd=repo)
    paths = [path.decode("utf-8", "surrogateescape") for path in listing.split(b"\0") if path]
    tree = git("rev-parse", f"{commit}^{{tree}}", cwd=repo).decode().strip()
    _check(tree == tree_id(repo, paths), "the recorded tree is not that of the files")
    if not was_committed:
        same = [path for path in paths if path not in was_replaced]
        _check(
            tree_id(original, same) == tree_id(repo, same), "files differ from those of the image"
        )
    status = git("status", "--porcelain=v1", cwd=repo)
    _check(not status, f"the work tree differs from the base: {status.decode()[:200]!r}")
    left = sorted(path for path in gone if (repo / path).exists())
    _check(not left, f"hidden paths are there: {left[:3]}")
    nested = [path for path, _ in walk(repo) if path.lower().endswith("/.git")]
    _check(not nested, f"a git folder inside: {nested[:3]}")
    files = [(p, repo / p) for p, e in walk(repo) if e.is_file(follow_symlinks=False)]
    found = find_lines(files, lines)
    bad = [find for find in found if not (find.is_unread and find.path in set(paths))]
    _check(not bad, bad[0].sentence() if bad else "")
    named = [p for p, entry in walk(repo) if any(holds(n, lines) for n in names_of(p, entry))]
    _check(not named, f"a name holds a line of the fix or of a hidden test: {named[:1]}")
    told = [ref for ref in heads if holds(ref.encode("utf-8", "surrogateescape"), lines)]
    _check(not told, f"a tag's name holds a line of the fix: {told[:1]}")
    late = [p for p, e in walk(repo) if e.stat(follow_symlinks=False).st_mtime != MTIME_S]
    _check(not [p for p in late if not p.startswith(".git")], f"times differ: {late[:3]}")
    return tree, (
        f"all {len(everything)} objects belong to the base commit {commit[:12]}",
        f"references: main and {len(heads) - 1} tags; no reflog, stash, remote, alternate or hook",
        f"the tree {tree[:12]} equals its {len(paths)} files, computed without git",
        f"none of {len(gone)} hidden paths and none of {len(lines)} telling lines is there",
        f"{len(files)} files have one modification time",
    )


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Unproven(otherwise)
