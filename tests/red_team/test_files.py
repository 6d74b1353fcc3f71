"""Files of the host: written, read, linked, reached through /proc, devices."""

import os

from .conftest import Lab

SECRET = "assert_total_is_9f3a77"


def test_files_of_the_host_are_written_by_no_trick(lab: Lab) -> None:
    target = lab.folder / "target.txt"
    target.write_text("untouched\n")
    target.chmod(0o666)
    answers = lab.attempts(f"""
import shutil
def append(path):
    with open(path, "a") as file:
        file.write("changed")
T = {str(target)!r}
attempt("append", lambda: append(T))
attempt("create", lambda: append({str(lab.folder / "new.txt")!r}))
os.symlink(T, "link")
attempt("through a link", lambda: append("link"))
os.symlink({str(lab.folder)!r}, "folder")
attempt("through a linked folder", lambda: append("folder/new.txt"))
attempt("cut", lambda: os.truncate(T, 0))
attempt("remove", lambda: os.unlink(T))
attempt("rename onto", lambda: os.rename("a.py", T))
attempt("rename away", lambda: os.rename(T, "stolen"))
attempt("hard link", lambda: os.link("/usr/bin/env", "linked"))
attempt("through proc", lambda: append("/proc/1/root" + T))
attempt("through own root", lambda: append("/proc/self/root" + T))
attempt("through cwd", lambda: append("/proc/self/cwd/../../../../../../../.." + T))
attempt("usr", lambda: append("/usr/bin/env"))
attempt("etc", lambda: append("/etc/passwd"))
attempt("etc new", lambda: append("/etc/rlmix_probe"))
attempt("preload", lambda: append("/etc/ld.so.preload"))
attempt("chmod usr", lambda: os.chmod("/usr/bin/env", 0o777))
attempt("chown usr", lambda: os.chown("/usr/bin/env", os.getuid(), os.getgid()))
attempt("home", lambda: append("/root/.bashrc"))
""")
    assert len(answers) == 19
    no = {"EACCES", "EPERM", "ENOENT", "EROFS", "EXDEV", "ENOTDIR"}
    assert {name: answer for name, answer in answers.items() if answer not in no} == {}
    assert target.read_text() == "untouched\n"
    assert [path.name for path in lab.folder.iterdir()] == ["target.txt"]
    target.unlink()
    assert not os.path.exists("/etc/rlmix_probe")


def test_settings_of_the_kernel_are_not_written(lab: Lab) -> None:
    answers = lab.attempts("""
def open_to_write(path):
    os.close(os.open(path, os.O_WRONLY))
for path in (
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/vm/overcommit_memory",
    "/proc/sys/user/max_user_namespaces", "/proc/sysrq-trigger", "/proc/1/mem",
    "/proc/1/oom_score_adj", "/sys/fs/cgroup/cgroup.procs", "/sys/power/state",
    "/sys/kernel/uevent_helper", "/dev/mem", "/dev/kmsg", "/dev/vda", "/dev/sda", "/dev/kvm",
    "/dev/net/tun", "/dev/fuse", "/dev/loop-control", "/dev/tty", "/proc/kcore",
):
    attempt(path, lambda: open_to_write(path))
def lower_oom():
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("-1000")
attempt("oom_score_adj", lower_oom)
""")
    assert len(answers) == 21
    no = {"EACCES", "EPERM", "ENOENT", "EROFS", "ENXIO", "ENODEV"}
    assert {name: answer for name, answer in answers.items() if answer not in no} == {}


def test_a_core_dump_or_device_gives_nothing_of_other_processes(lab: Lab) -> None:
    (result,) = lab.run("ulimit -c unlimited; echo $?; ls /proc/kcore /dev/mem 2>/dev/null; true")
    assert result.output.splitlines()[0] != "0" or "unlimited" not in result.output


def test_hidden_tests_on_the_host_are_not_found(lab: Lab) -> None:
    hidden = lab.folder / "test_hidden.py"
    hidden.write_text(f"{SECRET} = 1\n")
    os.environ["RLMIX_HIDDEN"] = SECRET
    memory = os.memfd_create("task")
    os.write(memory, SECRET.encode())
    try:
        (result,) = lab.run(
            f"cat {hidden}; echo tried: cat; "
            f"cat /proc/*/root{hidden} /proc/*/cwd/test_hidden.py; echo tried: root; "
            "grep -rl assert_total_is_9f3a7[7] $PWD /tmp /run /dev/shm; echo tried: grep; "
            "cat /proc/*/environ | grep -a assert_total_is_9f3a7[7]; echo tried: environ; "
            f"timeout 3 cat /proc/{os.getpid()}/fd/{memory} /proc/*/fd/*; echo tried: descriptors; "
            "for pid in /proc/[0-9]*; do grep -a -c assert_total_is_9f3a7[7] $pid/mem $pid/maps; "
            "done 2>&1 | grep ':[1-9]'; echo tried: memory",
            timeout_s=60,
        )
    finally:
        os.close(memory)
        del os.environ["RLMIX_HIDDEN"]
        hidden.unlink()
    tried = [line for line in result.output.splitlines() if line.startswith("tried: ")]
    assert [line[7:] for line in tried] == [
        *("cat", "root", "grep", "environ", "descriptors", "memory"),
    ]
    assert SECRET not in result.output


def test_the_descriptor_of_the_first_process_forges_no_answer(lab: Lab) -> None:
    forged, after = lab.run(
        "for fd in /proc/$PPID/fd/*; do (printf '0 1\\n' >$fd) 2>/dev/null; done; "
        "ls /proc/self/fd | wc -l; echo tried; exit 5",
        "echo alive",
    )
    assert "tried\n" in forged.output
    assert (forged.exit_code, forged.submitted) == (5, False)
    assert after.output == "alive\n"
