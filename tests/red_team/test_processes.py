"""Other processes: killing, tracing, surviving."""

import os
import signal
import subprocess
import time

from rlmix.sandbox.weak import WeakBackend

from .conftest import LIMITS, Lab


def test_processes_of_the_host_are_not_signalled(lab: Lab, victim: subprocess.Popen[bytes]) -> None:
    launcher = lab.backend._link.pid
    answers = lab.attempts(f"""
for name, pid in (
    ("victim", {victim.pid}), ("launcher", {launcher}), ("worker", {os.getpid()}),
    ("group", -{os.getpgid(0)}),
):
    attempt(name, lambda: os.kill(pid, 9))
    attempt(f"{{name}} thread", lambda: call(234, 131, abs(pid), abs(pid), 9))
attempt("pidfd", lambda: call(424, 424, os.pidfd_open({victim.pid}), 9, 0, 0))
attempt("first process", lambda: os.kill(1, 9) if os.getuid() else None)
""")
    assert len(answers) == 10
    # In a namespace a number of the host's is nobody's or, by chance, one of the attacker's own.
    first = answers.pop("first process")
    assert first in ("SUCCEEDED", "EPERM")  # The kernel drops a KILL for a namespace's first.
    assert set(answers.values()) <= {"ESRCH", "EPERM"}
    os.kill(launcher, 0)


def test_killing_everybody_reaches_only_the_attackers_own(
    lab: Lab, victim: subprocess.Popen[bytes]
) -> None:
    sandbox = lab.create()
    result = lab.do(sandbox.run("sleep 60 & echo before; kill -9 -1; kill -9 -- -$$; wait", 20))
    assert result.output.startswith("before\n")
    assert result.exit_code != 0 or "No such process" in result.output
    lab.do(sandbox.destroy())
    os.kill(lab.backend._link.pid, 0)


def test_nothing_survives_whatever_it_does_to_its_family(lab: Lab) -> None:
    word = f"{55000 + os.getpid()}.25"
    sandbox = lab.create()
    result = lab.do(
        sandbox.run(
            f'setsid -f env -i sleep {word}; (setsid -f bash -c \'trap "" TERM INT HUP; '
            f"sleep {word}; true'); "
            "python3 - <<'END'\n"
            "import ctypes, os, signal\n"
            "ctypes.CDLL(None).prctl(36, 1)\n"  # A subreaper of its own.
            "for _ in range(3):\n"
            "    if os.fork() == 0:\n"
            "        os.setsid()\n"
            "        if os.fork() == 0:\n"
            f"            os.execvpe('sleep', ['sleep', '{word}'], {{}})\n"
            "        os.kill(os.getpid(), signal.SIGSTOP)\n"
            "os._exit(0)\n"
            f"END\nsleep 0.3; pgrep -cf '[s]leep {word}'",
            20,
        )
    )
    assert int(result.output) >= 5
    lab.do(sandbox.destroy())
    deadline_s = time.monotonic() + 10
    while _named(word) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert _named(word) == []


def _named(word: str) -> list[str]:
    done = subprocess.run(["pgrep", "-f", f"sleep {word}"], capture_output=True, text=True)
    return done.stdout.split()


def test_a_fork_bomb_meets_its_limit_and_ends_with_its_command(lab: Lab) -> None:
    count = (
        "import os, time\n"
        "made = 0\n"
        "try:\n"
        "    while made < 400:\n"
        "        if os.fork() == 0:\n"
        "            time.sleep(60)\n"
        "        made += 1\n"
        "except BlockingIOError:\n"
        "    print('refused after', made, flush=True)\n"
    )
    counted, bomb, after = lab.run(
        f'python3 -c "{count}"; true',
        "echo bombing; f() { f | f & }; f; sleep 30",
        "echo alive",
        timeout_s=4.0,
    )
    assert counted.output.startswith("refused after ")
    limit = LIMITS.pids
    if isinstance(lab.backend, WeakBackend) and "pids" not in lab.backend._groups.in_force:
        # An ordinary user's limit counts what the user has running elsewhere.
        limit = lab.backend._process_limit()
    assert int(counted.output.split()[2]) < limit
    assert bomb.output.startswith("bombing\n")
    assert bomb.timed_out or bomb.exit_code != 0
    assert after.output == "alive\n"


def test_limits_are_not_raised_from_inside(lab: Lab) -> None:
    answers = lab.attempts("""
import resource
def raise_limit(kind, value):
    try:
        resource.setrlimit(kind, (value, value))
    except ValueError:  # Python's word for EPERM.
        raise OSError(errno.EPERM, "")
huge = 1 << 40
attempt("processes", lambda: raise_limit(resource.RLIMIT_NPROC, 100_000))
attempt("file size", lambda: raise_limit(resource.RLIMIT_FSIZE, huge))
attempt("core", lambda: raise_limit(resource.RLIMIT_CORE, huge))
attempt("descriptors", lambda: raise_limit(resource.RLIMIT_NOFILE, 1 << 19))
attempt("cpu", lambda: raise_limit(resource.RLIMIT_CPU, 1 << 30))
attempt("locked", lambda: raise_limit(resource.RLIMIT_MEMLOCK, huge))
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, 0, -10))
attempt("realtime", lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10)))
attempt("root", lambda: os.setuid(0))
attempt("groups", lambda: os.setgroups([0]))
""")
    assert len(answers) == 10
    assert set(answers.values()) <= {"EPERM", "EINVAL", "EACCES"}


def test_a_killed_worker_leaves_no_process_of_a_sandbox(lab: Lab) -> None:
    word = f"{45000 + os.getpid()}.25"
    sandbox = lab.create()
    lab.do(sandbox.run(f"setsid -f env -i sleep {word}"))
    assert len(_named(word)) == 1
    os.kill(lab.backend._link.pid, signal.SIGKILL)  # What the death of a worker does to it.
    deadline_s = time.monotonic() + 10
    while _named(word) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert _named(word) == []
    lab.do(sandbox.destroy())
