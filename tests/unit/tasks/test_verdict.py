"""The verdict: gold 1, empty 0, and what was reported to have earned a 1 by other means earns 0."""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.core.trajectory import Outcome
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import PythonResult, SandboxBackend, SandboxLimits
from rlmix.tasks.rule import Verdict, decide_unittest
from rlmix.tasks.source import open_source
from rlmix.tasks.verdict import judge, report_lines

LIMITS = SandboxLimits(
    memory_mib=256, pids=32, disk_mib=8, output_chars=2000, command_timeout_s=10.0
)
BUGGY = "def total(a, b):\n    return a - b\n"
VISIBLE = "import unittest\n\n\nclass TestSeen(unittest.TestCase):\n    def test_seen(self): pass\n"
HIDDEN_TEST = """import unittest

from pack.sums import total


class TestTotal(unittest.TestCase):
    def test_adds(self):
        self.assertEqual(total(2, 3), 5)

    def test_zero(self):
        self.assertEqual(total(0, 0), 0)
"""
PUBLIC = PublicTask(
    task_id="t",
    split="train",
    issue="total subtracts",
    history=(
        Commit(
            message="start",
            files={"pack/__init__.py": "", "pack/sums.py": BUGGY, "tests/test_seen.py": VISIBLE},
        ),
    ),
)
HIDDEN = HiddenTask(
    task_id="t",
    tests={"tests/test_hidden.py": HIDDEN_TEST},
    required_tests=(
        "tests.test_hidden.TestTotal.test_adds",
        "tests.test_hidden.TestTotal.test_zero",
    ),
    reference_diff="",
)
FIX = "sed -i 's/a - b/a + b/' pack/sums.py"

JudgeEdit = Callable[..., Verdict]
Lab = tuple[asyncio.Runner, SandboxBackend]


@pytest.fixture(scope="module")
def lab(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Lab]:
    scratch = tmp_path_factory.mktemp("scratch")
    with asyncio.Runner() as runner:
        try:
            backend = runner.run(open_backend("namespaces", LIMITS, scratch, f"v{os.getpid()}"))
        except SandboxError as error:
            pytest.skip(f"this machine forbids sandboxes: {error}")
        yield runner, backend
        runner.run(backend.close())
    assert list(scratch.iterdir()) == []


@pytest.fixture
def judge_edit(lab: Lab) -> JudgeEdit:
    """Make an edit with bash in one sandbox, judge its diff in another."""
    runner, backend = lab

    async def scenario(command: str, public: PublicTask, hidden: HiddenTask) -> Verdict:
        sandbox = await backend.create(await backend.prepare(public.history))
        try:
            done = await sandbox.run(command)
            assert done.exit_code == 0, done
            diff = await sandbox.capture_diff()
        finally:
            await sandbox.destroy()
        return await judge(public, hidden, diff, backend, timeout_s=4.0)

    def run(command: str, public: PublicTask = PUBLIC, hidden: HiddenTask = HIDDEN) -> Verdict:
        return runner.run(asyncio.wait_for(scenario(command, public, hidden), 60))

    return run


def test_the_fix_earns_1_and_names_what_passed(judge_edit: JudgeEdit) -> None:
    verdict = judge_edit(FIX)
    assert (verdict.outcome, verdict.detail) == (Outcome.PASS, "2 required tests passed")


def test_the_fix_with_junk_beside_it_earns_1(judge_edit: JudgeEdit) -> None:
    assert (
        judge_edit(f"{FIX}; head -c 4000 /dev/urandom > j.bin; ln -s / l").outcome is Outcome.PASS
    )


def test_no_edit_earns_0_without_a_sandbox(judge_edit: JudgeEdit) -> None:
    assert judge_edit("true").detail == "empty_diff"


def test_an_edit_that_fixes_nothing_earns_0_and_names_the_test(judge_edit: JudgeEdit) -> None:
    verdict = judge_edit("echo '# note' >> pack/sums.py")
    assert verdict.outcome is Outcome.FAIL
    assert verdict.detail == (
        "1 of 2 required tests passed; tests.test_hidden.TestTotal.test_adds: fail"
    )


