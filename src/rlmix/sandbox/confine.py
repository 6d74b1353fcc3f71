"""What a forked child of the launcher does to itself before it runs anything of a model's.

Standard library only, loaded by path: the launcher is a script that imports nothing of rlmix.

Invariant: every step either took effect or raised; a child that raised runs nothing.
"""

import contextlib
import ctypes
import os
import resource
import signal
import stat
import struct
import time

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
SECCOMP_MODE_FILTER = 2
SYS_CAPSET = {"x86_64": 126, "aarch64": 91, "riscv64": 91}
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_RULE_PATH = 1
FILE_RIGHTS = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14 | 1 << 15
"""Run, write, read, cut, talk to a device."""
_END_S = 5.0

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def die_with_parent() -> None:
    """To be said again after each change of user id, which makes the kernel forget it."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def join_groups(files: list[str]) -> None:
    """Move this process into control groups, before it gives up the right to."""
    for path in files:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"0")
        finally:
            os.close(fd)


def remove_empty_groups(folders: list[str]) -> None:
    """Remove these groups and those in them, once whoever was in them is gone."""
    deadline_s = time.monotonic() + _END_S
    while folders and time.monotonic() < deadline_s:
        for folder in folders:
            with contextlib.suppress(OSError):
                for entry in [one.path for one in os.scandir(folder) if one.is_dir()]:
                    with contextlib.suppress(OSError):
                        os.rmdir(entry)
                os.rmdir(folder)
        folders = [folder for folder in folders if os.path.isdir(folder)]
        time.sleep(0.01)


def set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def take_uid(uid: int | None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)


def drop_rights() -> None:
    """Give up every capability for good, as bubblewrap's own child does."""
    no_new_rights()
    check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0), "ambient capabilities")
    bound_capabilities()
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    number = SYS_CAPSET[os.uname().machine]
    check(libc.syscall(number, header, nothing), "capset")


def hide_memory() -> None:
    """Others of this user id can no longer open this process's memory; a program it starts is
    open again."""
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def bound_capabilities() -> None:
    """No program can hand out a capability from here on; only a process with rights can say so."""
    for number in range(64):
        if libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break


def no_new_rights() -> None:
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def name_process(program: bytes, placeholder: int, pid: int) -> bytes:
    """A filter that protects a process whose number was not known when it was built."""
    for sign in (1, -1):
        old, new = (struct.pack("<I", sign * one & 0xFFFFFFFF) for one in (placeholder, pid))
        program = program.replace(old, new)
    return program


def load_filter(program: bytes) -> None:
    """Install a system call filter; needs no_new_privs or a capability."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0), "seccomp filter")


def filter_descriptor(program: bytes, fd: int) -> None:
    """Offer the filter at descriptor `fd` of this process, for a program that reads it there."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, program)  # Far below what a pipe holds.
    os.close(write_fd)
    if read_fd == fd:
        os.set_inheritable(fd, True)
    else:
        os.dup2(read_fd, fd)
        os.close(read_fd)


def restrict_files(rules: dict) -> None:
    """Landlock: from here on only the listed paths exist for reading, running or writing.

    Args:
        rules: `handled` (ints: file rights, network rights, scopes), and `paths`, pairs of a path
            and the rights below it. A path that does not exist is passed over.
    """
    handled = struct.pack("QQQ", *rules["handled"])
    ruleset = check(
        libc.syscall(SYS_LANDLOCK_CREATE, handled, rules["size"], 0), "landlock_create_ruleset"
    )
    for path, rights in rules["paths"]:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            rights &= FILE_RIGHTS  # The others mean something for folders only.
        attributes = struct.pack("=Qi", rights, fd)
        added = libc.syscall(SYS_LANDLOCK_ADD, ruleset, LANDLOCK_RULE_PATH, attributes, 0)
        check(added, f"landlock_add_rule {path}")
        os.close(fd)
    check(libc.syscall(SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    os.close(ruleset)


def must_not_signal(pid: int) -> None:
    """Raise when this process may signal `pid`, which its "kill all" would then reach as well."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return
    raise OSError(f"process {pid} outside can be signalled")


def become_subreaper() -> None:
    """Orphans below come to this process instead of leaving for the machine's first one."""
    check(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper")


def supervise(child: int) -> int:
    """Wait for `child`; when it ended, or on SIGTERM, end everything that came of it.

    The caller must be a subreaper, so that nothing below can leave: whoever loses its parent
    becomes this process's child.
    """

    def stop(*_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGTERM, stop)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    end_descendants()
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def end_descendants() -> None:
    """Kill every process below this one: first stop them all, so that none forks away."""
    deadline_s = time.monotonic() + _END_S
    while time.monotonic() < deadline_s:
        stopped: set[int] = set()
        while fresh := descendants(os.getpid()) - stopped:
            _signal_all(fresh, signal.SIGSTOP)
            stopped |= fresh
        if not stopped:
            return
        _signal_all(stopped, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def descendants(root: int) -> set[int]:
    """Every process below `root`, ended ones that nobody waited for excepted."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, IndexError):
                with open(f"/proc/{entry}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X") or int(entry) == root:
                    children.setdefault(int(fields[1]), []).append(int(entry))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), []):
            if pid not in found:
                found.add(pid)
                waiting.append(pid)
    return found


def _signal_all(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
