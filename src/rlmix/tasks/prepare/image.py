"""Paths of an unpacked image as its own programs would see them.

Invariant: nothing that an image says (a link, a `.git` file, an alternate) leads out of its folder,
so preparing a hostile one neither reads nor writes a file of this machine.
"""

import os
import re
import stat
import zlib
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.tasks.prepare.archives import is_zlib

MAX_LINKS = 40
_LOOSE = re.compile(r"(?:^|/)[0-9a-f]{2}/[0-9a-f]{38}$")
_PACKED = re.compile(r"(?:^|/)pack-[0-9a-f]{40}\.(?:pack|idx|rev)$")
_PACKS = (b"PACK\0\0\0\2", b"PACK\0\0\0\3", b"\377tOc")
_KINDS = (b"blob ", b"tree ", b"commit ", b"tag ")
OTHER_HISTORIES = frozenset({".hg", ".svn", ".bzr", ".jj", "_darcs", ".pijul", ".sl"})
"""Folders of Mercurial, Subversion and others; their stores pack file contents as git's do."""
_BUNDLE = (b"# v2 git bundle\n", b"# v3 git bundle\n")


def resolve(rootfs: Path, path: str, *, follow_last: bool = True) -> Path:
    """Where `path` (absolute in the image) lies below `rootfs`; it need not exist.

    Links are followed as a program with `rootfs` as its root would, `..` stops at that root.

    Raises:
        DataError: more links than any kernel follows.
    """
    waiting = [part for part in path.split("/") if part][::-1]
    here: list[str] = []
    links = 0
    while waiting:
        part = waiting.pop()
        if part == ".":
            continue
        if part == "..":
            here = here[:-1]
            continue
        place = rootfs.joinpath(*here, part)
        if place.is_symlink() and (waiting or follow_last):
            links += 1
            if links > MAX_LINKS:
                raise DataError(f"the image's path {path} is a loop of links")
            target = os.readlink(place)
            if target.startswith("/"):
                here = []
            waiting += [inner for inner in target.split("/") if inner][::-1]
            continue
        here.append(part)
    return rootfs.joinpath(*here)


def plain_file(root: Path, path: str) -> Path | None:
    """The regular file `path` below `root`; None when it or a folder above it is anything else."""
    here = root
    *folders, name = path.split("/")
    for part in folders:
        here = here / part
        if not _is(here, stat.S_ISDIR):
            return None
    return here / name if _is(here / name, stat.S_ISREG) else None


def _is(path: Path, kind: object) -> bool:
    try:
        return bool(kind(path.lstat().st_mode))  # type: ignore[operator]
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_git_folder(place: Path) -> bool:
    """A git folder (bare too), an object store for others, the `.git` file of a worktree, or the
    folder of another version control."""
    if place.is_symlink():
        return False
    if place.name in OTHER_HISTORIES and place.is_dir():
        return True
    if not place.is_dir():
        return place.name == ".git" and place.is_file()
    if (place / "objects").is_dir() and os.path.lexists(place / "HEAD"):
        return True
    pack = place / "pack"
    return pack.is_dir() and not pack.is_symlink() and any(pack.glob("pack-*.idx"))


def is_git_data(path: str, file: Path) -> bool:
    """A loose object, a pack or a bundle, by its place or by how it begins."""
    if _LOOSE.search(path) or _PACKED.search(path):
        return True
    with file.open("rb") as stream:
        start = stream.read(64)
    if start[:16] in _BUNDLE or start.startswith(_PACKS):
        return True
    if not is_zlib(start):
        return False
    try:
        return zlib.decompressobj().decompress(start, 16).startswith(_KINDS)
    except zlib.error:
        return False


def has_programs(rootfs: Path) -> bool:
    """Whether commands can run in the image: it holds a shell.

    Raises:
        DataError: it has a shell and no git, which every sandbox records diffs with.
    """
    tops = ("bin", "usr/bin", "usr/local/bin")

    def has(name: str) -> bool:
        return any(resolve(rootfs, f"{top}/{name}").is_file() for top in tops)

    if not has("bash"):
        return False
    if not has("git"):
        raise DataError("the image has no git, which sandboxes record the diff with")
    return True


def git_dir_of(rootfs: Path, workdir: Path) -> Path:
    """The git folder of a work tree; a `.git` file (worktree, submodule) is followed once.

    Raises:
        DataError: there is none in the image.
    """
    inside = workdir.relative_to(rootfs).as_posix()
    place = resolve(rootfs, f"{inside}/.git")
    if place.is_file():
        text = place.read_text(errors="replace").strip().removeprefix("gitdir:").strip()
        place = _named(rootfs, place.parent, text)
    if not place.is_dir():
        raise DataError(f"no git folder in {workdir}")
    return place


def git_environment(rootfs: Path, workdir: Path, git_dir: Path) -> dict[str, str]:
    """What makes git read this repository and nothing outside of the image.

    Raises:
        DataError: the git folder points out of the image.
    """
    env = {"GIT_DIR": str(git_dir), "GIT_WORK_TREE": str(workdir)}
    common = git_dir
    if (git_dir / "commondir").is_file():
        text = (git_dir / "commondir").read_text(errors="replace").strip()
        common = _named(rootfs, git_dir, text)
        env["GIT_COMMON_DIR"] = str(common)
    stores = [common / "objects"]
    for folder in dict.fromkeys((git_dir, common)):
        _check_links(rootfs, folder)
    for store in stores:  # Grows while it is gone through.
        alternates = store / "info/alternates"
        lines = alternates.read_bytes().splitlines() if alternates.is_file() else []
        for line in lines:
            text = os.fsdecode(line)
            if not text or text.startswith("#"):
                continue
            place = _named(rootfs, store, text)
            if _leads_out(rootfs, store / text):
                raise DataError(f"the git folder takes objects from {text}, outside of the image")
            if place.is_dir() and place not in stores:
                _check_links(rootfs, place)
                stores.append(place)
    if len(stores) > 1:
        env["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = ":".join(map(str, stores[1:]))
    return env


def _named(rootfs: Path, folder: Path, text: str) -> Path:
    """A path that a file in `folder` names: the image's own, or one of the folder it lies in."""
    if text.startswith("/"):
        if Path(text).is_relative_to(rootfs):
            text = "/" + Path(text).relative_to(rootfs).as_posix()
        return resolve(rootfs, text)
    return resolve(rootfs, f"{folder.relative_to(rootfs).as_posix()}/{text}")


def _leads_out(rootfs: Path, place: Path) -> bool:
    """Whether git, which runs on this machine, would find something outside of the image there."""
    real = os.path.realpath(place)
    return os.path.exists(real) and not Path(real).is_relative_to(rootfs.resolve())


def _check_links(rootfs: Path, folder: Path) -> None:
    for here, folders, files in os.walk(folder):
        for name in (*folders, *files):
            place = Path(here, name)
            if place.is_symlink() and _leads_out(rootfs, place):
                raise DataError(f"the git folder's {name} is a link out of the image")
