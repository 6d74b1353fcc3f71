"""Looks for lines in a file and in every archive inside it, however deep, with bounded memory.

Invariant: what is unpacked is counted; a file that unpacks to more than anybody needs is told as
not looked through, never as clean.
"""

import base64
import bz2
import html
import io
import json
import lzma
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from functools import lru_cache
from typing import IO

MAX_DEPTH = 4
MAX_UNPACKED_BYTES = 2 << 30
"""Of one file of the image, over all archives in it."""
MAX_FILE_BYTES = 4 << 30
"""Of one plain file; a sparse one can seem endless."""
MAX_ENCODED, LEAST_PATTERN = 20, 12
IN_MEMORY_BYTES = 16 << 20
CHUNK_BYTES, SLICE_BYTES = 4 << 20, 1 << 16
GZIP = 16 + zlib.MAX_WBITS
UNREAD = (
    b"\x28\xb5\x2f\xfd", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a\x07", b"\x04\x22\x4d\x18", b"\x1f\x9d",
    b"hsqs", b"\xed\xab\xee\xdb", b"LZIP", b"MSCF", b"\x89LZO\0", b"xar!", b"LRZI",
    b"PACK\0\0\0\2", b"PACK\0\0\0\3", b"# v2 git bundle\n", b"# v3 git bundle\n", b"HG10", b"HG20",
)  # fmt: skip
"""Starts of zstd, 7z, rar, lz4, compress, squashfs, rpm, lzip, cab, lzop, xar and lrzip, which no
standard library reads, and of packed histories, whose streams lie somewhere inside."""
AR = b"!<arch>\n"
_FAULTS = (
    zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, zlib.error, lzma.LZMAError,
    RuntimeError, ValueError, NotImplementedError,
)  # fmt: skip
"""What a damaged or encrypted archive raises. Nobody can unpack it, so it tells nothing."""


class TooLarge(Exception):
    """It unpacks to more than `MAX_UNPACKED_BYTES`, or archives lie deeper than `MAX_DEPTH`."""


def squeezed(content: bytes) -> bytes:
    """Without white space and NULs: a formatter or UTF-16 changes nothing else in a line."""
    return content.translate(None, b" \t\r\n\f\v\0")


@lru_cache(maxsize=4)
def patterns_of(lines: tuple[bytes, ...]) -> tuple[tuple[bytes, bytes], ...]:
    """(what is looked for in squeezed content, the line that it stands for): each line, and the
    longest ones in base64 (at its three alignments) and hex as well."""
    found = [(squeezed(line), line) for line in lines]
    for line in sorted(lines, key=len, reverse=True)[:MAX_ENCODED]:
        for shift in range(3):
            # Of the first and last group a part belongs to the neighbours.
            code = base64.b64encode(bytes(shift) + line).rstrip(b"=")
            found.append((code[4 if shift else 0 : len(code) - len(code) % 4 - 1], line))
        text = line.decode("utf-8", "replace")
        for written in (json.dumps(text)[1:-1], html.escape(text)):
            found.append((squeezed(written.encode()), line))
        found += [(line.hex().encode(), line), (line.hex().upper().encode(), line)]
    found = [(pattern, line) for pattern, line in found if len(pattern) >= LEAST_PATTERN]
    return tuple(dict(reversed(found)).items())


def holds(name: bytes, lines: tuple[bytes, ...]) -> bool:
    """A name, or where a link leads to, is or contains one of the lines."""
    plain = squeezed(name)
    return any(pattern in plain for pattern, _ in patterns_of(lines))


class Search:
    """One file of the image."""

    def __init__(self, lines: tuple[bytes, ...], *, most_bytes: int = MAX_UNPACKED_BYTES) -> None:
        self._patterns = patterns_of(lines)
        self._overlap = max((len(pattern) for pattern, _ in self._patterns), default=1) - 1
        self._left = most_bytes
        self.has_unread = False
        """Something in it is packed in a way that cannot be read here, or with a password."""

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
        kept = b""
        if stream.seek(0, io.SEEK_END) > MAX_FILE_BYTES:
            raise TooLarge
        stream.seek(0)
        while chunk := stream.read(CHUNK_BYTES):
            content = kept + squeezed(chunk)
            for pattern, line in self._patterns:
                if pattern in content:
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
                yield from self._zipped(stream)
            elif start.startswith(AR):
                yield from _archived(stream)
            elif start[257:262] == b"ustar":
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    for entry in tar:
                        inner = tar.extractfile(entry) if entry.isreg() else None
                        if inner is not None:
                            yield entry.name, inner
            elif start[:2] == b"\x1f\x8b":
                yield "content", Inflated(stream, GZIP)  # type: ignore[misc]
            elif start[:3] == b"BZh":
                with bz2.BZ2File(stream) as plain:
                    yield "content", plain
            elif start[:6] == b"\xfd7zXZ\0" or start[:3] == b"\x5d\0\0":
                with lzma.LZMAFile(stream) as plain:
                    yield "content", plain
            elif is_zlib(start):
                yield "content", Inflated(stream, zlib.MAX_WBITS)  # type: ignore[misc]
            elif start.startswith(UNREAD):
                self.has_unread = True
        except _FAULTS:
            return

    def _zipped(self, stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
        with zipfile.ZipFile(stream) as archive:
            for entry in archive.infolist():
                if entry.is_dir():
                    continue
                try:
                    inner = archive.open(entry)
                except (NotImplementedError, RuntimeError):
                    self.has_unread = True  # Encrypted, or packed in a way that nobody here reads.
                    continue
                except _FAULTS:
                    continue
                with inner:
                    yield entry.filename, inner


def is_zlib(start: bytes) -> bool:
    """The two bytes that a zlib stream begins with, as a git object does."""
    return len(start) > 2 and start[0] == 0x78 and int.from_bytes(start[:2]) % 31 == 0


class Inflated:
    """A zlib or gzip stream, of several members too, as a file to read from once. Of a damaged one
    it gives all that any program could get out of it."""

    def __init__(self, stream: IO[bytes], window: int) -> None:
        stream.seek(0)
        self._stream, self._window = stream, window
        self._inflate = zlib.decompressobj(window)
        self._is_damaged = False

    def read(self, size: int) -> bytes:
        while not self._is_damaged:
            packed = self._inflate.unconsumed_tail or self._inflate.unused_data
            if self._inflate.eof:
                self._inflate = zlib.decompressobj(self._window)
            packed = packed or self._stream.read(SLICE_BYTES)
            if not packed:
                return b""
            before = self._inflate.copy()
            try:
                content = self._inflate.decompress(packed, size)
            except zlib.error:
                self._is_damaged = True
                content = _until_damage(before, packed)
            if content:
                return content
        return b""


def _until_damage(inflate: "zlib._Decompress", packed: bytes) -> bytes:
    content = bytearray()
    try:
        for at in range(len(packed)):
            content += inflate.decompress(packed[at : at + 1])
    except zlib.error:
        pass
    return bytes(content)


def _archived(stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Members of an `ar` archive (Debian packages): a line of 60 bytes, then the content."""
    stream.seek(len(AR))
    while len(head := stream.read(60)) == 60:
        size, place = int(head[48:58]), stream.tell()
        yield (
            head[:16].decode("latin-1").strip(),
            io.BytesIO(stream.read(min(size, IN_MEMORY_BYTES))),
        )
        stream.seek(place + size + size % 2)
