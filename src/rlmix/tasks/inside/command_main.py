"""Runs a task's own test command after the diff was applied."""

import os

from rlmix.tasks.inside.processes import packed, read_report, run_command
from rlmix.tasks.inside.submission import begin
from rlmix.tasks.inside.tree import write_file

PYTEST_PLUGIN = """
from pathlib import Path
import pytest

@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(session, config, items):
    path = Path(__file__).with_name("test_{nonce}.py")
    try:
        module = pytest.Module.from_parent(session, path=path)
    except TypeError:
        import py
        module = pytest.Module.from_parent(session, fspath=py.path.local(str(path)))
    items.extend(module.collect())
"""
PYTEST_CANARIES = """
def test_{nonce}_fails():
    raise AssertionError("this test fails in a sound runner")

def test_{nonce}_passes():
    pass
"""
UNITTEST_CANARIES = """
import unittest

class Canary(unittest.TestCase):
    def test_{nonce}_fails(self):
        raise AssertionError("this test fails in a sound runner")

    def test_{nonce}_passes(self):
        pass

def run_tests(self, run=unittest.TestProgram.runTests):
    names = "test_{nonce}_fails", "test_{nonce}_passes"
    self.test = unittest.TestSuite([self.test, *map(Canary, names)])
    run(self)

unittest.TestProgram.runTests = run_tests
"""
PYTEST_OPTIONS = "--junitxml={folder}/report.xml -o junit_family=xunit1 -p no:cacheprovider"


def runner_settings(runner, folder, nonce, has_canary):
    """Environment that makes a Python runner run one test that fails and one that passes after all
    others, and pytest write JUnit XML."""
    env, files = {}, {}
    if runner == "pytest":
        env["PYTEST_ADDOPTS"] = PYTEST_OPTIONS.format(folder=folder)
        files = {f"rlmix_{nonce}.py": PYTEST_PLUGIN, f"test_{nonce}.py": PYTEST_CANARIES}
    elif runner == "unittest":
        files = {"sitecustomize.py": UNITTEST_CANARIES}
    if has_canary:
        for name, text in files.items():
            write_file(folder, name, text.replace("{nonce}", nonce).encode(), 0o644)
        env["PYTHONPATH"] = folder
        if runner == "pytest":
            env["PYTEST_ADDOPTS"] += f" -p rlmix_{nonce}"
    return env


def main(data, report_fd):
    nonce = data["nonce"]
    say, folder, env = begin(data, report_fd)
    if folder is None:
        return
    env.update(runner_settings(data["runner"], folder, nonce, data["has_canary"]))
    if data["has_canary"]:
        say("canary", nonce)
    argv = ["/bin/bash", "-c", data["command"]]
    status, output, _ = run_command(argv, data["repo"], env, data["timeout_s"])
    say("output", packed(output))
    junit = read_report(os.path.join(folder, "report.xml"))
    if junit is not None:
        say("junit", packed(junit))
    say("exit", "none" if status is None else str(status))
    say("done")


main(data, report_fd)  # noqa: F821  (given by the launcher)
