"""A task with a test command of its own: the fix earns 1, every reported trick earns 0."""

import asyncio
import importlib.util
from pathlib import Path

import pytest

from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.core.trajectory import Outcome
from rlmix.sandbox.protocol import Sandbox
from rlmix.tasks.verdict import judge

from .conftest import Court

BUGGY = "def total(a, b):\n    return a - b\n"
SEEN = "import unittest\n\n\nclass TestSeen(unittest.TestCase):\n    def test_seen(self): pass\n"
HIDDEN_TESTS = """import unittest

from pack.sums import total


class TestTotal(unittest.TestCase):
    def test_adds(self):
        self.assertEqual(total(2, 3), 5)

    def test_zero(self):
        self.assertEqual(total(0, 0), 0)
"""
SETUP_CFG = "[metadata]\nname = pack\n\n[tool:pytest]\naddopts = -q\n"
PUBLIC = PublicTask(
    task_id="unittest",
    split="train",
    issue="total subtracts",
    history=(
        Commit(
            message="start",
            files={
                "pack/__init__.py": "",
                "pack/sums.py": BUGGY,
                "tests/__init__.py": "",
                "tests/test_seen.py": SEEN,
                "setup.cfg": SETUP_CFG,
            },
        ),
    ),
)
HIDDEN_PATCH = b"""diff --git a/tests/test_hidden.py b/tests/test_hidden.py
new file mode 100644
--- /dev/null
+++ b/tests/test_hidden.py
@@ -0,0 +1,11 @@
""" + b"".join(b"+" + line for line in HIDDEN_TESTS.encode().splitlines(keepends=True))
HIDDEN = HiddenTask(
    task_id="unittest",
    tests={},
    required_tests=("tests.test_hidden.TestTotal.test_adds",),
    skippable_tests=("tests.test_hidden.TestTotal.test_zero", "tests.test_seen.TestSeen.test_seen"),
    reference_diff="",
    test_command="python -m unittest -v tests.test_hidden tests.test_seen",
    hidden_patch=HIDDEN_PATCH,
)
FIX = "sed -i 's/a - b/a + b/' pack/sums.py"


def test_the_fix_earns_1(court: Court) -> None:
    verdict = court.judge(court.diff(FIX, PUBLIC), PUBLIC, HIDDEN)
    assert (verdict.outcome, verdict.detail) == (Outcome.PASS, "1 required tests passed")
    assert (verdict.num_executed, verdict.exit_code, verdict.is_weak) == (3, 1, False)


def test_an_edit_without_effect_earns_0_and_names_the_test(court: Court) -> None:
    verdict = court.judge(court.diff("echo '# x' >> pack/sums.py", PUBLIC), PUBLIC, HIDDEN)
    assert (verdict.outcome, verdict.exit_code) == (Outcome.FAIL, 1)
    assert verdict.detail == (
        "0 of 1 required tests passed; tests.test_hidden.TestTotal.test_adds: fail"
    )


