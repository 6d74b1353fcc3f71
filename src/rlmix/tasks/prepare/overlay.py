"""Looks through everything else in an image for copies of the fix, and says how each is removed.

The image itself is never changed: `overlay/` holds files that replace its own, and `.wh.NAME` files
(as in OCI layers) where something has to go.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.sandbox.layers import mark_hidden
from rlmix.tasks.prepare.image import is_git_data, is_git_folder, plain_file, resolve
from rlmix.tasks.prepare.lines import Find, find_lines
from rlmix.tasks.prepare.worktree import walk

PACKAGE_CACHES = (
    ".cache/", "/pkgs/", "_cacache/", "/.m2/", "/.gradle/", "/.cargo/registry/", "pkg/mod/cache/",
    "/.npm/", "/.yarn/", "pnpm-store/", "/wheels/", "/.ivy2/", "/.nuget/", "/.gem/", "/tmp/",
    "/.bundle/cache/",
)  # fmt: skip
"""Parts of paths below which a file can go without breaking a build that works offline."""
INSTALLED = ("site-packages/", "dist-packages/")
SKIPPED_TOPS = frozenset({"proc", "sys", "dev", "run"})


class Unproven(DataError):
    """A copy of the fix stands where it can be neither removed nor replaced."""


def clean_tree(repo: Path, lines: tuple[bytes, ...], tracked: frozenset[str]) -> list[str]:
    """Replace copies of the fix among the kept, ignored files of `repo` by the base's own file.

    Args:
        tracked: paths that the base records; nobody put the fix into an archive among them.

    Returns:
        Paths that were changed.

    Raises:
        Unproven: a file holds a telling line and is no copy of a base file.
    """
    changed = []
    files = [(p, repo / p) for p, e in walk(repo) if e.is_file(follow_symlinks=False)]
    for find in find_lines(files, lines):
        if find.is_unread and find.path in tracked:
            continue
        own = counterpart(repo, find.path)
        if own is None or find.member or find.is_unread:
            raise Unproven(find.sentence())
        shutil.copyfile(own, repo / find.path)
        changed.append(find.path)
    return changed


def counterpart(repo: Path, path: str) -> Path | None:
    """The file of the base that `path` looks like an installed or built copy of: the longest end
    of the path, of two parts or more, that the repository has."""
    parts = path.split("/")
    for start in range(1, len(parts) - 1):
        tail = "/".join(parts[start:])
        for prefix in ("", "src/", "lib/", "python/"):
            own = plain_file(repo, f"{prefix}{tail}")
            if own is not None and f"{prefix}{tail}" != path:
                return own
    return None


def make_overlay(
    rootfs: Path,
    workdir: Path,
    repo: Path,
    overlay: Path,
    lines: tuple[bytes, ...],
    *,
    gone: tuple[str, ...] = (),
    is_fix_known: bool,
) -> list[str]:
    """Fill `overlay` so that the image on which it lies holds no copy of the fix.

    Args:
        workdir: the image's own repository, below `rootfs`.
        gone: absolute paths of the image that must not be seen (hidden tests, verdicts).
        is_fix_known: False: installed copies of the project are replaced by the base's files
            wherever they differ, because nobody can say which lines tell.

    Returns:
        Absolute paths that are removed or replaced.

    Raises:
        Unproven: a copy that can be neither.
    """
    done: list[str] = []
    inside = workdir.relative_to(rootfs).as_posix()
    for path in gone:
        for follow_last in (False, True):  # A link, and what it leads to.
            place = resolve(rootfs, path, follow_last=follow_last)
            if not os.path.lexists(place):
                continue
            if place == rootfs or workdir.is_relative_to(place):
                raise Unproven(f"{path} of the image is above its repository and must be hidden")
            if not place.is_relative_to(workdir):
                done.append(_whiteout(overlay, rootfs, f"/{place.relative_to(rootfs).as_posix()}"))
    files: list[tuple[str, Path]] = []
    for path, _entry in _walk_image(rootfs, inside):
        if f"/{path}" in done:
            continue
        place = rootfs / path
        if is_git_folder(place) or (entry_is_file(place) and is_git_data(path, place)):
            done.append(_whiteout(overlay, rootfs, f"/{path}"))
        elif entry_is_file(place):
            files.append((path, place))
    found = [find for find in find_lines(files, lines) if not _below(done, find.path)]
    for find in found:
        done += _remove_or_replace(find, rootfs, repo, overlay)
    if not is_fix_known:
        done += _replace_installed(files, rootfs, repo, overlay, set(done))
    return sorted(set(done))


def entry_is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _below(done: list[str], path: str) -> bool:
    return any(f"/{path}".startswith(f"{folder}/") for folder in done)


def _walk_image(rootfs: Path, inside: str) -> Iterator[tuple[str, object]]:
    """Everything but the repository and the kernel's file systems."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        for child in sorted((rootfs / folder).iterdir()):
            path = f"{folder}/{child.name}" if folder else child.name
            if path == inside or (not folder and child.name in SKIPPED_TOPS):
                continue
            yield path, child
            if child.is_dir() and not child.is_symlink() and not is_git_folder(child):
                waiting.append(path)


def _remove_or_replace(find: Find, rootfs: Path, repo: Path, overlay: Path) -> list[str]:
    path = find.path
    done = []
    own = None if find.member or find.is_unread else counterpart(repo, path)
    if own is not None:
        target = overlay / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own, target)
        done.append(f"/{path}")
        done += _bytecode_of(path, rootfs, overlay)
    elif any(part in f"/{path}" for part in PACKAGE_CACHES):
        done.append(_whiteout(overlay, rootfs, f"/{path}"))
    else:
        raise Unproven(f"/{find.sentence()}")
    return done


def _replace_installed(
    files: list[tuple[str, Path]], rootfs: Path, repo: Path, overlay: Path, done: set[str]
) -> list[str]:
    more = []
    for path, file in files:
        folder = next((name for name in INSTALLED if name in path), "")
        if not folder or f"/{path}" in done or file.suffix != ".py":
            continue
        tail = path.rpartition(folder)[2]
        package = tail.partition("/")[0]
        for prefix in ("", "src/", "lib/"):
            own = plain_file(repo, f"{prefix}{tail}")
            is_own = plain_file(repo, f"{prefix}{package}/__init__.py") is not None
            if is_own and own is not None and own.read_bytes() != file.read_bytes():
                target = overlay / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(own, target)
                more += [f"/{path}", *_bytecode_of(path, rootfs, overlay)]
                break
    return more


def _bytecode_of(path: str, rootfs: Path, overlay: Path) -> list[str]:
    """Compiled forms of a Python file: they keep what the file no longer says."""
    file = rootfs / path
    stem = file.name.removesuffix(".py")
    compiled = (file.parent / "__pycache__").glob(f"{stem}.*.pyc")
    return [
        _whiteout(overlay, rootfs, f"/{one.relative_to(rootfs).as_posix()}")
        for one in sorted(compiled)
    ]


def _whiteout(overlay: Path, rootfs: Path, path: str) -> str:
    place = rootfs / path.strip("/")
    mark_hidden(overlay, path, is_folder=place.is_dir() and not place.is_symlink())
    return path
