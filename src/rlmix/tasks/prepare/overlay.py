"""Looks through everything else in an image for copies of the fix, and says how each is removed.

The image itself is never changed: `overlay/` holds files that replace its own, and `.wh.NAME` files
(as in OCI layers) where something has to go.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.sandbox.layers import IS_FILE, IS_FOLDER, IS_LINK, mark_hidden
from rlmix.tasks.prepare.archives import holds
from rlmix.tasks.prepare.bytecode import stale_bytecode
from rlmix.tasks.prepare.copies import is_leftover, near_copies
from rlmix.tasks.prepare.image import is_git_data, is_git_folder, plain_file, resolve
from rlmix.tasks.prepare.lines import Find, find_lines
from rlmix.tasks.prepare.worktree import check_depth, names_of, walk

PACKAGE_CACHES = (
    ".cache/", "/pkgs/", "_cacache/", "/.m2/", "/.gradle/", "/.cargo/registry/", "pkg/mod/cache/",
    "/.npm/", "/.yarn/", "pnpm-store/", "/wheels/", "/.ivy2/", "/.nuget/", "/.gem/", "/tmp/",
    "/.bundle/cache/", "/var/cache/", "/var/lib/apt/lists/",
)  # fmt: skip
"""Parts of paths below which a file can go without breaking a build that works offline."""
INSTALLED = ("site-packages/", "dist-packages/")
SKIPPED_TOPS = frozenset({"proc", "sys", "dev"})
"""Of every sandbox its own, whatever backend makes it."""
HISTORIES = (
    ".bash_history", ".zsh_history", ".python_history", ".viminfo", ".lesshst", ".git-credentials",
    ".wget-hsts", ".node_repl_history",
)  # fmt: skip
"""What was typed while the image was made: commit ids, addresses, commands that fetch the fix."""
DOWNLOADS = ("/.cache/pip/", "/.cache/uv/", "/.npm/_cacache/", "/.cache/yarn/", "/.cache/pypoetry/")
"""Caches of what was downloaded, which nothing needs offline. They go whole where the fix is not
known by its lines, because a later release of the project cannot be told from others there."""


class Unproven(DataError):
    """A copy of the fix stands where it can be neither removed nor replaced."""


def clean_tree(
    repo: Path, lines: tuple[bytes, ...], tracked: frozenset[str], *, untold: frozenset[str] | None
) -> list[str]:
    """Replace copies of the fix among the kept, ignored files of `repo` by the base's own file.

    Args:
        tracked: paths that the base records; nobody put the fix into an archive among them.
        untold: paths that the fix changes without a telling line; None where it is unknown, which
            makes that all of them. Near copies of these are treated as copies of the fix.

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
    if untold != frozenset() and tracked:
        own_files = [(path, file) for path, file in files if path in tracked]
        others = [(path, file) for path, file in files if path not in tracked]
        for copy in list(near_copies(others, own_files, of=untold)):
            if counterpart(repo, copy.path) != repo / copy.original:
                raise Unproven(copy.sentence())
            shutil.copyfile(repo / copy.original, repo / copy.path)
            changed.append(copy.path)
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
    untold: frozenset[str] | None,
    tracked: frozenset[str] = frozenset(),
    touched: frozenset[str] = frozenset(),
) -> list[str]:
    """Fill `overlay` so that the image on which it lies holds no copy of the fix.

    Args:
        workdir: the image's own repository, below `rootfs`.
        gone: absolute paths of the image that must not be seen (hidden tests, verdicts).
        untold: paths that the fix changes without a telling line; None where it is unknown, which
            makes that all of them. Installed copies of these are replaced by the base's files
            wherever they differ, and near copies elsewhere are not accepted.
        tracked: paths that the base records.
        touched: those that the fix changes; none where it is unknown.

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
        if lines and any(holds(name, lines) for name in names_of(place.name, place)):
            raise Unproven(f"the name or link /{path} holds a line of the fix or of a hidden test")
        if _goes(path, place):
            done.append(_whiteout(overlay, rootfs, f"/{path}"))
        elif entry_is_file(place):
            files.append((path, place))
    found = [find for find in find_lines(files, lines) if not _below(done, find.path)]
    for find in found:
        done += _remove_or_replace(find, rootfs, repo, overlay)
    if untold != frozenset():
        done += _replace_installed(files, rootfs, repo, overlay, set(done), untold)
        done += _hide_copies(files, rootfs, repo, overlay, set(done), tracked, untold)
    hidden = set(done)
    for path, has_source in stale_bytecode(files, touched or tracked):
        if f"/{path}" in hidden:
            continue
        if not has_source and "__pycache__/" not in path:
            raise Unproven(f"/{path} is bytecode without its source, of a file that may be fixed")
        done.append(_whiteout(overlay, rootfs, f"/{path}"))
    return sorted(set(done))


def _goes(path: str, place: Path) -> bool:
    """Nothing needs it to build, and nobody can look through it, or it tells of how it was made."""
    if is_git_folder(place):
        return True
    return entry_is_file(place) and (place.name in HISTORIES or is_git_data(path, place))


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
            check_depth(path)
            yield path, child
            if child.is_dir() and not child.is_symlink() and not is_git_folder(child):
                waiting.append(path)


def _remove_or_replace(find: Find, rootfs: Path, repo: Path, overlay: Path) -> list[str]:
    path = find.path
    done = []
    own = None if find.member or find.is_unread else counterpart(repo, path)
    if own is not None:
        _replace(rootfs, path, own, overlay)
        done.append(f"/{path}")
        done += _bytecode_of(path, rootfs, overlay)
    elif is_leftover(path) or any(part in f"/{path}" for part in PACKAGE_CACHES):
        done.append(_whiteout(overlay, rootfs, f"/{path}"))
    else:
        raise Unproven(f"/{find.sentence()}")
    return done


def _replace(rootfs: Path, path: str, own: Path, overlay: Path) -> None:
    """Content of the base's file, mode of the image's."""
    target = overlay / path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(own, target)
    target.chmod((rootfs / path).stat().st_mode & 0o777)


def _replace_installed(
    files: list[tuple[str, Path]],
    rootfs: Path,
    repo: Path,
    overlay: Path,
    done: set[str],
    untold: frozenset[str] | None,
) -> list[str]:
    more = []
    for path, file in files:
        folder = next((name for name in INSTALLED if name in path), "")
        if not folder or f"/{path}" in done or file.suffix != ".py":
            continue
        tail = path.rpartition(folder)[2]
        package = tail.partition("/")[0]
        for prefix in ("", "src/", "lib/"):
            if untold is not None and f"{prefix}{tail}" not in untold:
                continue
            own = plain_file(repo, f"{prefix}{tail}")
            is_own = plain_file(repo, f"{prefix}{package}/__init__.py") is not None
            if is_own and own is not None and own.read_bytes() != file.read_bytes():
                _replace(rootfs, path, own, overlay)
                more += [f"/{path}", *_bytecode_of(path, rootfs, overlay)]
                break
    return more


def _hide_copies(
    files: list[tuple[str, Path]],
    rootfs: Path,
    repo: Path,
    overlay: Path,
    done: set[str],
    tracked: frozenset[str],
    untold: frozenset[str] | None,
) -> list[str]:
    more = [_whiteout(overlay, rootfs, folder) for folder in sorted(_downloads(files))]
    left = [
        (path, file) for path, file in files if f"/{path}" not in done and not _below(more, path)
    ]
    own = [(p, file) for p in sorted(tracked) if (file := plain_file(repo, p)) is not None]
    for copy in near_copies(left, own, of=untold):
        if is_leftover(copy.path) or any(part in f"/{copy.path}" for part in PACKAGE_CACHES):
            more.append(_whiteout(overlay, rootfs, f"/{copy.path}"))
        else:
            raise Unproven(f"/{copy.sentence()}")
    return more


def _downloads(files: list[tuple[str, Path]]) -> set[str]:
    """Folders of DOWNLOADS that the image has, to be hidden as a whole."""
    found = set()
    for path, _ in files:
        for part in DOWNLOADS:
            at = f"/{path}".find(part)
            if at >= 0:
                found.add(f"/{path}"[: at + len(part) - 1])
    return found


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
    kind = IS_FOLDER if place.is_dir() else IS_FILE
    mark_hidden(overlay, path, kind=IS_LINK if place.is_symlink() else kind)
    return path
