"""Files that are almost, but not quite, a file of the base: what a fix leaves behind as a build
output, a backup or an installed copy, for tasks whose fix nobody can look for by its lines.

Invariant: an exact copy of a base file tells nothing; a file that shares most lines with one and
differs is never taken for harmless.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rlmix.tasks.sources.patches import LANGUAGES

LEAST_SHARE = 0.6
"""Of the lines of the longer of two files. A fix changes few lines of a file; two different files
of one project share their licence and imports, which is less."""
LEAST_LINES = 8
"""Shorter files resemble each other by chance."""
MAX_BYTES = 1 << 20
LEFTOVERS = (".orig", ".rej", ".bak", ".swp", ".swo", ".old", ".save", "~")
"""Ends of names that editors, merges and `patch` leave; nothing needs them to build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NearCopy:
    """A file that differs a little from one of the base."""

    path: str
    original: str
    """Path in the base."""
    share: float

    def sentence(self) -> str:
        return (
            f"{self.path} shares {self.share:.0%} of its lines with {self.original} and differs, "
            "and nobody can say whether it holds the fix"
        )


def is_leftover(path: str) -> bool:
    return path.endswith(LEFTOVERS)


def near_copies(
    files: Iterable[tuple[str, Path]],
    base: Iterable[tuple[str, Path]],
    *,
    of: Collection[str] | None = None,
) -> Iterator[NearCopy]:
    """Files that share at least LEAST_SHARE of their lines with a base file, and are none.

    Args:
        files: path and place of what is looked at; those in a known language only.
        base: path and place of the files of the base.
        of: paths of the base whose copies are wanted; None: of all.
    """
    contents: dict[str, bytes] = {}
    counts: dict[str, Counter[bytes]] = {}
    places: dict[bytes, set[str]] = defaultdict(set)
    for path, file in base:
        lines = _lines_of(path, file)
        if lines is not None:
            contents[path], counts[path] = lines
            for line in lines[1]:
                places[line].add(path)
    known = set(contents.values())
    for path, file in files:
        lines = _lines_of(path, file)
        if lines is None or lines[0] in known:
            continue
        shared: Counter[str] = Counter()
        for line, count in lines[1].items():
            for name in places.get(line, ()):
                shared[name] += min(count, counts[name][line])
        for name, number in shared.most_common(1):
            share = number / max(lines[1].total(), counts[name].total())
            if share >= LEAST_SHARE and (of is None or name in of):
                yield NearCopy(path=path, original=name, share=share)


def _lines_of(path: str, file: Path) -> tuple[bytes, Counter[bytes]] | None:
    """(content, its lines without white space at their ends); None for what is no source."""
    name = path
    while is_leftover(name):
        name = name.rpartition(".")[0] if not name.endswith("~") else name[:-1]
    if PurePosixPath(name).suffix not in LANGUAGES or file.stat().st_size > MAX_BYTES:
        return None
    content = file.read_bytes()
    lines = Counter(filter(None, (line.strip() for line in content.splitlines())))
    return (content, lines) if lines.total() >= LEAST_LINES else None
