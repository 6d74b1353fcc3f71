"""The protocol, held by every backend: the same words mean the same thing wherever a sandbox is."""

import asyncio
import marshal
import os
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from rlmix.sandbox.protocol import CommandResult, Sandbox, SandboxBackend, WorkTreeError

from .backends import NAMES, opened
from .conftest import HISTORY, LIMITS
from .test_session import gone

REPORT = compile(
    "import os, sys\n"
    "os.write(report_fd, repr((data['word'], os.getcwd() == data['repo'], "
    "sorted(os.listdir(data['repo'])))).encode())\n"
    "print('printed')\n"
    "sys.exit(3)\n",
    "report",
    "exec",
)


@dataclass
class AnyLab:
    """A backend of any kind and the loop it lives on."""

    name: str
    runner: asyncio.Runner
    backend: SandboxBackend

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(coroutine, 90))

    def create(self) -> Sandbox:
        async def make() -> Sandbox:
            return await self.backend.create(await self.backend.prepare(HISTORY))

        return self.do(make())

    def run(self, *commands: str, timeout_s: float = 20.0) -> list[CommandResult]:
        sandbox = self.create()
        try:
            return [self.do(sandbox.run(command, timeout_s)) for command in commands]
        finally:
            self.do(sandbox.destroy())


@pytest.fixture(scope="module", params=NAMES)
def lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AnyLab]:
    name = request.param
    scratch = tmp_path_factory.mktemp(f"protocol_{name}") / "scratch"
    scratch.mkdir()
    run_id = f"protocol{os.getpid()}{name}"
    with (
        asyncio.Runner() as runner,
        opened(name, runner, scratch, run_id, LIMITS) as backend,
    ):
        yield AnyLab(name, runner, backend)
    left = [path for path in scratch.rglob("*") if path.name not in ("server", "lock")]
    assert [path for path in left if not path.name.startswith("rlmix_sandboxes_")] == []


def test_streams_come_as_they_were_written_with_the_exit_code(lab: AnyLab) -> None:
    (result,) = lab.run("cat a.py; echo oops >&2; exit 3")
    assert (result.exit_code, result.output) == (3, "x = 2\noops\n")


def test_the_input_is_empty_and_no_other_descriptor_is_open(lab: AnyLab) -> None:
    (result,) = lab.run("cat; read -r line; echo $?; ls /proc/self/fd | wc -l")
    # 0, 1, 2, and the one with which `ls` reads the folder.
    assert result.output == "1\n4\n"


def test_each_command_has_a_fresh_shell_in_the_same_files(lab: AnyLab) -> None:
    first, second = lab.run("cd sub; X=1; echo new > file", "echo [$X]; cat sub/file; ls")
    assert first.output == ""
    assert second.output == "[]\nnew\na.py\nsub\n"


def test_nothing_of_the_workers_environment_is_seen(lab: AnyLab) -> None:
    os.environ["RLMIX_TEST_SECRET"] = "s3cr3t"
    try:
        (result,) = lab.run("env; cat /proc/$$/environ")
    finally:
        del os.environ["RLMIX_TEST_SECRET"]
    assert "PATH=" in result.output
    assert "s3cr3t" not in result.output


def test_a_time_out_keeps_the_partial_output_marked_and_the_files(lab: AnyLab) -> None:
    word = f"{86400 + os.getpid()}.5"
    sandbox = lab.create()
    command = f"echo part; echo kept > kept; setsid sleep {word} & trap '' TERM; sleep {word}"
    result = lab.do(sandbox.run(command, timeout_s=1.0))
    assert (result.exit_code, result.timed_out) == (124, True)
    assert result.output == "part\n[stopped after 1 s; use & for long work]\n"
    assert gone(word)
    assert lab.do(sandbox.run("cat kept", 20)).output == "kept\n"
    lab.do(sandbox.destroy())


def test_a_process_in_its_own_session_ends_with_the_sandbox(lab: AnyLab) -> None:
    word = f"{96400 + os.getpid()}.5"
    sandbox = lab.create()
    command = f"(setsid -f env -i sleep {word}); sleep 0.2; pgrep -cf 'slee[p] {word}'"
    result = lab.do(sandbox.run(command, 20))
    assert result.output == "1\n"
    lab.do(sandbox.destroy())
    assert gone(word)


def test_a_background_process_holds_up_nothing_and_lives_on(lab: AnyLab) -> None:
    word = f"{76400 + os.getpid()}.5"
    first, second = lab.run(f"sleep {word} & echo started", f"pgrep -cf 'slee[p] {word}'")
    assert first.output == "started\n"
    assert second.output == "1\n"


