"""Rows of local files: parquet, JSONL, JSON; and a strict view of one row's columns.

Invariant: a value is decoded or refused, never guessed and never evaluated. All problems of a row
are found at once.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmix.core.errors import DataError
from rlmix.tasks.record import BadRow

SUFFIXES = (".parquet", ".jsonl", ".json")
_BATCH_ROWS = 256


def data_files(path: Path) -> list[Path]:
    """`path` itself, or the data files below the folder, sorted by name.

    Raises:
        DataError: nothing there.
    """
    if path.is_file() and path.suffix in SUFFIXES:
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        found = [p for p in found if not any(part.startswith(".") for part in p.parts)]
        if found:
            return found
    raise DataError(
        f"tasks.path={path}: no data there; allowed: a file ending in {', '.join(SUFFIXES)}, or a "
        "folder with such files"
    )


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 0, columns) of one file.

    Raises:
        DataError: the file cannot be read as what its name says, with the line.
    """
    if file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix == ".jsonl":
        for number, line in enumerate(file.read_bytes().split(b"\n")):
            if line.strip():
                yield number, _object(file, number, line)
    else:
        document = _decoded(file, 0, file.read_bytes())
        rows = document if isinstance(document, list) else [document]
        for number, row in enumerate(rows):
            if not isinstance(row, dict):
                raise DataError(f"{file}, row {number}: not a JSON object")
            yield number, row


def _parquet(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading parquet needs the package pyarrow; install it") from None
    try:
        number = 0
        with pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as parquet: {error}") from None


def _object(file: Path, number: int, line: bytes) -> dict[str, Any]:
    row = _decoded(file, number, line)
    if not isinstance(row, dict):
        raise DataError(f"{file}, row {number}: not a JSON object")
    return row


def _decoded(file: Path, number: int, data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}, row {number}: no valid JSON: {error}") from None


def names_of(value: Any) -> tuple[str, ...]:
    """A list of names: a list, or its text as JSON or as a Python literal.

    Raises:
        ValueError: anything else, or an entry that is no text.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            try:
                value = ast.literal_eval(value)
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                raise ValueError("neither a JSON nor a Python list") from None
    if value is None:
        return ()
    if not isinstance(value, list | tuple) or not all(isinstance(name, str) for name in value):
        raise ValueError("not a list of texts")
    return tuple(dict.fromkeys(value))


@dataclass
class Row:
    """One row while it is read; collects every problem."""

    file: str
    number: int
    values: dict[str, Any]
    task_id: str = ""
    problems: list[BadRow] = field(default_factory=list)

    def refuse(self, column: str, problem: str) -> None:
        self.problems.append(
            BadRow(
                file=self.file,
                row=self.number,
                column=column,
                problem=problem,
                task_id=self.task_id,
            )
        )

    def text(self, column: str, *, needed: bool = True) -> str:
        """A text; a needed one must have a letter."""
        value = self.values.get(column)
        if value is None and not needed:
            return ""
        if not isinstance(value, str):
            said = "missing" if value is None else f"a {type(value).__name__}, not a text"
            self.refuse(column, said)
            return ""
        if needed and not value.strip():
            self.refuse(column, "empty")
        return value

    def number_of(self, column: str, default: int | None = None) -> int:
        value = self.values.get(column, default)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(column, "missing" if value is None else f"{value!r} is no whole number")
            return 0
        if value <= 0:
            self.refuse(column, f"{value} is not above 0")
        return value

    def names(self, column: str, *, needed: bool = True) -> tuple[str, ...]:
        """Names of a list column; a needed one must not be empty."""
        if column not in self.values:
            self.refuse(column, "missing")
            return ()
        try:
            names = names_of(self.values[column])
        except ValueError as error:
            self.refuse(column, str(error))
            return ()
        if needed and not names:
            self.refuse(column, "an empty list; a task needs at least one test that must pass")
        return names

    def inner(self, column: str) -> "Row":
        """The row inside a column: an object, or its JSON text. Problems are shared."""
        value = self.values.get(column)
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                self.refuse(column, f"no valid JSON: {error}")
                value = {}
        if not isinstance(value, dict):
            self.refuse(column, "missing" if value is None else "not an object")
            value = {}
        return Row(self.file, self.number, value, self.task_id, self.problems)
