"""Copies the base's files out of an image, byte for byte, without any trace of git or of caches.

Invariant: what is kept keeps bytes, mode and link target; everything gets one modification time,
because times tell which files a fix touched.
"""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.tasks.prepare.copies import is_leftover
from rlmix.tasks.prepare.git import git
from rlmix.tasks.prepare.image import is_git_data, is_git_folder, plain_file

MAX_BYTES = 32 << 30
MAX_DEPTH = 200
MTIME_S = 1_700_000_000
CACHES = frozenset(
    {
        "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox",
        ".nox", ".nyc_output", ".jest-cache", ".vite", ".turbo", ".eslintcache", ".gradle",
        ".coverage", "coverage.xml", ".phpunit.cache", ".phpunit.result.cache", ".rspec_status",
        ".aider.chat.history.md", "lastfailed",
    }
)  # fmt: skip
"""Names that hold results of test runs or copies of sources; nothing needs them to build."""


@dataclass(kw_only=True, slots=True)
class Copied:
    """What `copy_base` did."""

    purged: list[str] = field(default_factory=list)
    tracked: list[str] = field(default_factory=list)
    """Paths of the base commit; empty when the image's work tree is the base."""


def copy_base(
    repo: Path, out: Path, *, env: Mapping[str, str], commit: str, gone: frozenset[str]
) -> Copied:
    """Fill the new folder `out` with the base.

    Args:
        env: names the git folder of `repo` to git.
        commit: base whose blobs are written; empty: the work tree as it is.
        gone: relative paths that must not be taken over (hidden tests).

    Raises:
        DataError: the base has a submodule whose files are not there.
    """
    copied = Copied()
    _check_size(repo)
    out.mkdir(parents=True)
    tracked = _tracked(repo, commit, env) if commit else {}
    # A file that the base and the image's head share is taken as it lies there, with the line ends
    # that a checkout gave it; of the others the commit has the only true content.
    head = _tracked(repo, "HEAD", env) if commit else {}
    shared = {path for path in tracked if tracked[path] == head.get(path)}
    own = set(tracked or indexed(repo, env))
    folders = {above for path in own for above in _above(path)}
    skipped: list[str] = []  # Folders that are left out with all that is in them.
    for path, entry in walk(repo):
        name = path.rpartition("/")[2]
        if path.startswith(tuple(skipped)):
            continue
        if path in folders and commit and not entry.is_dir(follow_symlinks=False):
            # A link here would lead the commit's files elsewhere.
            copied.purged.append(path)
            continue
        if _is_git(entry, path, own, folders):
            copied.purged.append(path)
            skipped.append(f"{path}/")
            continue
        is_left = is_leftover(path) and path not in own and not entry.is_dir(follow_symlinks=False)
        is_cache = name in CACHES or name.endswith((".pyc", ".pyo"))
        if name == ".git" or is_cache or path in gone or is_left:
            if name != ".git" or path != ".git":
                copied.purged.append(path)
            if path in gone:
                skipped.append(f"{path}/")
            continue
        if path not in shared and (path in head or path in tracked):
            continue  # The commit's own content is written below.
        _copy_entry(entry, out / path, copied, path)
    _write_blobs(repo, out, tracked, env, gone, copied)
    copied.tracked = sorted(tracked)
    return copied


def keep_caches(repo: Path, out: Path, tracked: Iterable[str], copied: Copied) -> None:
    """Copy files that only bear the name of a cache: upstream's own commit records them (a report
    that a parser is tested with). Bytecode is never among them."""
    for path in tracked:
        parts = path.split("/")
        if CACHES.isdisjoint(parts) or "__pycache__" in parts or path.endswith((".pyc", ".pyo")):
            continue
        place = plain_file(repo, path)
        if place is None or os.path.lexists(out / path):
            continue
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(place, out / path)
        (out / path).chmod(place.stat().st_mode & 0o777)
        copied.purged = [one for one in copied.purged if one != path]


def names_of(path: str, place: "os.DirEntry[str] | Path") -> Iterator[bytes]:
    """The path, and where a link leads to: both can say something."""
    yield os.fsencode(path)
    if place.is_symlink():
        yield os.fsencode(os.readlink(place))


def check_depth(path: str) -> None:
    """Refuse folders nested deeper than any project has them, before somebody walks down there.

    Raises:
        DataError: they are.
    """
    if path.count("/") > MAX_DEPTH:
        raise DataError(f"folders are nested deeper than {MAX_DEPTH}: {path[:60]}...")


def _check_size(repo: Path) -> None:
    """A sparse file would be written out."""
    size = 0
    for path, entry in walk(repo):
        check_depth(path)
        size += entry.stat(follow_symlinks=False).st_size
    if size > MAX_BYTES:
        raise DataError(f"the work tree takes {size >> 30} GiB; allowed: {MAX_BYTES >> 30}")


def _above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