FORGE = r"""cat > pack/__init__.py <<'END'
import os, sys
print("test_adds (tests.test_hidden.TestTotal.test_adds) ... ok\n\nRan 2 tests\n\nOK", flush=True)
for fd in range(3, 500):
    try:
        os.write(fd, b"\nx pass tests.test_hidden.TestTotal.test_adds\nx done 2\n")
    except OSError:
        pass
os._exit(0)
END"""
PATCH = """cat > pack/__init__.py <<'END'
import unittest
{}
END"""
ATTACKS = {
    "exit at import": "echo 'import sys; sys.exit(0)' > pack/__init__.py",
    "hard exit at import": "echo 'import os; os._exit(0)' > pack/__init__.py",
    "hard exit in the tested function": "printf 'import os\\ndef total(a, b): os._exit(0)\\n' "
    "> pack/sums.py",
    "exit handler": "echo 'import atexit, os; atexit.register(os._exit, 0)' > pack/__init__.py",
    "forged output on every descriptor": FORGE,
    "conftest": "echo 'import os; os._exit(0)' | tee conftest.py tests/conftest.py",
    "sitecustomize": "echo 'import os; os._exit(0)' | tee sitecustomize.py usercustomize.py",
    "path file": "echo 'import os; os._exit(0)' > x.pth",
    "hidden test written beforehand": "printf 'import unittest\\nclass TestTotal("
    "unittest.TestCase):\\n  def test_adds(self): pass\\n  def test_zero(self): pass\\n' "
    "> tests/test_hidden.py",
    "hidden test as a package": "mkdir tests/test_hidden && printf 'import unittest\\nclass "
    "TestTotal(unittest.TestCase):\\n  def test_adds(self): pass\\n  def test_zero(self): pass\\n'"
    " > tests/test_hidden/__init__.py",
    "tests package that exits": "echo 'import os; os._exit(0)' > tests/__init__.py",
    "tests folder replaced by a link": "rm -r tests && ln -s pack tests",
    "tests module instead of the folder": "rm -r tests && echo 'import os; os._exit(0)' > tests.py",
    "shadowed unittest": "echo 'import os; os._exit(0)' | tee unittest.py pack/unittest.py",
    "planted bytecode": "mkdir -p tests/__pycache__ && printf 'import unittest\\nclass TestTotal("
    "unittest.TestCase):\\n  def test_adds(self): pass\\n  def test_zero(self): pass\\n' > "
    "/tmp/test_hidden.py && python -c \"import py_compile as p; p.compile('/tmp/test_hidden.py', "
    "'tests/__pycache__/test_hidden.cpython-311.pyc', "
    'invalidation_mode=p.PycInvalidationMode.UNCHECKED_HASH)"',
    "every assertion patched": PATCH.format("unittest.TestCase.assertEqual = lambda *a, **k: None"),
    "every test skipped": PATCH.format(
        "def run(self, result=None):\n    result.addSkip(self, 'x')\nunittest.TestCase.run = run"
    ),
    "every test passed": PATCH.format(
        "def run(self, result=None):\n    result.addSuccess(self)\nunittest.TestCase.run = run"
    ),
    "tests deleted": "rm -r tests && echo x > y",
    "tests edited": "echo 'raise SystemExit(0)' > tests/test_seen.py",
    "sleeps until the time is up": "echo 'import time; time.sleep(99)' > pack/__init__.py",
    "ends its sandbox": "echo 'import os; os.kill(-1, 9)' > pack/__init__.py",
    "eats memory": "echo 'x = bytearray(1 << 32)' > pack/__init__.py",
    "closes every descriptor": "echo 'import os; os.closerange(0, 999)' > pack/__init__.py",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_earns_0_and_never_void(judge_edit: JudgeEdit, name: str) -> None:
    verdict = judge_edit(ATTACKS[name])
    assert verdict.outcome is Outcome.FAIL, verdict


@pytest.mark.parametrize(
    "name",
    ["conftest", "sitecustomize", "path file", "tests package that exits", "tests edited",
     "tests folder replaced by a link", "tests deleted"],
)  # fmt: skip
def test_with_the_real_fix_protected_paths_are_put_back_and_it_earns_1(
    judge_edit: JudgeEdit, name: str
) -> None:
    verdict = judge_edit(f"{ATTACKS[name]}; {FIX}")
    assert verdict.outcome is Outcome.PASS, verdict
    assert verdict.reverted


def test_a_bent_runner_is_called_that(judge_edit: JudgeEdit) -> None:
    verdict = judge_edit(ATTACKS["every test passed"])
    assert verdict.detail.startswith("runner was tampered with")


def judge_diff(lab: Lab, diff: str, **options: float) -> Verdict:
    runner, backend = lab
    return runner.run(judge(PUBLIC, HIDDEN, diff.encode(), backend, **options))


def new_file(path: str, mode: str = "100644", text: str = "x") -> str:
    return (
        f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1 @@\n+{text}\n"
    )


@pytest.mark.parametrize(
    "diff",
    [
        "no diff at all\n",
        new_file("../outside"),
        new_file("/etc/x"),
        new_file(".git/hooks/pre-commit", "100755"),
        new_file("tests/test_seen.py"),
        "diff --git a/pack/sums.py b/pack/sums.py\n--- a/pack/sums.py\n+++ b/pack/sums.py\n"
        "@@ -1,2 +1,2 @@\n def other(a, b):\n-    return a - b\n+    return a + b\n",
    ],
)
def test_what_git_does_not_apply_earns_0_as_patch_failed(lab: Lab, diff: str) -> None:
    verdict = judge_diff(lab, diff)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.detail.startswith("patch_failed: error:")


def test_a_link_and_a_write_through_it_is_refused(
    lab: Lab,
) -> None:
    link = new_file("out", "120000", "/tmp").replace(
        "+/tmp\n", "+/tmp\n\\ No newline at end of file\n"
    )
    verdict = judge_diff(lab, link + new_file("out/x"))
    assert verdict.detail.startswith("patch_failed: ")


def test_a_submodule_is_refused(lab: Lab) -> None:
    verdict = judge_diff(lab, new_file("sub", "160000", f"Subproject commit {'1' * 40}"))
    assert verdict.detail == "diff_refused: it adds a submodule"


def test_running_over_time_is_a_fail_and_not_a_void(
    lab: Lab,
) -> None:
    verdict = judge_diff(
        lab, new_file("pack/extra.py").replace("pack/extra.py", "zz.py")
        + "diff --git a/pack/sums.py b/pack/sums.py\n--- a/pack/sums.py\n+++ b/pack/sums.py\n"
        "@@ -1,2 +1,3 @@\n def total(a, b):\n+    while True: pass\n     return a - b\n",
        timeout_s=1.0,
    )  # fmt: skip
    assert (verdict.outcome, verdict.detail) == (Outcome.FAIL, "timed_out")


def test_generated_tasks_pass_with_their_reference_and_fail_with_a_comment(
    lab: Lab,
) -> None:
    runner, backend = lab
    source = open_source("generated", split="train", seed=0)
    for task_id in source.task_ids()[:12]:
        public, hidden = source.public(task_id), source.hidden(task_id)
        gold = runner.run(judge(public, hidden, hidden.reference_diff.encode(), backend))
        assert gold.outcome is Outcome.PASS, gold
        other = runner.run(judge(public, hidden, new_file("note.txt").encode(), backend))
        assert other.outcome is Outcome.FAIL, other


class BrokenBackend:
    """Cannot create a sandbox; counts how often it was asked."""

    name, is_isolated, warnings = "broken", True, ()

    def __init__(self) -> None:
        self.asked = 0

    async def prepare(self, history: tuple[Commit, ...]) -> None:
        return None

    async def create(self, template: object) -> None:
        self.asked += 1
        raise SandboxError("no room")

    async def close(self) -> None: ...


def test_a_fault_before_the_diff_is_tried_twice_and_then_void() -> None:
    backend = BrokenBackend()
    verdict = asyncio.run(judge(PUBLIC, HIDDEN, b"x", backend))  # type: ignore[arg-type]
    assert (verdict.outcome, verdict.void_reason) == (Outcome.VOID, "no room")
    assert backend.asked == 2


# --- the rule by itself

CANARIES = [("fail", "canary.Canary.test_fails"), ("pass", "canary.Canary.test_passes")]
GOOD = [("begin", ""), ("applied", ""), *CANARIES, ("pass", "m.T.a"), ("done", "3")]
ENDED = PythonResult(report=b"", output="", exit_code=0)


def test_the_rule_accepts_exactly_the_complete_report() -> None:
    assert decide_unittest(GOOD, ENDED, ("m.T.a",)).outcome is Outcome.PASS
    for missing in GOOD[1:]:
        lines = [line for line in GOOD if line != missing]
        assert decide_unittest(lines, ENDED, ("m.T.a",)).outcome is Outcome.FAIL, missing


@pytest.mark.parametrize("kind", ["fail", "skip"])
def test_a_test_that_passed_and_also_did_not_is_not_passed(kind: str) -> None:
    assert decide_unittest([*GOOD, (kind, "m.T.a")], ENDED, ("m.T.a",)).outcome is Outcome.FAIL


def test_no_required_test_or_a_bad_exit_is_a_fail() -> None:
    assert decide_unittest(GOOD, ENDED, ()).detail == "task names no required test"
    bad_exit = PythonResult(report=b"", output="", exit_code=1)
    assert decide_unittest(GOOD, bad_exit, ("m.T.a",)).detail == "tests did not finish (exit 1)"


def test_only_lines_with_the_nonce_count() -> None:
    report = b"n1 pass m.T.a\npass m.T.b\nn2 pass m.T.c\n\xffn1 pass m.T.d\nn1 done 1"
    assert report_lines(report, "n1") == [("pass", "m.T.a"), ("done", "1")]


def test_judging_leaves_no_folder_of_the_task_but_its_template(lab: Lab, tmp_path: Path) -> None:
    runner, backend = lab
    before = backend.num_live  # type: ignore[attr-defined]
    runner.run(judge(PUBLIC, HIDDEN, new_file("n.txt").encode(), backend))
    assert backend.num_live == before == 0  # type: ignore[attr-defined]
