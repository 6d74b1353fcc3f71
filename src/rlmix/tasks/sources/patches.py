"""What a git diff says about itself, read without applying it."""

import re
from pathlib import PurePosixPath

_HEADER = re.compile(r'^diff --git (?:"?a/(?P<old>.+?)"?) (?:"?b/(?P<new>.+?)"?)$', re.MULTILINE)
_TEST_NAME = re.compile(
    r"(^|/)(tests?|testing|__tests__|specs?)(/|$)|(^|/)test_|_test\.|\.test\.|\.spec\."
)
LANGUAGES = {
    ".py": "python", ".go": "go", ".js": "javascript", ".jsx": "javascript", ".mjs": "javascript",
    ".ts": "typescript", ".tsx": "typescript", ".rs": "rust", ".java": "java", ".kt": "kotlin",
    ".rb": "ruby", ".php": "php", ".c": "c", ".cc": "c++", ".cpp": "c++", ".h": "c",
    ".cs": "c#", ".scala": "scala", ".swift": "swift", ".sh": "shell",
}  # fmt: skip


def paths_in(diff: str) -> tuple[str, ...]:
    """Paths after the change, in order; paths of deletions too."""
    return tuple(dict.fromkeys(match["new"] for match in _HEADER.finditer(diff)))


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
    lines = diff.split("\n")
    return tuple(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++ "))
