"""Which files a process of the `weak` backend may touch: rules for Linux's Landlock.

Landlock needs no privilege and no namespace. It does not hide what it refuses (names, sizes and
modes stay visible) and knows nothing of processes, memory or older kinds of sockets; the system
call filter, the limits and the supervisor cover those.

Invariant: what no rule names cannot be read, run, written, made or removed.
"""

import ctypes
from pathlib import Path

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
LOOK = READ_FILE | READ_DIR
RUN = LOOK | EXECUTE
DEVICE = READ_FILE | WRITE_FILE | IOCTL_DEV
_TCP = 0b11
_SCOPES = 0b11
"""Abstract Unix sockets and signals."""
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
_ALL_FILE_RIGHTS = 16
MIN_ABI = 3
"""Linux 6.2: before it, files that may not be written could still be cut to nothing."""
SCOPES_FROM_ABI = 6
"""Linux 6.12: signals stay inside."""
_ABI_WITH_TCP = 4
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_ETC = (
    *("passwd", "group", "nsswitch.conf", "hosts", "ld.so.cache", "localtime", "alternatives"),
    *("ssl/certs", "ssl/openssl.cnf", "mime.types", "protocols", "services"),
)
_DEVICES = ("null", "zero", "full", "random", "urandom")
_SYS_CREATE_RULESET, _VERSION_FLAG = 444, 1


def abi() -> int:
    """The version of Landlock that this kernel has in force; 0 when it has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    return max(0, libc.syscall(_SYS_CREATE_RULESET, None, 0, _VERSION_FLAG))


def file_rights(version: int) -> int:
    return (1 << _NUM_FILE_RIGHTS.get(version, _ALL_FILE_RIGHTS)) - 1


def rules(
    *, version: int, writable: list[str], readable: list[str], prefix: str
) -> dict[str, object]:
    """The whole rule set as `confine.restrict_files` takes it.

    Args:
        version: of Landlock, at least `MIN_ABI`.
        writable: folders of the sandbox's own.
        readable: folders that are read and run from, beside the system's.
        prefix: of the interpreter; its installed packages are left out.
    """
    handled = file_rights(version)
    size, tcp, scopes = 8, 0, 0
    if version >= _ABI_WITH_TCP:
        size, tcp = 16, _TCP
    if version >= SCOPES_FROM_ABI:
        size, scopes = 24, _SCOPES
    paths = [(path, RUN) for path in (*_SYSTEM, *readable)]
    paths += [(f"/etc/{name}", LOOK) for name in _ETC]
    paths += [(f"/dev/{name}", DEVICE & handled) for name in _DEVICES]
    paths += [("/dev/fd", LOOK), ("/proc", LOOK)]
    if not prefix.startswith("/usr"):
        paths += interpreter_rules(Path(prefix))
    paths += [(path, handled) for path in writable]
    return {"handled": (handled, tcp, scopes), "size": size, "paths": paths}


def interpreter_rules(prefix: Path) -> list[tuple[str, int]]:
    """The interpreter and its standard library; importing lists a folder, so names are shown."""
    found = [(str(prefix), READ_DIR)]
    for entry in prefix.iterdir():
        if entry.name != "lib":
            found.append((str(entry), RUN))
    for entry in (prefix / "lib").iterdir():
        if not (entry.name.startswith("python3.") and entry.is_dir()):
            found.append((str(entry), RUN))
            continue
        found += [(str(part), RUN) for part in entry.iterdir() if part.name != "site-packages"]
    return found
