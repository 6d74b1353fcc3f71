"""What lies on top of a task's image: an `overlay` folder, written by preparation, mounted here.

The folder holds files that replace the image's own, and `.wh.NAME` marks (as in OCI layers) where a
file or folder must not be seen. A mark says in its content which of the two it hides.

Invariant: an image is never changed; what must not be seen is covered by an empty file or folder
that nobody can write to.
"""

import csv
import io
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmix.core.errors import SandboxError

MARK = ".wh."
IS_FILE, IS_FOLDER, IS_LINK = "file", "folder", "link"
MAX_MOUNTS = 2500
"""bubblewrap takes 9000 words; a mount is three."""
OWN_TOPS = frozenset({"proc", "sys", "dev", "run", "tmp"})
"""Of every sandbox its own; nothing of an image is seen there."""
UNSEEN_TOPS = OWN_TOPS - {"run"}
"""An engine's containers see an image's /run."""
EMPTY_FILE, EMPTY_FOLDER = "empty", "nothing"
"""Of the shared files; they cover what must not be seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One path of an image that is seen otherwise."""

    path: str
    """Absolute in the image."""
    source: Path | None
    """The file that replaces it; None: nothing is seen."""
    is_folder: bool = False


def mark_hidden(overlay: Path, path: str, *, kind: str) -> None:
    """Say in `overlay` that `path` (absolute in the image) must not be seen.

    Args:
        kind: IS_FILE, IS_FOLDER or IS_LINK; nothing is mounted over a link, since a mount would go
            to where it leads, which has a mark of its own.
    """
    target = overlay / path.strip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = target.parent / f"{MARK}{target.name}"
    mark.write_text(kind)


def changes_in(overlay: Path) -> tuple[Change, ...]:
    """All changes, sorted by path; none below a folder that is hidden as a whole, and none in
    folders that every sandbox has of its own."""
    found: list[Change] = []
    if not overlay.is_dir():
        return ()
    for folder, names, files in os.walk(overlay):
        names.sort()
        inside = Path(folder).relative_to(overlay)
        if inside.parts and inside.parts[0] in UNSEEN_TOPS:
            continue
        for name in sorted(files):
            file = Path(folder, name)
            if not name.startswith(MARK):
                found.append(Change(path=f"/{(inside / name).as_posix()}", source=file))
                continue
            path = f"/{(inside / name.removeprefix(MARK)).as_posix()}"
            kind = file.read_text()
            if kind != IS_LINK and path.strip("/").partition("/")[0] not in UNSEEN_TOPS:
                found.append(Change(path=path, source=None, is_folder=kind == IS_FOLDER))
    hidden = [f"{one.path}/" for one in found if one.is_folder]
    kept = [one for one in found if not one.path.startswith(tuple(hidden))]
    return tuple(sorted(kept, key=lambda one: one.path))


def engine_mounts(changes: tuple[Change, ...], *, overlay: str, static: str) -> Iterator[str]:
    """Options of Docker, Podman and Apptainer, two words each.

    Args:
        overlay, static: folder of the changes and of the shared files, on the engine's machine.
    """
    for one in changes:
        if one.source is None and one.is_folder:
            source = f"{static}/{EMPTY_FOLDER}"
        elif one.source is None:
            source = f"{static}/{EMPTY_FILE}"
        else:
            source = f"{overlay}{one.path}"
        yield from ("--mount", _fields("type=bind", f"source={source}", f"target={one.path}"))


def _fields(*fields: str) -> str:
    """The form of `--mount`: a line of CSV, so that commas and quotes in names survive."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow((*fields, "ro"))
    return line.getvalue()


def image_arguments(
    rootfs: Path, seen_as: str, own: tuple[str, ...], *, must_be_public: bool
) -> list[str]:
    """bubblewrap's options for the files of an unpacked image, read-only.

    Args:
        rootfs: the image as this process finds it.
        seen_as: the same folder as the sandbox's starter finds it.
        own: absolute paths that get a mount of their own afterwards. A folder on the way to one
            that the image lacks is made of its parts, since nothing can be made in the image.
        must_be_public: the starter has another user id, which cannot enter a private folder;
            nothing of such a folder could be read inside either.

    Raises:
        SandboxError: the image cannot be entered, or holds no shell.
    """
    try:
        rootfs.stat()
        is_open = not must_be_public or _is_public(rootfs)
    except OSError as error:
        raise SandboxError(f"sandbox: the unpacked image {rootfs}: {error}") from None
    if not is_open:
        raise SandboxError(
            f"sandbox: the unpacked image {rootfs} is private; `chmod 755` it, because sandboxes "
            "run as a user of their own"
        )
    if not any((rootfs / place).exists() for place in ("bin/bash", "usr/bin/bash")):
        raise SandboxError(f"sandbox: the unpacked image {rootfs} has no /bin/bash")
    return list(_mounts(rootfs, "", seen_as, own, must_be_public))


def _mounts(
    rootfs: Path, folder: str, seen_as: str, own: tuple[str, ...], must_be_public: bool
) -> Iterator[str]:
    for child in sorted((rootfs / folder).iterdir()):
        path = f"{folder}/{child.name}" if folder else child.name
        inside = f"/{path}"
        if not folder and child.name in OWN_TOPS:
            continue
        mode = child.lstat().st_mode
        if stat.S_ISLNK(mode):
            yield from ("--symlink", os.readlink(child), inside)
        elif stat.S_ISDIR(mode):
            if must_be_public and not _is_public(child):
                yield from ("--dir", inside)
                continue
            below = [one for one in own if one.startswith(f"{inside}/")]
            if inside in own:
                continue
            if all((rootfs / one.strip("/")).is_dir() for one in below):
                yield from ("--ro-bind", f"{seen_as}/{path}", inside)
            else:
                yield from ("--dir", inside)
                yield from _mounts(rootfs, path, seen_as, own, must_be_public)
        elif stat.S_ISREG(mode):
            yield from ("--ro-bind", f"{seen_as}/{path}", inside)


def _is_public(folder: Path) -> bool:
    try:
        return folder.stat().st_mode & 0o005 == 0o005
    except FileNotFoundError:
        return True  # Made by the sandbox.


def reachable(changes: tuple[Change, ...], rootfs: Path) -> tuple[Change, ...]:
    """Changes that another user can come to; below a private folder nothing is seen, and nothing
    can be mounted.

    Raises:
        SandboxError: more than a command line can name.
    """
    found = tuple(
        one
        for one in changes
        if all(_is_public(rootfs / place) for place in list(Path(one.path[1:]).parents)[:-1])
    )
    if len(found) > MAX_MOUNTS:
        raise SandboxError(
            f"sandbox: {len(found)} paths of the unpacked image {rootfs} are seen otherwise; "
            f"allowed: {MAX_MOUNTS}"
        )
    return found


def bubblewrap_mounts(changes: tuple[Change, ...], *, overlay: str, static: str) -> Iterator[str]:
    """bubblewrap's options for the changes, after the image's own files are in place."""
    for one in changes:
        if one.source is not None:
            yield from ("--ro-bind", f"{overlay}{one.path}", one.path)
        elif one.is_folder:
            yield from ("--ro-bind", f"{static}/{EMPTY_FOLDER}", one.path)
        else:
            yield from ("--ro-bind", f"{static}/{EMPTY_FILE}", one.path)
