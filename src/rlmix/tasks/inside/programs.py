"""Joins the parts of a program for the sandbox and compiles them once per process."""

import re
from functools import cache
from pathlib import Path
from types import CodeType

_OWN_IMPORT = re.compile(r"^from rlmix\.\S+ import (?:\([^)]*\)|.*)$", re.MULTILINE)
SHARED = ("tree.py", "protected.py", "restore.py")
PARTS: dict[str, tuple[str, ...]] = {
    "files": ("tree.py",),
    "unittest": SHARED,
    "command": (*SHARED, "processes.py", "submission.py"),
    "harbor": (*SHARED, "processes.py", "submission.py"),
    "pro": (*SHARED, "processes.py", "submission.py"),
}
"""Files whose definitions stand in front of a program's own."""


@cache
def program(name: str) -> CodeType:
    """The program `name`_main.py with its shared parts.

    It finds two globals, `data` and `report_fd`, as `Sandbox.run_python` gives them.
    """
    folder = Path(__file__).parent
    text = "\n".join((folder / part).read_text() for part in (*PARTS[name], f"{name}_main.py"))
    # Imports of the parts from each other name what the joined text already defines.
    text = _OWN_IMPORT.sub("", text)
    return compile(text, f"verdict_{name}", "exec", dont_inherit=True)
