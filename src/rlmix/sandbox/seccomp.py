"""The system calls that no command of a model needs, refused by the kernel: a classic BPF program.

Written by hand so that nothing has to be installed. A list of what is refused, not of what is
allowed: compilers, test runners and servers of any language must work, mounting, tracing, kernel
keys, kernel programs, io_uring, odd socket families and new namespaces must not.

Invariant: a call that the list does not know because it is newer than the list is "not
implemented", and a program of another architecture (32-bit, x32) is ended.
"""

import os
import struct
from dataclasses import dataclass

from rlmix.core.errors import SandboxError

ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
EPERM, EAFNOSUPPORT, ENOSYS = 1, 97, 38

_LOAD_WORD, _AND, _RETURN = 0x20, 0x54, 0x06
_JUMP_EQUAL, _JUMP_GREATER, _JUMP_AT_LEAST = 0x15, 0x25, 0x35
_AT_NUMBER, _AT_ARCH = 0, 4
SUPERVISOR = 0x7FFFFFF1
"""A protected process that is not there yet; its maker puts the number in. Above any real one."""
X32_BIT = 0x40000000
NEWEST_KNOWN = 469
"""`file_setattr`, Linux 6.17: later calls have not been looked at."""

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
NETLINK_ROUTE = 0
"""Answers "which interfaces are there", which many runtimes ask; other families face drivers."""
CLONE_NEW_ANYTHING = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
_TERMINAL_TRICKS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI, TIOCLINUX, TIOCSETD: type into, or reprogram, somebody else's terminal."""
_KIND_MASK, _CHARACTER_DEVICE, _BLOCK_DEVICE = 0o170000, 0o020000, 0o060000

# Name -> (x86_64, generic). From 424 on all architectures share their numbers.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # mounts and roots
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "fanotify_init": (300, 262),
    # namespaces
    "unshare": (272, 97),
    "setns": (308, 268),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # the kernel itself
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "memfd_secret": (447, 447),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "create_module": (174, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "_sysctl": (156, None),
    "nfsservctl": (180, 42),
    "lookup_dcookie": (212, 18),
    "syslog": (103, 116),
    "acct": (163, 89),
    "reboot": (169, 142),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
}
_ARGUMENTS: dict[str, tuple[int | None, int | None]] = {
    "clone": (56, 220),
    "clone3": (435, 435),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "ioctl": (16, 29),
    "mknod": (133, None),
    "mknodat": (259, 33),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
}
"""Calls that are refused for some arguments only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    audit_arch: int
    column: int
    """Which number of the tables above is this machine's."""


MACHINES = {
    "x86_64": Machine(audit_arch=0xC000003E, column=0),
    "aarch64": Machine(audit_arch=0xC00000B7, column=1),
    "riscv64": Machine(audit_arch=0xC00000F3, column=1),
}


def build_filter(
    *, sockets: bool = True, protected_pids: tuple[int, ...] = (), machine: str | None = None
) -> bytes:
    """The program as the kernel takes it: 8 bytes for each instruction.

    Args:
        sockets: Unix, IPv4 and IPv6 sockets may be opened. Without a network namespace they must
            not; `socketpair` always works.
        protected_pids: processes that may not be signalled by their number, nor all at once; for
            sandboxes that share the numbers of the host.
        machine: as `uname -m` says it; None is this one.

    Raises:
        SandboxError: the numbers of this machine's system calls are not known here.
    """
    name = os.uname().machine if machine is None else machine
    if name not in MACHINES:
        raise SandboxError(
            f"sandbox: no system call numbers for {name!r}; known: {', '.join(MACHINES)}. Add "
            "them in sandbox/seccomp.py, or run with sandbox.backend=docker"
        )
    here = MACHINES[name]
    numbers = {call: pair[here.column] for call, pair in (_REFUSED | _ARGUMENTS).items()}
    out = [
        _instruction(_LOAD_WORD, _AT_ARCH),
        _instruction(_JUMP_EQUAL, here.audit_arch, 1, 0),
        _instruction(_RETURN, KILL_PROCESS),
        _instruction(_LOAD_WORD, _AT_NUMBER),
    ]
    if name == "x86_64":
        out += _when(_JUMP_AT_LEAST, X32_BIT, [_instruction(_RETURN, KILL_PROCESS)])
    out += _when(_JUMP_GREATER, NEWEST_KNOWN, [_refuse(ENOSYS)])
    for call in _REFUSED:
        if (number := numbers[call]) is not None:
            out += _when(_JUMP_EQUAL, number, [_refuse(EPERM)])
    for call, body in _bodies(sockets, protected_pids).items():
        if (number := numbers[call]) is not None:
            out += _when(_JUMP_EQUAL, number, body)
    return b"".join([*out, _instruction(_RETURN, ALLOW)])


def _bodies(sockets: bool, protected_pids: tuple[int, ...]) -> dict[str, list[bytes]]:
    """What decides each call of `_ARGUMENTS`; every path through a body returns."""
    allow = _instruction(_RETURN, ALLOW)
    families = (AF_UNIX, AF_INET, AF_INET6) if sockets else ()
    bodies = {
        # The C library falls back to `clone`, whose flags a filter can read.
        "clone3": [_refuse(ENOSYS)],
        "clone": [
            _argument(0),
            _instruction(_AND, CLONE_NEW_ANYTHING),
            *_when(_JUMP_EQUAL, 0, [allow]),
            _refuse(EPERM),
        ],
        "socket": [
            _argument(0),
            *_any_of(families, [allow]),
            *(_only_route(allow) if sockets else []),
            _refuse(EAFNOSUPPORT),
        ],
        "socketpair": [_argument(0), *_any_of((AF_UNIX,), [allow]), _refuse(EAFNOSUPPORT)],
        "ioctl": [_argument(1), *_any_of(_TERMINAL_TRICKS, [_refuse(EPERM)]), allow],
    }
    for call, mode_at in (("mknod", 1), ("mknodat", 2)):
        bodies[call] = [
            _argument(mode_at),
            _instruction(_AND, _KIND_MASK),
            *_any_of((_CHARACTER_DEVICE, _BLOCK_DEVICE), [_refuse(EPERM)]),
            allow,
        ]
    if protected_pids:
        one = tuple(pid & 0xFFFFFFFF for pid in protected_pids)
        groups = tuple(-pid & 0xFFFFFFFF for pid in protected_pids)
        for call in ("tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_open"):
            bodies[call] = [_argument(0), *_any_of(one, [_refuse(EPERM)]), allow]
        everybody = -1 & 0xFFFFFFFF
        bodies["kill"] = [
            _argument(0),
            *_any_of((*one, *groups, everybody), [_refuse(EPERM)]),
            allow,
        ]
    return bodies


def _only_route(allow: bytes) -> list[bytes]:
    return _when(
        _JUMP_EQUAL,
        AF_NETLINK,
        [_argument(2), *_any_of((NETLINK_ROUTE,), [allow]), _refuse(EAFNOSUPPORT)],
    )


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _refuse(errno: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | errno)


def _argument(index: int) -> bytes:
    """Load the low half of an argument: the kernel reads these as 32-bit numbers too."""
    return _instruction(_LOAD_WORD, 16 + 8 * index)


def _when(jump: int, value: int, body: list[bytes]) -> list[bytes]:
    assert len(body) < 256, "a jump reaches 255 instructions"
    return [_instruction(jump, value, 0, len(body)), *body]


def _any_of(values: tuple[int, ...], body: list[bytes]) -> list[bytes]:
    return [part for value in values for part in _when(_JUMP_EQUAL, value, body)]
