"""Each system call that could lead out, made with harmless arguments; none is answered with yes."""

import os
import subprocess
import sys

import pytest

from .conftest import PRELUDE, Lab

NO = {"EPERM", "EACCES", "ENOSYS", "EAFNOSUPPORT"}

# Harmless where they succeed: on a throw-away process, on nothing, or on what already is.
CALLS = """
CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWNET, CLONE_NEWPID = 0x10000000, 0x20000, 0x40000000, 0x20000000
buffer = ctypes.create_string_buffer(256)
attempt("mount", lambda: call(165, 40, b"none", b"/tmp", b"tmpfs", 0, 0))
attempt("remount", lambda: call(165, 40, 0, b"/usr", 0, 32 | 4096, 0))
attempt("umount2", lambda: call(166, 39, b"/nowhere", 0))
attempt("pivot_root", lambda: call(155, 41, b"/nowhere", b"/nowhere"))
attempt("chroot", lambda: call(161, 51, b"/"))
attempt("open_tree", lambda: call(428, 428, -100, b"/usr", 1))
attempt("move_mount", lambda: call(429, 429, -1, b"", -1, b"", 0))
attempt("fsopen", lambda: call(430, 430, b"tmpfs", 0))
attempt("mount_setattr", lambda: call(442, 442, -100, b"/usr", 0, buffer, 32))
attempt("open_by_handle_at", lambda: call(304, 265, -100, buffer, 0))
attempt("unshare user", lambda: call(272, 97, CLONE_NEWUSER))
attempt("unshare mounts", lambda: call(272, 97, CLONE_NEWNS))
attempt("unshare network", lambda: call(272, 97, CLONE_NEWNET))
def clone_user():
    pid = call(56, 220, CLONE_NEWUSER | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
attempt("clone user", clone_user)
def clone3_user():
    import struct
    pid = call(435, 435, struct.pack("8Q", CLONE_NEWUSER, 0, 0, 0, 17, 0, 0, 0), 64)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
attempt("clone3 user", clone3_user)
def join_own():
    fd = os.open("/proc/self/ns/uts", os.O_RDONLY)
    call(308, 268, fd, 0)
attempt("setns", join_own)
attempt("ptrace attach", lambda: call(101, 117, 16, os.getppid(), 0, 0))
attempt("ptrace traceme", lambda: call(101, 117, 0, 0, 0, 0))
attempt("process_vm_readv", lambda: call(310, 270, os.getppid(), 0, 0, 0, 0, 0))
attempt("process_vm_writev", lambda: call(311, 271, os.getppid(), 0, 0, 0, 0, 0))
attempt("pidfd_getfd", lambda: call(438, 438, 99, 0, 0))
attempt("keyctl", lambda: call(250, 219, 0, -3, 1))
attempt("add_key", lambda: call(248, 217, b"user", b"rlmix", b"x", 1, -3))
attempt("request_key", lambda: call(249, 218, b"user", b"rlmix", 0, -3))
attempt("bpf", lambda: call(321, 280, 0, buffer, 72))
attempt("perf_event_open", lambda: call(298, 241, buffer, 0, -1, -1, 0))
attempt("userfaultfd", lambda: call(323, 282, 1))
attempt("io_uring_setup", lambda: call(425, 425, 8, buffer))
attempt("memfd_secret", lambda: call(447, 447, 0))
attempt("kexec_load", lambda: call(246, 104, 0, 1, 0, 4))
attempt("init_module", lambda: call(175, 105, 0, 0, b""))
attempt("finit_module", lambda: call(313, 273, 0, b"", 0))
attempt("delete_module", lambda: call(176, 106, b"rlmix_no_such_module", 0))
attempt("swapon", lambda: call(167, 224, b"/nowhere", 0))
attempt("acct", lambda: call(163, 89, b"/nowhere"))
attempt("reboot", lambda: call(169, 142, 0, 0, 0, 0))
attempt("settimeofday", lambda: call(164, 170, 0, 0))
attempt("clock_settime", lambda: call(227, 112, 0, 0))
attempt("adjtimex", lambda: call(159, 171, buffer))
attempt("sethostname", lambda: call(170, 161, os.uname().nodename.encode(), 0))
attempt("syslog", lambda: call(103, 116, 10, 0, 0))
attempt("quotactl", lambda: call(179, 60, 0, b"/nowhere", 0, 0))
attempt("fanotify_init", lambda: call(300, 262, 0, 0))
attempt("mknod character", lambda: os.mknod("null", 0o020666, os.makedev(1, 3)))
attempt("mknod block", lambda: os.mknod("disk", 0o060666, os.makedev(254, 0)))
for family, name in ((40, "vsock"), (17, "packet"), (38, "alg"), (15, "key"), (31, "bluetooth")):
    attempt(f"socket {name}", lambda: socket.socket(family, socket.SOCK_DGRAM).close())
attempt("socket netfilter", lambda: socket.socket(16, socket.SOCK_RAW, 12).close())
attempt("newer than known", lambda: call(480, 480))
print("done", "all")
"""


