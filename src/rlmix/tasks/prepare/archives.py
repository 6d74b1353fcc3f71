"""Looks for lines in a file and in every archive inside it, however deep, with bounded memory.

Invariant: what is unpacked is counted; a file that unpacks to more than anybody needs is told as
not looked through, never as clean.
"""

import bz2
import gzip
import lzma
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO

MAX_DEPTH = 4
MAX_UNPACKED_BYTES = 2 << 30
"""Of one file of the image, over all archives in it."""
IN_MEMORY_BYTES = 16 << 20
CHUNK_BYTES = 4 << 20
ZSTD = b"\x28\xb5\x2f\xfd"
_FAULTS = (
    zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError,
    RuntimeError, ValueError, NotImplementedError,
)  # fmt: skip
"""What a damaged or encrypted archive raises. Nobody can unpack it, so it tells nothing."""


class TooLarge(Exception):
    """It unpacks to more than `MAX_UNPACKED_BYTES`, or archives lie deeper than `MAX_DEPTH`."""


class Search:
    """One file of the image."""

    def __init__(self, lines: tuple[bytes, ...], *, most_bytes: int = MAX_UNPACKED_BYTES) -> None:
        self._lines = lines
        self._overlap = max(map(len, lines)) - 1
        self._left = most_bytes
        self.has_zstd = False
        """Something in it is compressed in a way that the standard library cannot read."""

    def find(self, stream: IO[bytes], depth: int = 0) -> tuple[str, str] | None:
        """(member, line) of the first find; the member is empty for the file itself.

        Raises:
            TooLarge: it was not looked through.
        """
        found = self._in_content(stream)
        if found:
            return "", found
        for member, inner in self._members(stream):
            if depth == MAX_DEPTH:
                raise TooLarge
            with tempfile.SpooledTemporaryFile(max_size=IN_MEMORY_BYTES) as copy:
                self._unpack(inner, copy)
                copy.seek(0)
                deeper = self.find(copy, depth + 1)  # type: ignore[arg-type]
            if deeper:
                return "!".join(part for part in (member, deeper[0]) if part), deeper[1]
        return None

    def _in_content(self, stream: IO[bytes]) -> str:
        stream.seek(0)
        kept = b""
        while chunk := stream.read(CHUNK_BYTES):
            content = kept + chunk
            for line in self._lines:
                if line in content:
                    return line.decode("utf-8", "replace")
            kept = content[-self._overlap :] if self._overlap else b""
        return ""

    def _unpack(self, source: IO[bytes], target: IO[bytes]) -> None:
        """Copy; a damaged end leaves what could be read."""
        while True:
            try:
                chunk = source.read(min(CHUNK_BYTES, self._left + 1))
            except _FAULTS:
                return
            if not chunk:
                return
            self._left -= len(chunk)
            if self._left < 0:
                raise TooLarge
            target.write(chunk)

    def _members(self, stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
        stream.seek(0)
        start = stream.read(265)
        is_zip = zipfile.is_zipfile(stream)  # Also one behind a program that unpacks itself.
        stream.seek(0)
        try:
            if is_zip:
                yield from _zipped(stream)
            elif start[257:262] == b"ustar":
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    for entry in tar:
                        inner = tar.extractfile(entry) if entry.isreg() else None
                        if inner is not None:
                            yield entry.name, inner
            elif start[:2] == b"\x1f\x8b":
                with gzip.GzipFile(fileobj=stream) as plain:
                    yield "content", plain  # type: ignore[misc]
            elif start[:3] == b"BZh":
                with bz2.BZ2File(stream) as plain:
                    yield "content", plain
            elif start[:6] == b"\xfd7zXZ\0":
                with lzma.LZMAFile(stream) as plain:
                    yield "content", plain
            elif start[:4] == ZSTD:
                self.has_zstd = True
        except _FAULTS:
            return


def _zipped(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(stream) as archive:
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            try:
                inner = archive.open(entry)
            except _FAULTS:
                continue  # Encrypted, or packed in a way that nobody here reads.
            with inner:
                yield entry.filename, inner
