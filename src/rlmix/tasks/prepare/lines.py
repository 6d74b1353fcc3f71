"""Which lines of a fix or of hidden tests give it away, and where in a tree of files they stand.

Invariant: a line that the base itself holds proves nothing and is never looked for. Files are read
as bytes, nothing is executed.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rlmix.tasks.prepare.archives import LEAST_PATTERN, Search, TooLarge, squeezed
from rlmix.tasks.sources.patches import added_lines

MIN_CHARS = 16
"""Shorter lines stand in too many files by chance."""
MAX_LINES = 400
_COMMON = re.compile(
    r"(?:from\s+[\w.]+\s+)?import\b|#\s*include\b|package\b|use\s|using\s|@?require\b|export\s+\*"
    r"|(?:const|let|var)\s.*\brequire\(|[#/*]*\s*(?:copyright|license)|#!",
    re.IGNORECASE,
)
"""Starts of lines that many files share whatever they fix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Find:
    """A line in a place where it should not be."""

    path: str
    """Relative path of the file."""
    line: str
    member: str = ""
    """Its place in an archive, or in one inside another (`inner.whl!pack/a.py`)."""
    is_unread: bool = False
    """No line was found, and none can be ruled out: it cannot be unpacked, or not all of it."""

    def sentence(self) -> str:
        place = f"{self.path}!{self.member}" if self.member else self.path
        if self.is_unread:
            return f"{place} cannot be looked through for lines of the fix"
        return f"{place} holds a line of the fix or of a hidden test: {self.line}"


def telling_lines(diff: str, base_files: Iterable[bytes]) -> tuple[bytes, ...]:
    """Added lines of a diff that are long enough and that no base file holds."""
    lines = {line.strip() for line in added_lines(diff)}
    # The longest ones: they are the least likely to stand somewhere by chance.
    telling = sorted((line for line in lines if _tells(line)), key=lambda line: (-len(line), line))
    wanted = [line.encode() for line in telling]
    for content in base_files:
        if not wanted:
            break
        plain = squeezed(content)
        wanted = [line for line in wanted if squeezed(line) not in plain]
    return tuple(wanted[:MAX_LINES])


def _tells(line: str) -> bool:
    if _COMMON.match(line):
        return False
    letters = sum(letter.isalnum() for letter in line)
    return (
        len(squeezed(line.encode())) >= LEAST_PATTERN
        and len(line) >= MIN_CHARS
        and letters >= MIN_CHARS // 2
    )


def find_lines(files: Iterable[tuple[str, Path]], lines: tuple[bytes, ...]) -> list[Find]:
    """The first telling line of every file that holds one, and files that nobody can look into."""
    if not lines:
        return []
    return [find for path, file in files for find in _in_file(path, file, lines)]


def _in_file(path: str, file: Path, lines: tuple[bytes, ...]) -> Iterator[Find]:
    search = Search(lines)
    try:
        with file.open("rb") as stream:
            found = search.find(stream)
    except TooLarge:
        yield Find(path=path, line="", is_unread=True)
        return
    if found is not None:
        yield Find(path=path, member=found[0], line=found[1])
    elif search.has_unread:
        yield Find(path=path, line="", is_unread=True)
