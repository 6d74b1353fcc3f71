"""Which paths a submitted diff may not change: tests, and what steers a runner or an interpreter.

A legitimate fix sometimes edits one of them; it is put back and reported, never silently kept.
"""

import configparser
import json
import re
import tomllib

PROTECTED_NAMES = frozenset(
    {
        "conftest.py", "sitecustomize.py", "usercustomize.py", "tests", "test", "__tests__",
        "testdata", "__snapshots__", "__mocks__", "__pycache__", "spec", "specs",
        "pytest.ini", ".pytest.ini", "pytest.toml", "tox.ini", "noxfile.py", "nose2.cfg",
        ".noserc", "phpunit.xml", "phpunit.xml.dist", ".rspec", ".mocharc", "nextest.toml",
    }
)  # fmt: skip
PROTECTED_STARTS = ("test_", "jest.config", "vitest.config", "vitest.workspace", ".mocharc.",
                    "karma.conf", "jest.setup", "vitest.setup", "jest-setup")  # fmt: skip
PROTECTED_ENDS = ("_test.py", ".pth", ".pyc", "_test.go", "_spec.rb")
PROTECTED_MIDDLES = (".test.", ".spec.")
SHADOWS = frozenset(
    {"pytest", "_pytest", "py", "pluggy", "iniconfig", "unittest", "nose", "nose2", "xdist"}
)
"""Modules that a file at the repository's top would stand in for."""
FOREIGN = frozenset({".venv", "venv", "node_modules", "site-packages", "dist-packages", ".tox"})
"""Folders of installed code: no fix adds a file there."""


def is_protected(path):
    """True for tests, and for files that steer an interpreter or a runner."""
    if "/" not in path and path.removesuffix(".py") in SHADOWS:
        return True
    if path.partition("/")[0] in SHADOWS:
        return True
    return any(
        part in PROTECTED_NAMES
        or part.startswith(PROTECTED_STARTS)
        or part.endswith(PROTECTED_ENDS)
        or any(middle in part for middle in PROTECTED_MIDDLES)
        or part.endswith((".egg-info", ".dist-info"))
        for part in path.split("/")
    )


def is_foreign(path):
    return not FOREIGN.isdisjoint(path.split("/"))


def steering(path, content):
    """What in a file of several purposes steers a runner; equal values may be kept.

    None for a file that steers none. A file that cannot be read is compared as a whole.
    """
    name = path.rpartition("/")[2]
    reader = READERS.get(name)
    if reader is None:
        return None
    try:
        return reader(content.decode())
    except (ValueError, RecursionError, configparser.Error):
        return content


def _pyproject(text):
    tools = tomllib.loads(text).get("tool", {})
    keys = ("pytest", "nose", "tox", "coverage", "hatch", "poe", "nox")
    project = tomllib.loads(text).get("project", {})
    return {key: tools.get(key) for key in keys}, project.get("entry-points")


def _setup_cfg(text):
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    names = ("tool:pytest", "pytest", "aliases", "nosetests", "unittest", "options.entry_points")
    return {name: dict(parser[name]) for name in names if parser.has_section(name)}


def _package_json(text):
    document = json.loads(text)
    scripts = document.get("scripts", {})
    tests = {name: line for name, line in scripts.items() if "test" in name}
    runners = ("jest", "mocha", "ava", "vitest", "tap", "c8", "nyc", "karma")
    return tests, {name: document.get(name) for name in runners}


def _go_mod(text):
    return re.findall(r"(?m)^(?:toolchain|replace|tool)\b.*$", text)


def _cargo(text):
    document = tomllib.loads(text)
    keys = ("test", "bench", "lib", "patch", "profile")
    return {key: document.get(key) for key in keys}


def _makefile(text):
    return text


READERS = {
    "pyproject.toml": _pyproject,
    "setup.cfg": _setup_cfg,
    "package.json": _package_json,
    "go.mod": _go_mod,
    "Cargo.toml": _cargo,
    "Makefile": _makefile,
    "GNUmakefile": _makefile,
    "makefile": _makefile,
}
