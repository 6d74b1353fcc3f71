"""Which lines of a fix or of hidden tests give it away, and where in a tree of files they stand.

Invariant: a line that the base itself holds proves nothing and is never looked for. Files are read
as bytes, archives are looked into, nothing is executed.
"""

import io
import re
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmix.tasks.sources.patches import added_lines

MIN_CHARS = 16
"""Shorter lines stand in too many files by chance."""
MAX_LINES = 400
MAX_FILE_BYTES = 512 << 20
MAX_MEMBER_BYTES = 64 << 20
_COMMON = re.compile(
    r"(?:from\s+[\w.]+\s+)?import\b|#\s*include\b|package\b|use\s|using\s|@?require|export\s+\*"
    r"|(?:const|let|var)\s.*\brequire\(|[#/*]*\s*(?:copyright|license)|#!",
    re.IGNORECASE,
)
"""Starts of lines that many files share whatever they fix."""
ARCHIVES = (".whl", ".zip", ".egg", ".jar", ".conda", ".nupkg", ".war")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".crate", ".tar.zst")


@dataclass(frozen=True, kw_only=True, slots=True)
class Find:
    """A line in a place where it should not be."""

    path: str
    """Relative path of the file; `archive!member` inside an archive."""
    line: str


def telling_lines(diff: str, base_files: Iterable[bytes]) -> tuple[bytes, ...]:
    """Added lines of a diff that are long enough and that no base file holds."""
    lines = {line.strip() for line in added_lines(diff)}
    wanted = [line.encode() for line in sorted(lines) if _tells(line)]
    for content in base_files:
        if not wanted:
            break
        wanted = [line for line in wanted if line not in content]
    return tuple(wanted[:MAX_LINES])


def _tells(line: str) -> bool:
    if _COMMON.match(line):
        return False
    letters = sum(letter.isalnum() for letter in line)
    return len(line) >= MIN_CHARS and letters >= MIN_CHARS // 2


def find_lines(files: Iterable[tuple[str, Path]], lines: tuple[bytes, ...]) -> list[Find]:
    """The first telling line of every file that holds one."""
    if not lines:
        return []
    return [find for path, file in files for find in _in_file(path, file, lines)]


def _in_file(path: str, file: Path, lines: tuple[bytes, ...]) -> Iterator[Find]:
    if file.stat().st_size > MAX_FILE_BYTES:
        return
    content = file.read_bytes()
    found = first_of(content, lines)
    if found:
        yield Find(path=path, line=found)
    elif file.name.endswith((*ARCHIVES, *TARS)) or content[:2] == b"\x1f\x8b":
        for member, inner in _members(content, file.name):
            found = first_of(inner, lines)
            if found:
                yield Find(path=f"{path}!{member}", line=found)
                return


def first_of(content: bytes, lines: tuple[bytes, ...]) -> str:
    return next((line.decode() for line in lines if line in content), "")


def _members(content: bytes, name: str) -> Iterator[tuple[str, bytes]]:
    """Files inside an archive; what cannot be read has none."""
    try:
        if name.endswith(ARCHIVES) or content[:4] == b"PK\x03\x04":
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                for entry in archive.infolist():
                    if not entry.is_dir() and entry.file_size <= MAX_MEMBER_BYTES:
                        yield entry.filename, archive.read(entry)
            return
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isreg() else None
                if stream is not None and member.size <= MAX_MEMBER_BYTES:
                    yield member.name, stream.read()
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError, zlib.error, RuntimeError):
        plain = _gunzipped(content)
        if plain is not None:
            yield "content", plain


def _gunzipped(content: bytes) -> bytes | None:
    try:
        return zlib.decompressobj(31).decompress(content, MAX_MEMBER_BYTES)
    except zlib.error:
        return None
