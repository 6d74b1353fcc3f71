"""One sandbox from inside: what commands can do, what they cannot, and how they end."""

import asyncio
import os
import signal
import time

import pytest

from rlmix.core.errors import SandboxError
from rlmix.sandbox.protocol import WorkTreeError

from .conftest import HISTORY, LIMITS, Lab

HIDDEN_NAME = "rlmix_probe_of_the_host"
FORKS = """
import os, time
count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except BlockingIOError:
    print(count, flush=True)
os.kill(-1, 9)
"""


def processes_with(word: str) -> list[int]:
    """Host processes with `word` in their command line."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if word.encode() in file.read():
                        found.append(int(entry))
            except OSError:
                continue
    return found


def gone(word: str) -> bool:
    """True once no process has `word` in its command line; a killed one may need a moment."""
    deadline_s = time.monotonic() + 10
    while processes_with(word) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return processes_with(word) == []


async def until_started(word: str) -> None:
    """Wait until a process with `word` in its command line lives on this machine."""
    async with asyncio.timeout(20):
        while not processes_with(word):
            await asyncio.sleep(0.02)


def test_a_command_sees_the_repository_and_its_exit_code_and_both_streams(lab: Lab) -> None:
    (result,) = lab.run("cat a.py; echo oops >&2; exit 3")
    assert (result.exit_code, result.output) == (3, "x = 2\noops\n")
    assert not result.truncated


def test_errors_of_bash_are_named_as_bash_names_them(lab: Lab) -> None:
    (result,) = lab.run("nope")
    assert (result.exit_code, result.output) == (127, "bash: line 1: nope: command not found\n")


def test_files_stay_and_shell_state_does_not(lab: Lab) -> None:
    results = lab.run("cd sub && VALUE=1 && echo hi > new && pwd", "pwd; echo [$VALUE]; ls sub")
    assert results[0].output == "/repo/sub\n"
    assert results[1].output == "/repo\n[]\nb.txt\nnew\n"


def test_python_is_the_workers_own_version_without_its_packages(lab: Lab) -> None:
    import sys

    version, packages = lab.run(
        "python -V", "python -c 'import pytest' 2>&1 | tail -1; python3 -m unittest -h | head -1"
    )
    assert version.output == f"Python {sys.version.split()[0]}\n"
    assert packages.output.startswith("ModuleNotFoundError: No module named 'pytest'\nusage:")


def test_git_works_without_an_identity_or_ownership_complaint(lab: Lab) -> None:
    (result,) = lab.run("echo 3 > a.py && git commit -qam change && git log --format=%s | head -2")
    assert result.output == "change\nmore\n"


@pytest.mark.parametrize(
    ("command", "why"),
    [("echo a\0b", "NUL"), ("echo \ud800", "surrogate"), ("#" * (1 << 20) + "x", "1048577 bytes")],
)
def test_what_no_shell_can_take_is_a_tool_error(lab: Lab, command: str, why: str) -> None:
    (result,) = lab.run(command)
    assert result.exit_code == 126
    assert why in result.output


def test_a_command_longer_than_one_argument_runs(lab: Lab) -> None:
    (result,) = lab.run("cat > big <<'END'\n" + "line\n" * 60_000 + "END\nwc -c < big")
    assert result.output == "300000\n"


def test_output_beyond_the_limit_keeps_head_and_tail(lab: Lab) -> None:
    (result,) = lab.run("seq 100000")
    assert result.truncated
    assert result.output.startswith("1\n2\n")
    assert result.output.endswith("99999\n100000\n")
    assert len(result.output) < LIMITS.output_chars + 40


def test_endless_output_is_stopped_before_the_time_limit(lab: Lab) -> None:
    flood, after = lab.run("yes", "echo still here", timeout_s=30)
    assert flood.exit_code == 137
    assert flood.duration_s < 20
    assert "[stopped after 64 MiB of output]" in flood.output
    assert after.output == "still here\n"


def test_a_time_out_kills_everything_and_keeps_output_and_files(lab: Lab) -> None:
    word = f"97531.{os.getpid()}"
    sandbox = lab.create()
    result = lab.do(
        sandbox.run(
            f"echo part; echo kept > kept; (trap '' TERM INT; setsid sleep {word}) & "
            f"(setsid sleep {word} &) ; sleep 600",
            timeout_s=0.5,
        )
    )
    assert (result.exit_code, result.timed_out) == (124, True)
    assert result.output.startswith("part\n[stopped after 0.5 s")
    assert gone(word)
    assert lab.do(sandbox.run("cat kept")).output == "kept\n"
    lab.do(sandbox.destroy())


def test_a_background_process_does_not_hold_up_its_command_and_lives_on(lab: Lab) -> None:
    first, second = lab.run("sleep 50 & echo started", "pgrep -x sleep | wc -l")
    assert first.output == "started\n"
    assert first.duration_s < 10
    assert second.output == "1\n"


def test_submit_counts_only_as_the_last_word_with_exit_code_0(lab: Lab) -> None:
    results = lab.run(
        "submit; false", "submit; true", "echo submit", "false; submit", "true && submit"
    )
    assert [result.submitted for result in results] == [False, False, False, True, True]


def test_submission_is_never_missed_or_carried_over(lab: Lab) -> None:
    sandbox = lab.create()
    for _ in range(40):
        assert lab.do(sandbox.run("submit")).submitted
        assert not lab.do(sandbox.run("echo submit")).submitted
    lab.do(sandbox.destroy())


def test_there_is_no_network(lab: Lab) -> None:
    outside, interfaces, local = lab.run(
        "(exec 3<>/dev/tcp/192.0.2.1/9) 2>&1; echo $?",
        "tail -n +3 /proc/net/dev | cut -d: -f1",
        'python -c \'import socket as s; a=s.create_server(("127.0.0.1",0));'
        's.create_connection(a.getsockname()); print("ok")\'',
    )
    assert "Network is unreachable" in outside.output
    assert interfaces.output.split() == ["lo"]
    assert local.output == "ok\n"


def test_nothing_of_the_host_is_writable_or_readable(lab: Lab) -> None:
    os.environ["RLMIX_TEST_SECRET"] = HIDDEN_NAME
    try:
        results = lab.run(
            "for p in /usr /etc /sys /proc/sys/kernel / /dev /run/rlmix/base/repo "
            "/run/rlmix/static/bin; do touch $p/x 2>/dev/null && echo wrote $p; done; true",
            "mount -o remount,rw /usr 2>/dev/null && echo remounted; true",
            "unshare -Ur true 2>/dev/null && echo nested; true",
            "ls /sys /root /home 2>/dev/null | grep -v : ; cat /etc/shadow 2>/dev/null; true",
            f"env | grep {HIDDEN_NAME}; cat /proc/*/environ | grep -a {HIDDEN_NAME}; true",
            "ls /proc | grep -c '^[0-9]*$'",
            "ls -l /proc/self/fd | grep -c -e socket -e rlmix",
            "hostname; id -u; grep -h -e NoNewPrivs -e CapBnd -e CapEff /proc/self/status",
        )
    finally:
        del os.environ["RLMIX_TEST_SECRET"]
    assert [result.output for result in results[:3]] == ["", "", ""]
    assert results[3].output.strip() in ("", ".pyenv")
    assert results[4].output == ""
    assert int(results[5].output) <= 5
    assert results[6].output == "0\n"
    assert results[7].output.split() == [
        *("sandbox", "1000", "CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1")
    ]


def test_sandboxes_do_not_see_each_other(lab: Lab) -> None:
    first, second = lab.create(), lab.create()
    lab.do(first.run("echo secret | tee /tmp/x /repo/x /dev/shm/x; sleep 30 &"))
    found = lab.do(second.run("ls /tmp/x /repo/x /dev/shm/x 2>/dev/null; pgrep sleep; true"))
    assert found.output == ""
    lab.do(first.destroy())
    lab.do(second.destroy())


def test_memory_processes_and_disk_are_bounded(lab: Lab) -> None:
    memory, forks, disk, size, after = lab.run(
        "set -o pipefail; python -c 'x = bytearray(400 << 20)' 2>&1 | tail -1",
        f"python -c '{FORKS}'",
        "head -c 5M /dev/zero > a1; head -c 5M /dev/zero > a2; echo $?; rm a1 a2",
        "head -c 100M /dev/zero > /tmp/big; echo $?",
        "echo alive",
    )
    if "memory" in lab.backend._groups.in_force:
        assert memory.oom
        assert memory.output.endswith("[killed: out of memory, the limit is 256 MiB]\n")
    else:
        assert memory.output == "MemoryError\n"
    assert 10 < int(forks.output) < LIMITS.pids
    assert "No space left on device" in disk.output
    assert size.output.split()[-1] != "0"
    assert after.output == "alive\n"


def test_a_fork_bomb_ends_with_its_command(lab: Lab) -> None:
    bomb, after = lab.run("f() { f | f & }; f; sleep 20", "echo alive", timeout_s=1.0)
    assert bomb.timed_out
    assert after.output == "alive\n"


def test_the_first_process_survives_what_an_agent_sends_it(lab: Lab) -> None:
    results = lab.run(
        "kill -9 1; kill -STOP 1; kill -TERM 1; kill -INT 1; kill -USR2 1; sleep 0.1; echo a",
        "kill -9 -1; echo b",
        "kill -USR1 1; sleep 5",
        "echo c",
    )
    assert results[0].output == "a\n"
    assert results[1].output.endswith("b\n")
    assert results[2].exit_code == 137
    assert results[3].output == "c\n"


def test_a_sandbox_ended_from_inside_is_the_agents_doing(lab: Lab) -> None:
    async def scenario() -> None:
        sandbox = await lab.backend.create(await lab.backend.prepare(HISTORY))
        word = f"31975.{os.getpid()}"
        running = asyncio.create_task(sandbox.run(f"echo before; sleep {word}"))
        await until_started(word)
        os.kill(sandbox.pid, signal.SIGKILL)  # As if the command had ended the first process.
        result = await running
        assert result.sandbox_lost
        assert (result.exit_code, result.output.split("\n")[0]) == (137, "before")
        assert (await sandbox.run("echo x")).sandbox_lost
        with pytest.raises(WorkTreeError, match="nothing to record"):
            await sandbox.capture_diff()
        await sandbox.destroy()

    lab.do(scenario())


def test_a_sandbox_killed_from_outside_is_a_fault(lab: Lab) -> None:
    async def scenario() -> None:
        sandbox = await lab.backend.create(await lab.backend.prepare(HISTORY))
        running = asyncio.create_task(sandbox.run("sleep 30"))
        await asyncio.sleep(0.3)
        with open(f"/proc/{sandbox.pid}/stat") as file:
            monitor = int(file.read().rpartition(")")[2].split()[1])
        os.kill(monitor, signal.SIGKILL)
        with pytest.raises(SandboxError, match="killed from outside by signal 9"):
            await running
        await sandbox.destroy()

    lab.do(scenario())


def test_a_cancelled_command_leaves_no_process_after_destroy(lab: Lab) -> None:
    word = f"86420.{os.getpid()}"

    async def scenario() -> None:
        sandbox = await lab.backend.create(await lab.backend.prepare(HISTORY))
        running = asyncio.create_task(sandbox.run(f"setsid sleep {word} & sleep {word}"))
        await until_started(word)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await sandbox.destroy()
        await sandbox.destroy()

    lab.do(scenario())
    assert gone(word)


def test_150_sandboxes_at_once_work_and_go(lab: Lab) -> None:
    async def one(number: int) -> str:
        sandbox = await lab.backend.create(await lab.backend.prepare(HISTORY))
        try:
            return (await sandbox.run(f"echo {number} > n; cat n", 30)).output
        finally:
            await sandbox.destroy()

    async def scenario() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(150)))

    assert lab.do(scenario()) == [f"{number}\n" for number in range(150)]


def test_the_launchers_death_is_a_fault_and_the_next_sandbox_gets_a_new_one(lab: Lab) -> None:
    word = f"75319.{os.getpid()}"

    async def scenario() -> None:
        sandbox = await lab.backend.create(await lab.backend.prepare(HISTORY))
        running = asyncio.create_task(sandbox.run(f"sleep {word}"))
        await until_started(word)
        os.kill(lab.backend._link.pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="launcher process ended"):
            await running
        await sandbox.destroy()
        again = await lab.backend.create(await lab.backend.prepare(HISTORY))
        assert (await again.run("echo new")).output == "new\n"
        await again.destroy()

    lab.do(scenario())
    assert gone(word)
