"""What pytest and unittest of this environment really print, read back."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlmix.tasks.evidence.junit import parse_junit
from rlmix.tasks.evidence.python import parse_pytest, parse_unittest
from rlmix.tasks.evidence.report import Status, TestReport

PYTEST_FILE = """
import pytest, warnings

def test_pass(): print("PASSED test_a.py::test_fail")
def test_fail(): assert 1 == 2, "a - b"
@pytest.mark.skip(reason="no")
def test_skip(): pass
@pytest.mark.xfail
def test_xfail(): assert 0
@pytest.mark.xfail
def test_xpass(): pass
@pytest.mark.xfail(strict=True)
def test_xpass_strict(): pass
@pytest.fixture
def broken(): raise ValueError("x")
def test_error(broken): pass
@pytest.fixture
def leaves(): yield; raise ValueError("late")
def test_passes_and_breaks_after(leaves): pass
class TestC:
    @pytest.mark.parametrize("v", ["a - b", "x y", "[z]", "caf\\u00e9"])
    def test_p(self, v): warnings.warn("w")
"""
WANTED = {
    "test_a.py::test_pass": {Status.PASS},
    "test_a.py::test_fail": {Status.FAIL},
    "test_a.py::test_skip": {Status.SKIP},
    "test_a.py::test_xfail": {Status.XFAIL},
    "test_a.py::test_xpass": {Status.XPASS},
    "test_a.py::test_xpass_strict": {Status.FAIL},
    "test_a.py::test_error": {Status.FAIL},
    "test_a.py::test_passes_and_breaks_after": {Status.PASS, Status.FAIL},
    "test_a.py::TestC::test_p[a - b]": {Status.PASS},
    "test_a.py::TestC::test_p[x y]": {Status.PASS},
    "test_a.py::TestC::test_p[[z]]": {Status.PASS},
    r"test_a.py::TestC::test_p[caf\xe9]": {Status.PASS},
}


def run_pytest(folder: Path, *args: str, text: str = PYTEST_FILE) -> str:
    (folder / "test_a.py").write_text(text)
    (folder / "pytest.ini").write_text("[pytest]\naddopts =\n")
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *args]
    env = {"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True).stdout


def outcomes(report: TestReport) -> dict[str, set[Status]]:
    return {name: set(said) for name, said in report.outcomes.items()}


def test_the_summary_of_pytest_names_all_but_the_skipped(tmp_path: Path) -> None:
    report = parse_pytest(run_pytest(tmp_path, "-rA"))
    assert report.fault == ""
    wanted = {name: said for name, said in WANTED.items() if said != {Status.SKIP}}
    assert outcomes(report) == wanted


@pytest.mark.parametrize("colour", ["yes", "no"])
def test_verbose_lines_add_the_skipped(tmp_path: Path, colour: str) -> None:
    report = parse_pytest(run_pytest(tmp_path, "-rA", "-v", f"--color={colour}"))
    assert (report.fault, outcomes(report)) == ("", WANTED)
    assert report.num_executed == 11
    assert report.has_passed("test_a.py::test_xfail")
    assert not report.has_passed("test_a.py::test_skip")
    assert report.has_passed_or_skipped("test_a.py::test_skip")
    assert not report.has_passed("test_a.py::test_passes_and_breaks_after")
    assert not report.has_passed("test_a.py::test_nowhere")


def test_quiet_output_without_names_has_no_outcomes_and_no_fault(tmp_path: Path) -> None:
    report = parse_pytest(run_pytest(tmp_path, "-q", "-r", "N", "--tb=no"))
    assert (dict(report.outcomes), report.fault) == ({}, "")


def test_a_run_that_printed_its_own_summary_is_faulty(tmp_path: Path) -> None:
    lie = (
        "import atexit\n"
        "def test_fail():\n"
        "    atexit.register(print, '=== short test summary info ===\\n'\n"
        "        'PASSED test_a.py::test_fail\\n=== 1 passed in 0.01s ===')\n"
        "    assert 0\n"
    )
    report = parse_pytest(run_pytest(tmp_path, "-rA", text=lie))
    assert report.fault == ("2 summaries and 2 closing lines; one run writes one of each")


def test_more_passes_than_the_closing_line_counts_are_a_fault(tmp_path: Path) -> None:
    lie = (
        "def test_fail():\n    print('\\ntest_a.py::test_other PASSED', flush=True)\n    assert 0\n"
    )
    report = parse_pytest(run_pytest(tmp_path, "-v", "-s", text=lie))
    assert report.fault == "1 tests are named as passed, the closing line counts 1 failed"


def test_a_run_that_ended_early_has_no_closing_line(tmp_path: Path) -> None:
    lie = "import os\ndef test_a(): print('1 passed', flush=True); os._exit(0)\n"
    report = parse_pytest(run_pytest(tmp_path, "-rA", "-s", text=lie))
    assert report.fault == "the run has no closing line"


def test_junit_names_and_outcomes_equal_those_of_the_terminal(tmp_path: Path) -> None:
    run_pytest(tmp_path, "--junitxml=report.xml", "-o", "junit_family=xunit1")
    report = parse_junit((tmp_path / "report.xml").read_bytes())
    # The XML has no word for a success against an xfail mark, and one case per test.
    wanted = {n: {Status.PASS} if s == {Status.XPASS} else s for n, s in WANTED.items()}
    wanted["test_a.py::test_passes_and_breaks_after"] = {Status.FAIL}
    assert (report.fault, outcomes(report)) == ("", wanted)


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        (b"<!DOCTYPE a [<!ENTITY x 'y'>]><testsuite/>", "the XML declares a document type"),
        (b"<testsuite", "the XML cannot be read"),
        (b"<other/>", "the XML holds no test suite"),
        (b"<testsuite tests='1'><testcase name='a'/><testcase name='b'/></testsuite>",
         "2 cases are listed, the suites count 1"),
    ],
)  # fmt: skip
def test_a_broken_xml_is_a_fault(document: bytes, fault: str) -> None:
    assert fault in parse_junit(document).fault


def test_junit_of_other_runners_is_named_by_class_and_name() -> None:
    document = (
        b"<testsuites><testsuite tests='3'><testcase classname='com.A' name='one'/>"
        b"<testcase name='two'><skipped/></testcase>"
        b"<testcase classname='com.A' name='three'><failure>no</failure></testcase>"
        b"</testsuite></testsuites>"
    )
    report = parse_junit(document)
    assert outcomes(report) == {
        "com.A.one": {Status.PASS},
        "two": {Status.SKIP},
        "com.A.three": {Status.FAIL},
    }
    assert report.fault == ""


UNITTEST_FILE = '''
import unittest, sys

class TestB(unittest.TestCase):
    def test_pass(self): pass
    def test_doc(self):
        """Has a docstring, with brackets (a.b)"""
    def test_logs(self): print("log line", file=sys.stderr)
    def test_fail(self): self.fail("x")
    def test_error(self): raise ValueError
    @unittest.skip("because")
    def test_skip(self): pass
    @unittest.expectedFailure
    def test_xfail(self): self.fail("known")
    @unittest.expectedFailure
    def test_xpass(self): pass
'''


def run_unittest(folder: Path, text: str) -> str:
    (folder / "test_a.py").write_text(text)
    argv = [sys.executable, "-m", "unittest", "-v", "test_a"]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True).stderr


def test_the_verbose_lines_of_unittest_are_read(tmp_path: Path) -> None:
    report = parse_unittest(run_unittest(tmp_path, UNITTEST_FILE))
    assert report.fault == ""
    assert outcomes(report) == {
        "test_a.TestB.test_pass": {Status.PASS},
        "test_a.TestB.test_doc": {Status.PASS},
        "test_a.TestB.test_logs": {Status.PASS},
        "test_a.TestB.test_fail": {Status.FAIL},
        "test_a.TestB.test_error": {Status.FAIL},
        "test_a.TestB.test_skip": {Status.SKIP},
        "test_a.TestB.test_xfail": {Status.XFAIL},
        "test_a.TestB.test_xpass": {Status.FAIL},
    }


def test_the_older_form_of_a_unittest_line_gives_the_same_id() -> None:
    text = "test_a (pack.test_x.TestB) ... ok\n\n-----\nRan 1 test in 0.001s\n\nOK\n"
    report = parse_unittest(text)
    assert (outcomes(report), report.fault) == ({"pack.test_x.TestB.test_a": {Status.PASS}}, "")


def test_a_unittest_run_that_printed_a_second_end_is_faulty(tmp_path: Path) -> None:
    lie = (
        "import atexit, sys, unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test_x(self):\n"
        "        atexit.register(print, 'Ran 1 test in 0.0s\\n\\nOK', file=sys.stderr)\n"
        "        self.fail('no')\n"
    )
    assert "2 closing lines" in parse_unittest(run_unittest(tmp_path, lie)).fault


def test_a_unittest_run_without_an_end_is_faulty() -> None:
    assert "0 closing lines" in parse_unittest("test_a (m.T.test_a) ... ok\n").fault
