"""Compiled Python files that may hold what no source says any more.

Invariant: only files that Python makes again by itself, or never looks at, are named.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath

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
    stems = {PurePosixPath(path).stem for path in sources if path.endswith(".py")} - {"__init__"}
    for path, file in files:
        if not path.endswith((".pyc", ".pyo")) or file.name.partition(".")[0] not in stems:
            continue
        folder = file.parent.parent if file.parent.name == "__pycache__" else file.parent
        source = folder / f"{file.name.partition('.')[0]}.py"
        if not source.is_file() or source.is_symlink():
            yield path, False
        elif _source_bytes(file) != source.stat().st_size & 0xFFFFFFFF:
            yield path, True


def _source_bytes(file: Path) -> int:
    """Size of the source that it was compiled from; -1 where it says none."""
    with file.open("rb") as stream:
        head = stream.read(HEADER_BYTES)
    flags = int.from_bytes(head[4:8], "little")
    return -1 if len(head) < HEADER_BYTES or flags & 1 else int.from_bytes(head[12:16], "little")
