"""Looks through everything else in an image for copies of the fix, and says how each is removed.

The image itself is never changed: `overlay/` holds files that replace its own, and `.wh.NAME` files
(as in OCI layers) where something has to go.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.tasks.prepare.lines import Find, find_lines
from rlmix.tasks.prepare.worktree import walk

PACKAGE_CACHES = (
    ".cache/", "/pkgs/", "_cacache/", "/.m2/", "/.gradle/", "/.cargo/registry/", "pkg/mod/cache/",
    "/.npm/", "/.yarn/", "pnpm-store/", "/wheels/", "/.ivy2/", "/.nuget/", "/.gem/", "/tmp/",
    "/.bundle/cache/",
)  # fmt: skip
"""Parts of paths below which a file can go without breaking a build that works offline."""
SKIPPED_TOPS = frozenset({"proc", "sys", "dev", "run"})


class Unproven(DataError):
    """A copy of the fix stands where it can be neither removed nor replaced."""


def clean_tree(repo: Path, lines: tuple[bytes, ...]) -> list[str]:
    """Replace copies of the fix among the kept, ignored files of `repo` by the base's own file.

    Returns:
        Paths that were changed.

    Raises:
        Unproven: a file holds a telling line and is no copy of a base file.
    """
    changed = []
    files = [(p, repo / p) for p, e in walk(repo) if e.is_file(follow_symlinks=False)]
    for find in find_lines(files, lines):
        path = find.path.partition("!")[0]
        own = counterpart(repo, path)
        if own is None or "!" in find.path:
            raise Unproven(f"{find.path} holds a line of the fix or of a hidden test: {find.line}")
        shutil.copyfile(own, repo / path)
        changed.append(path)
    return changed


def counterpart(repo: Path, path: str) -> Path | None:
    """The file of the base that `path` looks like an installed or built copy of: the longest end
    of the path, of two parts or more, that the repository has."""
    parts = path.split("/")
    for start in range(1, len(parts) - 1):
        tail = "/".join(parts[start:])
        for prefix in ("", "src/", "lib/", "python/"):
            own = repo / f"{prefix}{tail}"
            if own.is_file() and not own.is_symlink() and f"{prefix}{tail}" != path:
                return own
    return None


def make_overlay(
    rootfs: Path,
    workdir: str,
    repo: Path,
    overlay: Path,
    lines: tuple[bytes, ...],
    *,
    gone: tuple[str, ...] = (),
    is_fix_known: bool,
) -> list[str]:
    """Fill `overlay` so that the image on which it lies holds no copy of the fix.

    Args:
        gone: absolute paths of the image that must not be seen (hidden tests, verdicts).
        is_fix_known: False: installed copies of the project are replaced by the base's files
            wherever they differ, because nobody can say which lines tell.

    Returns:
        Absolute paths that are removed or replaced.

    Raises:
        Unproven: a copy that can be neither.
    """
    done: list[str] = []
    inside = workdir.strip("/")
    for path in gone:
        if (rootfs / path.strip("/")).exists() and not f"{path}/".startswith(f"/{inside}/"):
            done.append(_whiteout(overlay, path))
    files: list[tuple[str, Path]] = []
    for path, _entry in _walk_image(rootfs, inside):
        if f"/{path}" in done:
            continue
        if _is_git_folder(rootfs / path, path):
            done.append(_whiteout(overlay, f"/{path}"))
        elif entry_is_file(rootfs / path):
            files.append((path, rootfs / path))
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
            if child.is_dir() and not child.is_symlink() and not _is_git_folder(child, path):
                waiting.append(path)


def _is_git_folder(place: Path, path: str) -> bool:
    """A git folder, bare ones and object stores for others included."""
    if not place.is_dir() or place.is_symlink():
        return path.rpartition("/")[2] == ".git" and place.is_file()
    is_store = (place / "pack").is_dir() and (place / "info").is_dir()
    return ((place / "objects").is_dir() and (place / "HEAD").is_file()) or is_store


def _remove_or_replace(find: Find, rootfs: Path, repo: Path, overlay: Path) -> list[str]:
    path = find.path.partition("!")[0]
    done = []
    own = None if "!" in find.path else counterpart(repo, path)
    if own is not None:
        target = overlay / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(own, target)
        done.append(f"/{path}")
        done += _bytecode_of(path, rootfs, overlay)
    elif any(part in f"/{path}" for part in PACKAGE_CACHES):
        done.append(_whiteout(overlay, f"/{path}"))
    else:
        raise Unproven(f"/{find.path} holds a line of the fix or of a hidden test: {find.line}")
    return done


def _replace_installed(
    files: list[tuple[str, Path]], rootfs: Path, repo: Path, overlay: Path, done: set[str]
) -> list[str]:
    more = []
    for path, file in files:
        if "site-packages/" not in path or f"/{path}" in done or file.suffix != ".py":
            continue
        tail = path.rpartition("site-packages/")[2]
        package = tail.partition("/")[0]
        for prefix in ("", "src/", "lib/"):
            own = repo / f"{prefix}{tail}"
            is_own = (repo / f"{prefix}{package}/__init__.py").is_file()
            if is_own and entry_is_file(own) and own.read_bytes() != file.read_bytes():
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
        _whiteout(overlay, f"/{one.relative_to(rootfs).as_posix()}") for one in sorted(compiled)
    ]


def _whiteout(overlay: Path, path: str) -> str:
    target = overlay / path.strip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    (target.parent / f".wh.{target.name}").touch()
    return path
