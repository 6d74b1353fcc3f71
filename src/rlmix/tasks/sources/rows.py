"""Rows of local files: parquet, JSONL, JSON; and a strict view of one row's columns.

Invariant: a value is decoded or refused, never guessed and never evaluated. All problems of a row
are found at once.
"""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlmix.core.errors import DataError
from rlmix.tasks.record import BadRow

_HALF = re.compile(r"[\ud800-\udfff]")
SUFFIXES = (".parquet", ".jsonl", ".json")
_BATCH_ROWS = 256
MAX_ROW_BYTES = 64 << 20
"""A hundred times the longest row of any known set; more is a file without line ends."""
_SKIP_BYTES = 1 << 20
WHOLE_ROW = "row"


def data_files(path: Path) -> list[Path]:
    """`path` itself, or the data files below the folder, sorted by name.

    Raises:
        DataError: nothing there.
    """
    if path.is_file() and path.suffix in SUFFIXES:
        return [path]
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        inside = {p: p.relative_to(path).parts for p in found}
        found = [p for p in found if not any(part.startswith(".") for part in inside[p])]
        if found:
            return found
    raise DataError(
        f"tasks.path={path}: no data there; allowed: a file ending in {', '.join(SUFFIXES)}, or a "
        "folder with such files"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Broken:
    """A row that cannot even be decoded; the rows around it can."""

    column: str
    """The column that breaks; `row` where the whole line does."""
    problem: str


def read_rows(file: Path) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """(row number from 0, columns) of one file; a row that cannot be decoded says why.

    Raises:
        DataError: the file as a whole is not what its name says.
    """
    if file.suffix == ".parquet":
        yield from _parquet(file)
    elif file.suffix == ".jsonl":
        yield from _lines(file)
    else:
        document = _decoded(file.read_bytes())
        if isinstance(document, Broken):
            raise DataError(f"{file}: {document.problem}")
        rows = document if isinstance(document, list) else [document]
        for number, row in enumerate(rows):
            yield number, row if isinstance(row, dict) else NO_OBJECT


NO_OBJECT = Broken(column=WHOLE_ROW, problem="not a JSON object")


def _lines(file: Path) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    """A line is a row; one that is too long is passed over without being held in memory."""
    with file.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_ROW_BYTES + 1):
            is_long = len(line) > MAX_ROW_BYTES and not line.endswith(b"\n")
            while is_long and (rest := stream.readline(_SKIP_BYTES)) and not rest.endswith(b"\n"):
                pass
            if is_long:
                limit = MAX_ROW_BYTES >> 20
                yield number, Broken(column=WHOLE_ROW, problem=f"longer than {limit} MiB")
            elif line.strip():
                row = _decoded(line)
                yield number, row if isinstance(row, dict | Broken) else NO_OBJECT
            number += 1


def _parquet(file: Path) -> Iterator[tuple[int, dict[str, Any] | Broken]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading parquet needs pyarrow; install it") from None
    try:
        table = pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file}: cannot be read as parquet: {error}") from None
    with table:
        number = 0
        for group in range(table.num_row_groups):
            end = number + table.metadata.row_group(group).num_rows
            try:
                for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group]):
                    for row in range(batch.num_rows):
                        yield number, _columns(batch, row)
                        number += 1
            except (pyarrow.ArrowException, OSError) as error:
                said = f"rows {number} to {end - 1} cannot be read: {error}"
                yield number, Broken(column=WHOLE_ROW, problem=said)
            number = end


def _columns(batch: Any, row: int) -> dict[str, Any] | Broken:
    values: dict[str, Any] = {}
    for name in batch.schema.names:
        try:
            values[name] = batch.column(name)[row].as_py()
        except (ValueError, OverflowError) as error:  # Text that is no UTF-8, times out of range.
            return Broken(column=name, problem=f"cannot be decoded: {error}")
    return values


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        return Broken(column=WHOLE_ROW, problem=f"no valid JSON: {error}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two values under one name nobody can say which is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} stands twice in one object")
    return found


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
        if "\0" in value or _HALF.search(value):
            self.refuse(column, "holds a NUL or half of a surrogate pair, which is no text")
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
