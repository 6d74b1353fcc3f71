"""Compiled Python files that may hold what no source says any more.

Invariant: only files that Python makes again by itself, or never looks at, are named.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePath, PurePosixPath

HEADER_BYTES = 16
"""Magic, flags, time and size of the source (PEP 552)."""


def stale_bytecode(
    files: Iterable[tuple[str, Path]], sources: Collection[str]
) -> Iterator[tuple[str, bool]]:
    """(path, it has a source beside it) of bytecode that was not made from the source beside it.

    Args:
        files: path and place of the files of an image.
        sources: paths of the files whose compiled forms are looked for, by their last name.
    """
    stems = {_stem(PurePosixPath(path)) for path in sources if path.endswith(".py")}
    for path, file in files:
        if not path.endswith((".pyc", ".pyo")):
            continue
        folder = file.parent.parent if file.parent.name == "__pycache__" else file.parent
        if _stem(folder / file.name) not in stems:
            continue
        source = folder / f"{file.name.partition('.')[0]}.py"
        if not source.is_file() or source.is_symlink():
            yield path, False
        elif _source_of(file) != _facts(source):
            yield path, True


def _stem(path: PurePath) -> str:
    """The module's own name; of a package's `__init__`, with the package before it."""
    stem = path.name.partition(".")[0]
    return f"{path.parent.name}/{stem}" if stem == "__init__" else stem


def _facts(source: Path) -> tuple[int, int]:
    facts = source.stat()
    return int(facts.st_mtime) & 0xFFFFFFFF, facts.st_size & 0xFFFFFFFF


def _source_of(file: Path) -> tuple[int, int] | None:
    """Time and size of the source that it was compiled from, by which Python itself decides
    whether to use it; None where it says neither."""
    with file.open("rb") as stream:
        head = stream.read(HEADER_BYTES)
    flags = int.from_bytes(head[4:8], "little")
    if len(head) < HEADER_BYTES or flags & 1:
        return None
    return int.from_bytes(head[8:12], "little"), int.from_bytes(head[12:16], "little")
