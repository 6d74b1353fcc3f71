"""Traces of simulated fleets as JSON Lines: what is put in, and what comes out.

Every line is an object with `at_s` and `kind`. Kinds that drive a simulation: `session` (turns),
in the order in which sessions start, whatever their time; `lose` (replica), a loss without notice;
`step_s` (value), the trainer's own time for a step from then on. Others tell what happened: `step`,
`scale`, `ready`. Invariant: what a simulation wrote, put in again, gives the same simulation.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlmix.core.errors import DataError
from rlmix.observe.jsonl import JsonlWriter, read_jsonl

DRIVING = {"session": "turns", "lose": "replica", "step_s": "value"}
"""Kind -> field that it needs."""


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The driving lines of a trace, in the order of the file.

    Raises:
        DataError: the file cannot be read, or a line lacks what its kind needs.
    """
    if not path.is_file():
        raise DataError(f"trace {path}: there is no such file; write one with --trace-out")
    lines = []
    for number, line in enumerate(read_jsonl(path), start=1):
        kind = line.get("kind")
        if kind not in DRIVING:
            continue
        at_s, value = line.get("at_s"), line.get(DRIVING[kind])
        is_name = kind == "lose"
        is_number = isinstance(value, int | float) and value > 0
        is_good = isinstance(value, str) if is_name else is_number
        if not isinstance(at_s, int | float) or not is_good:
            raise DataError(
                f"trace {path}, line {number}: {kind} needs at_s and {DRIVING[kind]}"
                f"{' (a name)' if is_name else ' above 0'}; got {line}"
            )
        lines.append(line)
    return lines


def write_trace(path: Path, lines: Iterable[Mapping[str, Any]]) -> int:
    """Returns:
    Lines written; the file is made anew.
    """
    path.unlink(missing_ok=True)
    writer = JsonlWriter(path)
    count = 0
    try:
        for line in lines:
            writer.append(dict(line))
            count += 1
    finally:
        writer.close()
    return count
