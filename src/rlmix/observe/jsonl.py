"""JSON Lines files with one writer and any number of readers.

Invariant: a line is there whole or not at all. Each append is one write of one line to a file
opened for appending; a line cut short by a crash or a full disk is removed when the file is
opened again, and readers never see it.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson

from rlmix.core.errors import DataError, RlmixError
from rlmix.observe.redact import Redactor

_OPTIONS = orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY
_TAIL_CHUNK_BYTES = 1 << 16


class JsonlWriter:
    """Appends records. One per file and run: the caller holds the run's lock."""

    def __init__(self, path: Path, *, redactor: Redactor | None = None) -> None:
        self.path = path
        self._redactor = redactor
        self._file = _open_to_append(path)
        self.repaired_bytes = _repair_tail(self._file)
        """Length of the torn last line that was removed at opening; 0 for a sound file."""

    def append(self, record: dict[str, Any]) -> None:
        """Write one line.

        Raises:
            RlmixError: the disk refused it; the file keeps its whole lines.
            TypeError: a value is neither JSON nor numpy.
        """
        line = orjson.dumps(record, option=_OPTIONS)
        if self._redactor is not None:
            line = self._redactor.line(line)
        size_before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            while written < len(line):
                written += os.write(self._file, line[written:])
        except OSError as error:
            os.ftruncate(self._file, size_before)
            raise RlmixError(
                f"{self.path}: could not append {len(line)} bytes ({error.strerror}); "
                "free space on that disk, then `rlmix train --resume` this run"
            ) from error

    def reopen(self) -> None:
        """Follow the path after the file was replaced."""
        self.close()
        self._file = _open_to_append(self.path)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Records of a file, in order; an unterminated last line is left out.

    A missing file has no records.

    Raises:
        DataError: a line that is not the last one is no JSON object.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            if line.isspace():
                continue
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise DataError(f"{path} line {number}: not JSON ({error})") from error
            if not isinstance(record, dict):
                raise DataError(f"{path} line {number}: expected a JSON object")
            yield record


def read_last(path: Path) -> dict[str, Any] | None:
    """Last whole record without reading the file from its start; None when there is none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    with file:
        end = file.seek(0, os.SEEK_END)
        tail = b""
        while end > 0:
            start = max(0, end - _TAIL_CHUNK_BYTES)
            file.seek(start)
            tail = file.read(end - start) + tail
            end = start
            lines = tail[: tail.rfind(b"\n") + 1].splitlines()
            # The first piece may be the tail of a longer line, unless the file begins here.
            whole = lines if start == 0 else lines[1:]
            if whole:
                record: dict[str, Any] = orjson.loads(whole[-1])
                return record
    return None


def replace_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Put a new file in the place of an old one, whole or not at all."""
    write_atomically(path, b"".join(orjson.dumps(record, option=_OPTIONS) for record in records))


def valid_text(text: str) -> str:
    """Text that JSON can hold: undecodable bytes of a program's output become `?`."""
    return text.encode("utf-8", "replace").decode()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def _open_to_append(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _repair_tail(file: int) -> int:
    size = os.fstat(file).st_size
    if size == 0:
        return 0
    end, tail = size, b""
    while end > 0 and b"\n" not in tail:
        start = max(0, end - _TAIL_CHUNK_BYTES)
        tail = os.pread(file, end - start, start) + tail
        end = start
    torn_bytes = len(tail) - (tail.rfind(b"\n") + 1)
    if torn_bytes:
        os.ftruncate(file, size - torn_bytes)
    return torn_bytes
