"""Runs hidden unittest files in the interpreter that applied the diff.

It applies the diff, puts protected paths back, writes the hidden tests, runs them, and reports each
outcome on a descriptor of its own, every line led by a nonce. What the tests print decides nothing.

Everything it needs is looked up before the first line of the repository's code runs.
"""

import os
import sys
import types
import unittest

from rlmix.tasks.inside.restore import git_apply, restore_protected
from rlmix.tasks.inside.tree import write_file


def load_module(path, text, repo):
    """Import a hidden test from its text, so that no file of the repository can stand in for it."""
    name = path.removesuffix(".py").replace("/", ".")
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules:
        __import__(parent)
    module = types.ModuleType(name)
    module.__file__ = os.path.join(repo, path)
    module.__package__ = parent
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module


def reporter(report_fd, nonce):
    """Build the function that writes one report line; references are taken now, not later."""
    write = os.write

    def say(kind, text=""):
        line = text.replace("\n", "?")
        write(report_fd, f"{nonce} {kind} {line}\n".encode("utf-8", "replace"))

    return say


def result_class(say):
    class Report(unittest.TestResult):
        def addSuccess(self, test):
            say("pass", test.id())

        def addExpectedFailure(self, test, err):
            say("pass", test.id())

        def addSkip(self, test, reason):
            say("skip", test.id())

        def addUnexpectedSuccess(self, test):
            say("fail", test.id())

        def addFailure(self, test, err):
            say("fail", test.id())
            super().addFailure(test, err)

        def addError(self, test, err):
            say("fail", test.id())
            super().addError(test, err)

        def addSubTest(self, test, subtest, err):
            if err is not None:
                say("fail", test.id())
                super().addSubTest(test, subtest, err)

    return Report


def canaries(nonce):
    """A test that must fail and one that must pass: a runner that somebody bent fails at one."""

    class Canary(unittest.TestCase):
        def test_fails(self):
            self.assertEqual(nonce, "")  # noqa: PT009

        def test_passes(self):
            self.assertEqual(nonce, nonce)  # noqa: PT009

    Canary.__module__, Canary.__qualname__ = "canary", "Canary"
    return [Canary("test_fails"), Canary("test_passes")]


def main(data, report_fd):
    say = reporter(report_fd, data["nonce"])
    repo, base, home = data["repo"], data["base"], data["home"]
    say("begin")
    status = git_apply(data["diff"], repo, base, home)[0] if data["diff"] else 0
    if status != 0:
        say("unappliable", str(status))
        return
    for path in restore_protected(repo, base):
        say("reverted", path)
    tests = data["tests"]
    for path, text in tests.items():
        write_file(repo, path, text.encode(), 0o644)
    say("applied")

    sys.argv = ["python -m unittest"]
    sys.path.insert(0, repo)
    sys.dont_write_bytecode = True
    sys.pycache_prefix = os.path.join(home, data["nonce"])  # A planted .pyc is not looked at.
    loader, result = unittest.TestLoader(), result_class(say)()
    suite = unittest.TestSuite()
    first, last = canaries(data["nonce"])
    suite.addTest(first)
    for path, text in tests.items():
        if not path.endswith(".py") or path.endswith("__init__.py"):
            continue
        try:
            suite.addTest(loader.loadTestsFromModule(load_module(path, text, repo)))
        except Exception as error:
            say("broken", f"{path}: {type(error).__name__}: {error}")
    suite.addTest(last)
    suite.run(result)
    for _, text in (result.errors + result.failures)[1:4]:
        sys.stderr.write(text[-500:] + "\n")
    say("done", str(result.testsRun))


main(data, report_fd)  # noqa: F821  (given by the launcher)
