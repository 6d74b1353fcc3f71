"""What travels between `remote` and `server`: JSON, and plain bytes for diffs and programs.

Invariant: nothing that arrives is executed or unpickled by either end; a program for a sandbox is
passed on as bytes and opened only inside.
"""

import base64
import dataclasses
import json
import sys
from typing import Any

from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit, PreparedRepository, Repository
from rlmix.sandbox.protocol import CommandResult, PythonResult, SandboxLimits

VERSION = 1
"""Of this protocol; both ends must say the same."""
TOKEN_VARIABLE = "RLMIX_SANDBOX_TOKEN"
"""Environment variable that holds the token, at both ends."""
MIN_TOKEN_CHARS = 16
KIND_WORK_TREE, KIND_SANDBOX, KIND_FULL = "work_tree", "sandbox", "full"
"""Whose fault an error is: the agent's, the machine's, or nobody's: there is no room."""
PYTHON = f"{sys.implementation.cache_tag}"
"""Marshalled code is read by the same minor version only."""


def dump(value: object) -> bytes:
    # Escapes keep halves of surrogate pairs, which a model can write and UTF-8 cannot hold.
    return json.dumps(value, ensure_ascii=True).encode()


def load(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`.

    Raises:
        SandboxError: it is none.
    """
    try:
        value = json.loads(data)
    except ValueError as error:
        raise SandboxError(f"sandbox server: {data[:80]!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise SandboxError(f"sandbox server: got {type(value).__name__}; a JSON object is expected")
    return value


def dump_repository(repository: Repository) -> dict[str, Any]:
    """A history travels whole; of a prepared repository only its place, on a store that both
    machines see."""
    if isinstance(repository, PreparedRepository):
        return {"prepared": dataclasses.asdict(repository)}
    return {"history": [dataclasses.asdict(commit) for commit in repository]}


def load_repository(row: dict[str, Any]) -> Repository:
    if "prepared" in row:
        row = row["prepared"]
        return PreparedRepository(**{**row, "writable": tuple(row["writable"])})
    return tuple(Commit(**commit) for commit in row["history"])


def dump_limits(limits: SandboxLimits) -> dict[str, Any]:
    return dataclasses.asdict(limits)


def load_limits(row: dict[str, Any]) -> SandboxLimits:
    return SandboxLimits(**row)


def dump_result(result: CommandResult) -> dict[str, Any]:
    return dataclasses.asdict(result)


def load_result(row: dict[str, Any]) -> CommandResult:
    return CommandResult(**row)


def dump_python_result(result: PythonResult) -> dict[str, Any]:
    row = dataclasses.asdict(result)
    return {**row, "report": base64.b64encode(result.report).decode()}


def load_python_result(row: dict[str, Any]) -> PythonResult:
    return PythonResult(**{**row, "report": base64.b64decode(row["report"])})