@pytest.mark.parametrize(
    ("command", "why"),
    [("echo a\0b", "NUL"), ("echo \ud800", "surrogate"), ("#" * (1 << 20) + "x", "1048577 bytes")],
)
def test_what_no_shell_can_take_is_an_answer(lab: AnyLab, command: str, why: str) -> None:
    bad, after = lab.run(command, "echo next")
    assert bad.exit_code == 126
    assert why in bad.output
    assert after.output == "next\n"


def test_a_command_longer_than_an_argument_runs(lab: AnyLab) -> None:
    (result,) = lab.run("cat > big <<'END'\n" + "line\n" * 60_000 + "END\nwc -c < big")
    assert result.output == "300000\n"


def test_output_keeps_head_and_tail_and_says_how_much_was_cut(lab: AnyLab) -> None:
    (result,) = lab.run("seq 100000")
    assert result.truncated
    assert result.output.startswith("1\n2\n")
    assert result.output.endswith("99999\n100000\n")
    # 588895 bytes in all, 2000 characters kept.
    assert "[586895 bytes cut]" in result.output


def test_endless_output_is_stopped(lab: AnyLab) -> None:
    flood, after = lab.run("yes", "echo still here", timeout_s=60)
    assert "[stopped after 64 MiB of output]" in flood.output
    assert after.output == "still here\n"


def test_bytes_that_are_no_text_are_replaced(lab: AnyLab) -> None:
    (result,) = lab.run(r"printf 'a\xffb\x00c\x1b[0md\n'")
    assert result.output == "a�bc[0md\n"


def test_submitting_is_the_last_word_with_exit_code_0(lab: AnyLab) -> None:
    results = lab.run("echo submit", "submit; false", "true && submit")
    assert [result.submitted for result in results] == [False, False, True]


def test_the_diff_has_edits_new_binary_files_and_deletions(lab: AnyLab) -> None:
    sandbox = lab.create()
    lab.do(sandbox.run(r"echo 'x = 3' > a.py; printf 'a\0b' > bin; rm sub/b.txt", 20))
    diff = lab.do(sandbox.capture_diff())
    lab.do(sandbox.destroy())
    assert b"-x = 2\n+x = 3\n" in diff
    assert b"GIT binary patch" in diff
    assert b"deleted file mode 100644" in diff


def test_a_tree_that_cannot_be_recorded_is_the_agents_fault(lab: AnyLab) -> None:
    sandbox = lab.create()
    lab.do(sandbox.run("head -c 3M /dev/urandom > big", 20))
    with pytest.raises(WorkTreeError, match="larger than 1000000 bytes"):
        lab.do(sandbox.capture_diff(1_000_000))  # type: ignore[call-arg]
    lab.do(sandbox.destroy())


def test_more_memory_than_allowed_ends_the_process_and_not_the_sandbox(lab: AnyLab) -> None:
    hog = "x = bytearray(700 << 20)"
    command = f"perl -e '$x = \"a\" x (700 << 20); print 1' 2>&1 || python -c '{hog}'"
    big, after = lab.run(command, "echo alive", timeout_s=60)
    assert big.exit_code != 0
    assert after.output == "alive\n"


def test_a_program_of_ours_reports_beside_its_output(lab: AnyLab) -> None:
    if lab.name == "stdio":
        pytest.skip("bubblewrap cannot start a second process in its container")
    sandbox = lab.create()
    result = lab.do(sandbox.run_python(REPORT, {"word": "w"}, timeout_s=30.0))
    assert result.report.decode() == repr(("w", True, [".git", "a.py", "sub"]))
    assert (result.output, result.exit_code) == ("printed\n", 3)
    endless = marshal.loads(marshal.dumps(compile("while True: pass", "endless", "exec")))
    slow = lab.do(sandbox.run_python(endless, {}, timeout_s=1.0))
    assert slow.timed_out
    lab.do(sandbox.destroy())


def test_sandboxes_at_once_do_not_mix(lab: AnyLab) -> None:
    async def one(number: int) -> str:
        sandbox = await lab.backend.create(await lab.backend.prepare(HISTORY))
        try:
            await sandbox.run(f"echo {number} > n; sleep 0.1", 30)
            return (await sandbox.run("cat n", 30)).output
        finally:
            await sandbox.destroy()

    async def scenario() -> list[str]:
        return await asyncio.gather(*(one(number) for number in range(12)))

    assert lab.do(scenario()) == [f"{number}\n" for number in range(12)]


def test_destroying_twice_and_before_use_is_allowed(lab: AnyLab) -> None:
    sandbox = lab.create()
    lab.do(sandbox.destroy())
    lab.do(sandbox.destroy())
