"""Program that a verdict runs inside its sandbox. Not imported: `verdict.py` compiles this text
and hands it over with two globals, `data` and `report_fd`.

It applies the diff, puts protected paths back, writes the hidden tests, runs them, and reports each
outcome on a descriptor of its own, every line led by a nonce. What the tests print decides nothing.

Everything it needs is looked up before the first line of the repository's code runs.
"""

import os
import sys
import types
import unittest

PROTECTED_NAMES = frozenset(
    {"conftest.py", "sitecustomize.py", "usercustomize.py", "tests", "test", "__pycache__"}
)
PROTECTED_STARTS = ("test_",)
PROTECTED_ENDS = ("_test.py", ".pth", ".pyc")


def is_protected(path):
    """True for tests, and for files that steer an interpreter or a runner."""
    return any(
        part in PROTECTED_NAMES
        or part.startswith(PROTECTED_STARTS)
        or part.endswith(PROTECTED_ENDS)
        for part in path.split("/")
    )


def files_below(root):
    """Relative paths of files and symlinks, without following any, without the top's .git."""
    found, waiting = [], [""]
    while waiting:
        folder = waiting.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                if path == ".git":
                    continue
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                else:
                    found.append(path)
    return found


def write_file(root, path, content, mode):
    """Write below `root`; whatever stands in the way and is no real folder is removed."""
    parts = path.split("/")
    here = root
    for part in parts[:-1]:
        here = os.path.join(here, part)
        if os.path.islink(here) or not os.path.isdir(here):
            if os.path.lexists(here):
                os.unlink(here)
            os.mkdir(here)
    target = os.path.join(here, parts[-1])
    if os.path.isdir(target) and not os.path.islink(target):
        remove_folder(target)
    elif os.path.lexists(target):
        os.unlink(target)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def remove_folder(folder):
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                remove_folder(entry.path)
            else:
                os.unlink(entry.path)
    os.rmdir(folder)


def apply_diff(diff, repo, base, home):
    """`git apply` and nothing else; returns its exit status."""
    patch = os.path.join(home, "submitted.diff")
    with open(patch, "wb") as file:
        file.write(diff)
    env = {
        **os.environ,
        "GIT_DIR": f"{base}/capture",
        "GIT_WORK_TREE": repo,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "LC_ALL": "C",
    }
    argv = ["git", "apply", "--whitespace=nowarn", patch]
    pid = os.posix_spawnp("git", argv, env)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.unlink(patch)
    return status


def restore_protected(repo, base):
    """Protected paths as they were at base; returns the paths that had been changed."""
    original = f"{base}/repo"
    before = set(filter(is_protected, files_below(original)))
    reverted = []
    for path in filter(is_protected, files_below(repo)):
        if path not in before:
            os.unlink(os.path.join(repo, path))
            reverted.append(path)
    for path in before:
        source, target = os.path.join(original, path), os.path.join(repo, path)
        with open(source, "rb") as file:
            content = file.read()
        if os.path.isfile(target) and not os.path.islink(target):
            with open(target, "rb") as file:
                if file.read() == content:
                    continue
        write_file(repo, path, content, os.stat(source).st_mode & 0o777)
        reverted.append(path)
    return reverted


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
    status = apply_diff(data["diff"], repo, base, home)
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
