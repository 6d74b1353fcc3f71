"""Runs commands as a user does: in a process of their own, in a folder of their own."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Done = subprocess.CompletedProcess[str]


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., Done]:
    """Run Python code with arguments in `tmp_path`."""

    def run(code: str, *arguments: str) -> Done:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=False,
        )

    return run


@pytest.fixture
def rlmix(python: Callable[..., Done]) -> Callable[..., Done]:
    """Run `rlmix ARGS` in `tmp_path`."""

    def run(*arguments: str) -> Done:
        return python("from rlmix.cli import main; main()", *arguments)

    return run