def _is_git(entry: os.DirEntry[str], path: str, own: set[str], folders: set[str]) -> bool:
    """Another repository's git folder or objects, unless the base itself records them."""
    if path == ".git" or path in own or path in folders:
        return False
    if entry.is_dir(follow_symlinks=False):
        return is_git_folder(Path(entry.path))
    return entry.is_file(follow_symlinks=False) and is_git_data(path, Path(entry.path))


def indexed(repo: Path, env: Mapping[str, str]) -> list[str]:
    """Paths that the index of the image's repository records; none without one."""
    if not env:
        return []
    listing = git("ls-files", "-z", cwd=repo, env=dict(env))
    return [os.fsdecode(path) for path in listing.split(b"\0") if path]


def committed(repo: Path, commit: str, env: Mapping[str, str]) -> frozenset[str]:
    """Paths that a commit records."""
    return frozenset(_tracked(repo, commit, env))


def walk(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """(relative path, entry) of everything below `root`, parents first; caches and git folders
    are given but not entered, links never followed."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(root / folder) as entries:
            for entry in sorted(entries, key=lambda e: e.name):
                path = f"{folder}/{entry.name}" if folder else entry.name
                yield path, entry
                inner = entry.is_dir(follow_symlinks=False)
                if inner and entry.name != ".git" and entry.name not in CACHES:
                    waiting.append(path)


def _copy_entry(entry: os.DirEntry[str], target: Path, copied: Copied, path: str) -> None:
    facts = entry.stat(follow_symlinks=False)
    if stat.S_ISDIR(facts.st_mode):
        target.mkdir(parents=True, exist_ok=True)
        target.chmod(facts.st_mode & 0o777 | 0o700)
    elif stat.S_ISLNK(facts.st_mode):
        target.parent.mkdir(parents=True, exist_ok=True)
        os.symlink(os.readlink(entry.path), target)
    elif stat.S_ISREG(facts.st_mode):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(entry.path, target)
        target.chmod(facts.st_mode & 0o777)
    else:
        copied.purged.append(path)


def _tracked(repo: Path, commit: str, env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Path -> (mode, blob) of a commit."""
    found = {}
    listing = git("ls-tree", "-r", "-z", "--full-tree", commit, cwd=repo, env=dict(env))
    for line in listing.split(b"\0"):
        if line:
            facts, _, path = line.partition(b"\t")
            mode, _, blob = facts.decode().split(" ")
            found[os.fsdecode(path)] = (mode, blob)
    return found


def _write_blobs(
    repo: Path,
    out: Path,
    tracked: dict[str, tuple[str, str]],
    env: Mapping[str, str],
    gone: frozenset[str],
    copied: Copied,
) -> None:
    wanted = [p for p in tracked if p not in gone and not os.path.lexists(out / p)]
    copied.purged += [path for path in tracked if path in gone]
    for path in wanted:
        mode, blob = tracked[path]
        target = out / path
        if mode == "160000":
            if not (repo / path).is_dir() or not any((repo / path).iterdir()):
                raise DataError(f"the submodule {path} has no files in the image")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        content = git("cat-file", "blob", blob, cwd=repo, env=dict(env))
        if mode == "120000":
            os.symlink(os.fsdecode(content), target)
        else:
            target.write_bytes(content)
            target.chmod(0o755 if mode == "100755" else 0o644)


def set_times(root: Path) -> None:
    """One modification time for everything, links included."""
    for folder, names, files in os.walk(root, topdown=False):
        for name in (*names, *files):
            os.utime(os.path.join(folder, name), (MTIME_S, MTIME_S), follow_symlinks=False)
    os.utime(root, (MTIME_S, MTIME_S))


def tree_id(root: Path, paths: list[str]) -> str:
    """The git tree id of `paths` below `root`, computed without git, to check git by.

    Source: git's object format: `tree <size>\\0` and entries `<mode> <name>\\0<20 bytes>`, sorted
    with folders compared as if they ended in `/`.
    """
    top: dict[bytes, object] = {}
    for path in paths:
        node = top
        *folders, name = os.fsencode(path).split(b"/")
        for folder in folders:
            node = node.setdefault(folder, {})  # type: ignore[assignment]
        node[name] = root / path
    return _hash_tree(top).hex()


def _hash_tree(node: dict[bytes, object]) -> bytes:
    entries = []
    for name, value in node.items():
        if isinstance(value, dict):
            entries.append((name + b"/", b"40000 " + name + b"\0" + _hash_tree(value)))
            continue
        assert isinstance(value, Path)
        if value.is_symlink():
            mode, content = b"120000", os.fsencode(os.readlink(value))
        else:
            executable = value.stat().st_mode & 0o100
            mode, content = (b"100755" if executable else b"100644"), value.read_bytes()
        entries.append((name, mode + b" " + name + b"\0" + _object_id(b"blob", content)))
    return _object_id(b"tree", b"".join(entry for _, entry in sorted(entries)))


def _object_id(kind: bytes, content: bytes) -> bytes:
    return hashlib.sha1(kind + b" %d\0" % len(content) + content).digest()
