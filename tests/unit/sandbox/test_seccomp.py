"""The system call filter, read by an interpreter of its language; the kernel is in red_team."""

import re
import struct
from pathlib import Path

import pytest

from rlmix.core.errors import SandboxError
from rlmix.sandbox.seccomp import ALLOW, KILL_PROCESS, build_filter

X86, ARM = 0xC000003E, 0xC00000B7
EPERM, EAFNOSUPPORT, ENOSYS = 0x50001, 0x50000 | 97, 0x50000 | 38
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def decide(program: bytes, arch: int, number: int, *args: int) -> int:
    """What the kernel would answer, after its documentation of classic BPF."""
    padded = [*args, *([0] * (6 - len(args)))]
    data = struct.pack("<iIQ6Q", number, arch, 0, *(value & (1 << 64) - 1 for value in padded))
    code = list(struct.iter_unpack("<HBBI", program))
    at = accumulator = 0
    while True:
        kind, if_true, if_false, value = code[at]
        at += 1
        if kind == 0x20:
            accumulator = struct.unpack_from("<I", data, value)[0]
        elif kind == 0x54:
            accumulator &= value
        elif kind == 0x06:
            return value
        else:
            holds = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
            }[kind]
            at += if_true if holds else if_false


def test_ordinary_calls_pass_and_dangerous_ones_do_not() -> None:
    program = build_filter(machine="x86_64")
    read, execve, exit_group, ptrace, mount, bpf, io_uring_setup = 0, 59, 231, 101, 165, 321, 425
    assert {decide(program, X86, number) for number in (read, execve, exit_group)} == {ALLOW}
    refused = (ptrace, mount, bpf, io_uring_setup)
    assert {decide(program, X86, number) for number in refused} == {EPERM}


def test_another_architecture_and_x32_end_the_process() -> None:
    program = build_filter(machine="x86_64")
    assert decide(program, 0x40000003, 4) == KILL_PROCESS  # write, as i386
    assert decide(program, X86, 0x40000000 | 1) == KILL_PROCESS  # write, as x32
    assert decide(program, ARM, 64) == KILL_PROCESS


def test_a_call_newer_than_the_list_is_not_implemented() -> None:
    program = build_filter(machine="x86_64")
    assert decide(program, X86, 470) == ENOSYS
    assert decide(program, X86, 469) == ALLOW


def test_threads_and_forks_pass_and_new_namespaces_do_not() -> None:
    program = build_filter(machine="x86_64")
    clone, clone3, unshare = 56, 435, 272
    thread, fork = 0x3D0F00, 0x01200011
    assert [decide(program, X86, clone, flags) for flags in (thread, fork)] == [ALLOW, ALLOW]
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decide(program, X86, clone, fork | flag) == EPERM
    assert decide(program, X86, unshare, 0x10000000) == EPERM
    # The C library takes this answer and uses `clone`.
    assert decide(program, X86, clone3) == ENOSYS


@pytest.mark.parametrize(
    ("family", "protocol", "answer"),
    [
        (1, 0, ALLOW),  # Unix
        (2, 6, ALLOW),  # IPv4
        (10, 17, ALLOW),  # IPv6
        (16, 0, ALLOW),  # netlink: routes
        (16, 12, EAFNOSUPPORT),  # netlink: netfilter
        (17, 0, EAFNOSUPPORT),  # packet
        (38, 0, EAFNOSUPPORT),  # the kernel's cryptography
        (40, 0, EAFNOSUPPORT),  # the hypervisor's side of a virtual machine
    ],
)
def test_sockets_are_of_four_families(family: int, protocol: int, answer: int) -> None:
    assert decide(build_filter(machine="x86_64"), X86, 41, family, 1, protocol) == answer


def test_without_a_network_namespace_there_are_pairs_but_no_sockets() -> None:
    program = build_filter(machine="x86_64", sockets=False)
    for family in (1, 2, 10, 16, 40):
        assert decide(program, X86, 41, family) == EAFNOSUPPORT
    assert decide(program, X86, 53, 1) == ALLOW  # socketpair
    assert decide(program, X86, 53, 2) == EAFNOSUPPORT


def test_pipes_may_be_made_and_devices_not() -> None:
    program = build_filter(machine="x86_64")
    mknod, mknodat = 133, 259
    fifo, character, block = 0o010644, 0o020666, 0o060666
    assert decide(program, X86, mknod, 0, fifo) == ALLOW
    assert decide(program, X86, mknodat, 0, 0, fifo) == ALLOW
    for kind in (character, block):
        assert decide(program, X86, mknod, 0, kind) == EPERM
        assert decide(program, X86, mknodat, 0, 0, kind) == EPERM


def test_nobody_types_into_a_terminal() -> None:
    program = build_filter(machine="x86_64")
    assert decide(program, X86, 16, 0, 0x5412) == EPERM  # TIOCSTI
    assert decide(program, X86, 16, 0, 0x1_0000_5412) == EPERM  # the kernel reads 32 bits
    assert decide(program, X86, 16, 0, 0x5413) == ALLOW  # TIOCGWINSZ


def test_protected_processes_are_not_signalled_alone_in_groups_or_with_everybody() -> None:
    program = build_filter(machine="x86_64", protected_pids=(700, 800))
    kill, tgkill, pidfd_open = 62, 234, 434
    for target in (700, 800, -700, -1):
        assert decide(program, X86, kill, target, 9) == EPERM
    assert decide(program, X86, tgkill, 800, 800, 9) == EPERM
    assert decide(program, X86, pidfd_open, 700) == EPERM
    assert decide(program, X86, kill, 900, 9) == ALLOW
    assert decide(build_filter(machine="x86_64"), X86, kill, 700, 9) == ALLOW


def test_arm_has_its_own_numbers() -> None:
    program = build_filter(machine="aarch64")
    assert decide(program, ARM, 117) == EPERM  # ptrace
    assert decide(program, ARM, 101) == ALLOW  # nanosleep, which is ptrace on x86_64
    assert decide(program, X86, 0) == KILL_PROCESS


@pytest.mark.parametrize("machine", sorted(HEADERS))
def test_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    from rlmix.sandbox import seccomp

    if not HEADERS[machine].exists():
        pytest.skip(f"{HEADERS[machine]} is not installed")
    rows = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", HEADERS[machine].read_text())
    known = {name: int(number) for name, number in rows}
    column = seccomp.MACHINES[machine].column
    checked = 0
    for name, pair in (seccomp._REFUSED | seccomp._ARGUMENTS).items():
        if name in known:
            assert pair[column] == known[name], name
            checked += 1
    assert checked > 50


def test_a_machine_without_a_table_is_refused_by_name() -> None:
    with pytest.raises(SandboxError, match="no system call numbers for 'mips'; known: x86_64"):
        build_filter(machine="mips")
