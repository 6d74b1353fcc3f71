"""What a git diff says about itself, read without applying it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePosixPath

_HEADER = re.compile(r"^diff --git (?=.)", re.MULTILINE)
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb"\\([0-7]{3}|.)", re.DOTALL)
_LETTERS = {
    b"n": b"\n",
    b"t": b"\t",
    b"r": b"\r",
    b"a": b"\a",
    b"b": b"\b",
    b"f": b"\f",
    b"v": b"\v",
}
_BODY = ("@@ ", "GIT binary patch", "Binary files ")
_TEST_NAME = re.compile(
    r"(^|/)(tests?|testing|__tests__|specs?)(/|$)|(^|/)test_|_test\.|\.test\.|\.spec\."
)
LANGUAGES = {
    ".py": "python", ".go": "go", ".js": "javascript", ".jsx": "javascript", ".mjs": "javascript",
    ".ts": "typescript", ".tsx": "typescript", ".rs": "rust", ".java": "java", ".kt": "kotlin",
    ".rb": "ruby", ".php": "php", ".c": "c", ".cc": "c++", ".cpp": "c++", ".h": "c",
    ".cs": "c#", ".scala": "scala", ".swift": "swift", ".sh": "shell",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What a diff does to one file."""

    path: str
    """After the change; of a deletion, before it. As on disk, quotes and escapes undone."""
    makes_path: bool
    """The path was not there before: a new file, a copy, or the new name of a rename."""


def changes_in(diff: str) -> Iterator[Change]:
    """One change per file that a git diff names, in its order."""
    starts = [match.start() for match in _HEADER.finditer(diff)]
    for start, end in pairwise([*starts, len(diff)]):
        first, *lines = diff[start:end].split("\n")
        path, makes_path = "", False
        for line in lines:
            if line.startswith(_BODY):
                break
            word, _, rest = line.partition(" ")
            if line.startswith(("rename to ", "copy to ")):
                path, makes_path = _plain(line.partition(" to ")[2]), True
            elif line.startswith("new file mode"):
                makes_path = True
            elif word in ("---", "+++") and rest != "/dev/null":
                path = _plain(rest.removesuffix("\t")).partition("/")[2]
        yield Change(
            path=path or _of_header(first.removeprefix("diff --git ")), makes_path=makes_path
        )


def _plain(name: str) -> str:
    """A name as on disk: git writes odd ones in quotes, byte by byte."""
    match = _QUOTED.fullmatch(name)
    if match is None:
        return name
    inner = match[1].encode("utf-8", "surrogateescape")

    def byte(found: re.Match[bytes]) -> bytes:
        text = found[1]
        return bytes([int(text, 8) & 0xFF]) if len(text) == 3 else _LETTERS.get(text, text)

    return _ESCAPE.sub(byte, inner).decode("utf-8", "surrogateescape")


def _of_header(names: str) -> str:
    """The path of `a/PATH b/PATH`, which is all that a change of mode or an empty file has."""
    if names.endswith('"'):
        return _plain(names[names.rindex(' "') + 1 :]).partition("/")[2]
    half = len(names) // 2
    if names[half : half + 1] == " " and names[2:half] == names[half + 3 :]:
        return names[2:half]
    return names.rpartition(" b/")[2]


def paths_in(diff: str) -> tuple[str, ...]:
    """Paths after the change, in order; paths of deletions too."""
    return tuple(dict.fromkeys(change.path for change in changes_in(diff)))


def is_diff(text: str) -> bool:
    return bool(_HEADER.search(text))


def language_of(paths: tuple[str, ...]) -> str:
    """The language that most paths are written in; empty when none is known."""
    known = [LANGUAGES.get(PurePosixPath(path).suffix, "") for path in paths]
    known = [name for name in known if name]
    return max(known, key=lambda name: (known.count(name), name)) if known else ""


def tests_among(paths: tuple[str, ...]) -> tuple[str, ...]:
    """Paths that look like tests."""
    return tuple(path for path in paths if _TEST_NAME.search(path))


def added_lines(diff: str) -> tuple[str, ...]:
    """Lines that a diff adds, without their mark."""
    return tuple(line for _, lines in added_by_file(diff) for line in lines)


def added_by_file(diff: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """(paths before and after, lines added without their mark) of each file that a diff changes."""
    starts = [match.start() for match in _HEADER.finditer(diff)]
    for start, end in pairwise([*starts, len(diff)]):
        section = diff[start:end]
        head, mark, body = section.partition("\n@@ ")
        old = [
            _plain(line.removeprefix("rename from "))
            for line in head.split("\n")
            if line.startswith("rename from ")
        ]
        lines = body.split("\n") if mark else []
        added = tuple(line[1:] for line in lines if line.startswith("+"))
        yield (*old, *paths_in(section)), added


def reversed_lines(diff: str) -> str:
    """The diff with what it adds and what it removes exchanged; its heads stay as they are."""
    swapped = {"+": "-", "-": "+"}
    out: list[str] = []
    in_body = False
    for line in diff.split("\n"):
        in_body = not line.startswith("diff --git ") and (in_body or line.startswith("@@ "))
        out.append(swapped.get(line[:1], line[:1]) + line[1:] if in_body else line)
    return "\n".join(out)