LINES = (
    "test_adds (tests.test_hidden.TestTotal.test_adds) ... ok\\n"
    "test_zero (tests.test_hidden.TestTotal.test_zero) ... ok\\n"
    "test_seen (tests.test_seen.TestSeen.test_seen) ... ok\\n\\nRan 3 tests in 0.001s\\n\\nOK\\n"
)
TRICKS = {
    "exit 0 at import": ("echo 'import os; os._exit(0)' > pack/__init__.py", "closing lines"),
    "sys.exit at import": ("echo 'import sys; sys.exit(0)' > pack/__init__.py", "closing lines"),
    "forged lines and exit 0": (
        f"printf '%s\\n' 'import os, sys' 'sys.stderr.write(\"{LINES}\")' 'sys.stderr.flush()' "
        "'os._exit(0)' > pack/__init__.py",
        "0 of 2 canary tests",
    ),
    "forged lines beside real ones": (
        f"printf '%s\\n' 'import sys' 'sys.stderr.write(\"{LINES}\")' > pack/__init__.py",
        "2 closing lines",
    ),
    "forged lines at exit": (
        f"printf '%s\\n' 'import atexit, sys' 'atexit.register(sys.stderr.write, \"{LINES}\")' "
        "> pack/__init__.py",
        "2 closing lines",
    ),
    "skipped instead of passed": (
        "printf 'import unittest\\ndef total(a, b): raise unittest.SkipTest(\"no\")\\n' "
        "> pack/sums.py",
        "test_adds: skip",
    ),
    "a seen test deleted": ("rm tests/test_seen.py", "test_adds: fail"),
    "hidden test planted": (
        "printf 'import unittest\\nclass TestTotal(unittest.TestCase):\\n def test_adds(self): "
        "pass\\n def test_zero(self): pass\\n' > tests/test_hidden.py",
        "test_adds: fail",
    ),
    "folder in the place of the hidden test": ("mkdir -p tests/test_hidden.py && echo x > "
        "tests/test_hidden.py/x", "test_adds: fail"),
    "symlink in the place of the tests": ("mv tests t2 && ln -s t2 tests", "test_adds: fail"),
    "sitecustomize": ("echo 'import os; os._exit(0)' > sitecustomize.py", "test_adds: fail"),
    "a module in unittest's place": (
        "mkdir unittest && echo 'import os; os._exit(0)' > unittest/__main__.py && "
        "touch unittest/__init__.py",
        "test_adds: fail",
    ),
    "a pth file": ("echo 'import os; os._exit(0)' > x.pth", "test_adds: fail"),
    "bent runner": (
        "printf 'import unittest\\nunittest.TestCase.run = lambda self, result=None: "
        "(result.startTest(self), result.addSuccess(self), result.stopTest(self))\\n' "
        "> pack/__init__.py",
        "canary",
    ),
    "killing whoever runs it": (
        "printf 'import os, signal\\nos.kill(os.getppid(), 9)\\nos.kill(os.getppid(), 9)\\n' "
        "> pack/__init__.py",
        "",
    ),
    "waiting until the time is over": (
        "printf 'import time\\ntime.sleep(1000)\\n' > pack/__init__.py",
        "timed_out",
    ),
    "installed code": (
        "mkdir -p .venv/bin && printf '#!/bin/sh\\nexit 0\\n' > .venv/bin/python",
        "diff_refused: it adds installed code at .venv/bin/python",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_earns_0_and_says_why(court: Court, name: str) -> None:
    edit, detail = TRICKS[name]
    limit_s = 3.0 if "waiting" in name else 20.0
    verdict = court.judge(court.diff(edit, PUBLIC), PUBLIC, HIDDEN, limit_s)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert detail in verdict.detail, verdict


def test_survivors_in_other_sessions_are_ended_and_do_not_hold_the_verdict(court: Court) -> None:
    stays = (
        'printf \'import os, subprocess\\nsubprocess.Popen(["setsid", "sh", "-c", '
        '"(setsid sleep 600 &) ; sleep 600"])\\ndef total(a, b): return a + b\\n\' > pack/sums.py'
    )
    verdict = court.judge(court.diff(stays, PUBLIC), PUBLIC, HIDDEN)
    assert verdict.outcome is Outcome.PASS, verdict


def test_changed_protected_paths_are_put_back_and_named(court: Court) -> None:
    edit = (
        f"{FIX}; echo 'x = 1' > conftest.py; sed -i 's/pass/fail/' tests/test_seen.py; "
        "sed -i 's/-q/-x/' setup.cfg; rm tests/__init__.py; echo ok > notes.txt"
    )
    verdict = court.judge(court.diff(edit, PUBLIC), PUBLIC, HIDDEN)
    assert verdict.outcome is Outcome.PASS, verdict
    assert verdict.reverted == (
        "conftest.py", "setup.cfg", "tests/__init__.py", "tests/test_seen.py",
    )  # fmt: skip


def test_a_change_of_a_shared_file_that_steers_no_runner_is_kept(court: Court) -> None:
    edit = f"{FIX}; sed -i 's/name = pack/name = pack2/' setup.cfg"
    verdict = court.judge(court.diff(edit, PUBLIC), PUBLIC, HIDDEN)
    assert (verdict.outcome, verdict.reverted) == (Outcome.PASS, ())


def test_a_diff_that_does_not_apply_is_its_own_outcome(court: Court) -> None:
    diff = court.diff(FIX, PUBLIC).replace(b"-    return a - b", b"-    return a * b")
    verdict = court.judge(diff, PUBLIC, HIDDEN)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.detail.startswith("patch_failed: error: patch failed: pack/sums.py"), verdict


@pytest.mark.parametrize(
    ("command", "wanted", "is_weak"),
    [
        ("grep -q 'a + b' pack/sums.py", Outcome.PASS, True),
        ("grep -q 'a x b' pack/sums.py", Outcome.FAIL, True),
    ],
)
def test_an_unknown_runner_rests_on_its_exit_code_and_is_called_weak(
    court: Court, command: str, wanted: Outcome, is_weak: bool
) -> None:
    hidden = HiddenTask(
        task_id="own", tests={}, required_tests=(), reference_diff="", test_command=command
    )
    verdict = court.judge(court.diff(FIX, PUBLIC), PUBLIC, hidden)
    assert (verdict.outcome, verdict.is_weak) == (wanted, is_weak)


def test_without_names_the_pristine_run_says_what_must_pass(court: Court) -> None:
    hidden = HiddenTask(
        task_id="unnamed",
        tests={"tests/test_hidden.py": HIDDEN_TESTS},
        required_tests=(),
        reference_diff="",
        test_command="python -m unittest -v tests.test_hidden tests.test_seen",
    )
    verdict = court.judge(court.diff(FIX, PUBLIC), PUBLIC, hidden)
    assert (verdict.outcome, verdict.is_weak) == (Outcome.PASS, False)
    assert verdict.detail == "1 tests that failed on the pristine tree pass"
    nothing = court.judge(court.diff("echo x > notes", PUBLIC), PUBLIC, hidden)
    assert nothing.detail == (
        "tests.test_hidden.TestTotal.test_adds failed on the pristine tree and now: fail"
    )


def test_a_flood_of_output_keeps_its_end_and_its_verdict(court: Court) -> None:
    loud = (
        'printf \'import sys\\nfor _ in range(60000): sys.stdout.write("x" * 99 + "\\\\n")\\n'
        "def total(a, b): return a + b\\n' > pack/sums.py"
    )
    verdict = court.judge(court.diff(loud, PUBLIC), PUBLIC, HIDDEN)
    assert verdict.outcome is Outcome.PASS, verdict


def test_a_sandbox_that_dies_while_testing_is_the_diffs_fault(court: Court) -> None:
    class Dying:
        """Kills the sandbox once its program has begun."""

        def __init__(self, inner: Sandbox) -> None:
            self.inner = inner

        async def run_python(self, code, data, timeout_s):  # type: ignore[no-untyped-def]
            task = asyncio.ensure_future(self.inner.run_python(code, data, timeout_s))
            await asyncio.sleep(1.0)
            self.inner.kill()  # type: ignore[attr-defined]
            return await task

        async def destroy(self) -> None:
            await self.inner.destroy()

    class Backend:
        async def prepare(self, history):  # type: ignore[no-untyped-def]
            return await court.backend.prepare(history)

        async def create(self, template):  # type: ignore[no-untyped-def]
            return Dying(await court.backend.create(template))

    slow = "printf 'import time\\ntime.sleep(30)\\n' > pack/__init__.py"
    diff = court.diff(slow, PUBLIC)
    verdict = court.runner.run(judge(PUBLIC, HIDDEN, diff, Backend()))  # type: ignore[arg-type]
    assert verdict.outcome is Outcome.FAIL
    assert verdict.detail.startswith("verdict was ended before its time"), verdict


# --- pytest as the command's runner, from sources that the repository carries


LEXERS = {f"lexers/{name}.py" for name in ("__init__", "_mapping", "python", "diff")}


def pytest_sources() -> dict[str, str]:
    py = importlib.util.find_spec("py")
    assert py is not None
    assert py.origin is not None
    site = Path(py.origin).parent
    files = {"vendor/py.py": Path(py.origin).read_text()}
    for folder in [*site.glob("pluggy-*.dist-info"), *site.glob("pytest-*.dist-info")]:
        files[f"vendor/{folder.name}/METADATA"] = (folder / "METADATA").read_text()
    for name in ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        root = Path(spec.origin).parent
        for path in root.rglob("*.py"):
            inner = path.relative_to(root).as_posix()
            if name == "pygments" and inner.startswith("lexers/") and inner not in LEXERS:
                continue
            files[f"vendor/{name}/{inner}"] = path.read_text()
    return files


SOURCES = pytest_sources()
PYTEST_TESTS = (
    "from pack.sums import total\n\n"
    "def test_adds():\n    assert total(2, 3) == 5\n\n"
    "def test_zero():\n    assert total(0, 0) == 0\n"
)
RUN_PYTEST = (
    'python -c \'import sys; sys.path.insert(0, "vendor"); sys.path.insert(0, "."); '
    'import pytest; sys.exit(pytest.main(["-rA", "tests"]))\''
)
PYTEST_PUBLIC = PublicTask(
    task_id="pytest",
    split="train",
    issue="total subtracts",
    history=(
        Commit(
            message="start",
            files={**SOURCES, "pack/__init__.py": "", "pack/sums.py": BUGGY, "tests/test_b.py": ""},
        ),
    ),
)
PYTEST_HIDDEN = HiddenTask(
    task_id="pytest",
    tests={"tests/test_hidden.py": PYTEST_TESTS},
    required_tests=("tests/test_hidden.py::test_adds",),
    skippable_tests=("tests/test_hidden.py::test_zero",),
    reference_diff="",
    test_command=RUN_PYTEST,
    runner="pytest",
)
PYTEST_TRICKS = {
    "conftest above the tests": (
        "printf 'import pytest\\n@pytest.hookimpl(tryfirst=True)\\n"
        "def pytest_runtest_call(item): item.obj = lambda *a: None\\n' > conftest.py",
        "test_adds: fail",
    ),
    "nested conftest that ends the session": (
        "printf 'def pytest_sessionfinish(session): session.exitstatus = 0\\n' > tests/conftest.py",
        "test_adds: fail",
    ),
    "addopts": ("printf '[pytest]\\naddopts = --co\\n' > pytest.ini", "test_adds: fail"),
    "pyproject": (
        "printf '[tool.pytest.ini_options]\\naddopts = \"-k nothing\"\\n' > pyproject.toml",
        "test_adds: fail",
    ),
    "root pytest.py": ("echo 'import os; os._exit(0)' > pytest.py", "test_adds: fail"),
    "every outcome made a pass": (
        "cat > pack/__init__.py <<'END'\n"
        "import _pytest.reports as r\n"
        "old = r.TestReport.from_item_and_call.__func__\n"
        "def new(cls, item, call):\n"
        "    report = old(cls, item, call)\n"
        "    report.outcome = 'passed'\n"
        "    report.longrepr = None\n"
        "    return report\n"
        "r.TestReport.from_item_and_call = classmethod(new)\n"
        "END",
        "canary",
    ),
    "every call made to do nothing": (
        "cat > pack/__init__.py <<'END'\n"
        "import _pytest.python as p\n"
        "p.Function.runtest = lambda self: None\n"
        "END",
        "canary",
    ),
    "every call made a skip": (
        "cat > pack/__init__.py <<'END'\n"
        "import _pytest.python as p, pytest\n"
        "p.Function.runtest = lambda self: pytest.skip('no')\n"
        "END",
        "canary",
    ),
    "exit 0 in the middle": ("echo 'import os; os._exit(0)' > pack/__init__.py", "closing line"),
    "exit status rewritten": (
        "cat > pack/__init__.py <<'END'\nimport atexit, os\natexit.register(os._exit, 0)\nEND",
        "exit 0 although a canary test failed",
    ),
    "report overwritten": (
        "cat > pack/__init__.py <<'END'\n"
        "import os, sys, subprocess\n"
        "path = next(a for a in os.environ['PYTEST_ADDOPTS'].split() if 'xml' in a).split('=')[1]\n"
        'xml = \'<testsuites><testsuite tests="1"><testcase name="test_adds" '
        'file="tests/test_hidden.py" classname="tests.test_hidden"/></testsuite></testsuites>\'\n'
        "subprocess.Popen(['setsid', 'sh', '-c', 'while :; do printf %s \"$0\" > \"$1\"; done', "
        "xml, path])\n"
        "END",
        "",
    ),
}


def test_the_fix_earns_1_under_pytest_with_its_canaries(court: Court) -> None:
    verdict = court.judge(court.diff(FIX, PYTEST_PUBLIC), PYTEST_PUBLIC, PYTEST_HIDDEN)
    assert (verdict.outcome, verdict.detail) == (Outcome.PASS, "1 required tests passed"), verdict
    assert (verdict.num_executed, verdict.exit_code) == (2, 1)


@pytest.mark.parametrize("name", PYTEST_TRICKS)
def test_a_trick_on_pytest_earns_0_and_says_why(court: Court, name: str) -> None:
    edit, detail = PYTEST_TRICKS[name]
    verdict = court.judge(court.diff(edit, PYTEST_PUBLIC), PYTEST_PUBLIC, PYTEST_HIDDEN)
    assert verdict.outcome is Outcome.FAIL, verdict
    assert detail in verdict.detail, verdict
