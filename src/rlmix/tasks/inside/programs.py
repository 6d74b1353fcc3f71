"""Joins the parts of a program for the sandbox and compiles them once per process."""

from functools import cache
from pathlib import Path
from types import CodeType

PARTS = ("tree.py", "protected.py", "restore.py")
"""Definitions that every program shares, in front of its own."""


@cache
def program(name: str) -> CodeType:
    """The program `name`_main.py with its shared parts.

    It finds two globals, `data` and `report_fd`, as `Sandbox.run_python` gives them.
    """
    folder = Path(__file__).parent
    text = "\n".join((folder / part).read_text() for part in (*PARTS, f"{name}_main.py"))
    # Imports of the parts from each other name what the joined text already defines.
    lines = [line for line in text.split("\n") if not line.startswith("from rlmix.")]
    return compile("\n".join(lines), f"verdict_{name}", "exec", dont_inherit=True)