def test_no_system_call_that_leads_out_is_answered(lab: Lab) -> None:
    answers = lab.attempts(CALLS)
    assert answers.pop("done") == "all"
    assert len(answers) == CALLS.count("attempt(") + 4  # One line makes five sockets.
    assert {name: answer for name, answer in answers.items() if answer not in NO} == {}


def test_the_same_calls_succeed_outside_so_the_attempts_have_teeth() -> None:
    if os.geteuid() != 0:
        pytest.skip("root outside shows what the filter takes away")
    script = PRELUDE + CALLS.replace('attempt("ptrace traceme"', '(lambda *_: 0)("ptrace traceme"')
    done = subprocess.run(
        ["unshare", "--mount", "--uts", sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd="/tmp",
        timeout=60,
    )
    for name in ("null", "disk"):
        if os.path.exists(f"/tmp/{name}"):
            os.unlink(f"/tmp/{name}")
    if "done all" not in done.stdout:
        pytest.skip(f"the control cannot run here: {done.stderr}")
    succeeded = {line.removesuffix(" SUCCEEDED") for line in done.stdout.splitlines() if
                 line.endswith(" SUCCEEDED")}  # fmt: skip
    expected = {"mount", "chroot", "fsopen", "unshare user", "unshare network", "open_tree"}
    assert expected <= succeeded


def test_a_program_of_another_architecture_is_ended(lab: Lab) -> None:
    if os.uname().machine != "x86_64":
        pytest.skip("32-bit entry exists on x86_64")
    # mov eax, 20 (getpid of i386); int 0x80; ret
    (result,) = lab.run(
        "python3 - <<'END'\nimport ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        r"page.write(b'\xb8\x14\x00\x00\x00\xcd\x80\xc3')" + "\n"
        "print('calling', flush=True)\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\n"
        "print('retur' + 'ned')\nEND"
    )
    assert result.output.startswith("calling\n")
    assert "returned" not in result.output
    assert result.exit_code == 128 + 31  # SIGSYS


def test_no_capability_is_left_and_none_can_come_back(lab: Lab) -> None:
    (result,) = lab.run(
        "grep -e CapPrm -e CapEff -e CapAmb -e NoNewPrivs -e Seccomp: /proc/self/status; "
        "for program in /usr/bin/su /bin/mount /usr/bin/passwd; do "
        "[[ -u $program ]] && echo setuid: $program; done; true"
    )
    rows = dict(line.split(":", 1) for line in result.output.splitlines())
    none = "\t" + "0" * 16
    assert (rows["CapPrm"], rows["CapEff"], rows["CapAmb"]) == (none, none, none)
    assert rows["NoNewPrivs"] == "\t1"  # So the setuid bits mean nothing.
    assert rows["Seccomp"] == "\t2"
