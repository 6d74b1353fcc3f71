"""Reads a set by name: every good row as three records, every bad one with file, row and column."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rlmix.core.errors import ConfigError, DataError
from rlmix.tasks.record import BadRow, SourceTask
from rlmix.tasks.sources.harbor import folder_rows, read_harbor
from rlmix.tasks.sources.mimo import image_names, read_mimo
from rlmix.tasks.sources.nemotron import read_nemotron
from rlmix.tasks.sources.r2e import read_r2e
from rlmix.tasks.sources.rows import Broken, Row, data_files, read_rows
from rlmix.tasks.sources.swe_bench import read_swe_bench, read_swe_smith
from rlmix.tasks.sources.swe_bench_pro import read_swe_bench_pro, script_folder

Reader = Callable[..., SourceTask | None]

TABLES: dict[str, Reader] = {
    "swe_bench": read_swe_bench,
    "swe_gym": read_swe_bench,
    "swe_rebench": read_swe_bench,
    "swe_smith": read_swe_smith,
    "r2e_gym": read_r2e,
    "nemotron": read_nemotron,
    "mimo": read_mimo,
    "swe_bench_pro": read_swe_bench_pro,
}
"""Sets that come as tables, one row per task."""
FOLDERS: dict[str, Reader] = {"harbor": read_harbor, "swe_bench_pro_v2": read_harbor}
"""Sets that come as one folder per task."""
PUBLIC_SETS = (*TABLES, *FOLDERS)
MAX_ID_CHARS = 300
EVALUATION_ONLY = ("swe_bench", "swe_bench_pro", "swe_bench_pro_v2")
"""Sets that models are judged on: training on them spoils the number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadSet:
    """What a set holds."""

    tasks: tuple[SourceTask, ...]
    bad: tuple[BadRow, ...]

    @property
    def num_rows(self) -> int:
        return len(self.tasks) + len({(bad.file, bad.row) for bad in self.bad})


def read_set(
    name: str, path: Path, *, revision: str = "local", limit: int | None = None
) -> ReadSet:
    """Read a set from local files.

    Args:
        revision: pinned revision of the set, kept in every record.
        limit: rows to look at; None takes all.

    Raises:
        ConfigError: unknown name.
        DataError: nothing to read, or a file that is not what its name says.
    """
    tasks: list[SourceTask] = []
    bad: list[BadRow] = []
    seen: dict[str, str] = {}
    for number, (row, reader) in enumerate(_rows(name, path)):
        if limit is not None and number >= limit:
            break
        if row.problems:
            bad += row.problems
            continue
        task = reader(row, source=name, revision=revision)
        if task is not None and not _is_id(task.public.task_id):
            row.refuse("instance_id", f"no id: longer than {MAX_ID_CHARS}, or with odd characters")
        if task is not None and task.public.task_id in seen:
            row.refuse("instance_id", f"also in {seen[task.public.task_id]}")
        if row.problems or task is None:
            bad += row.problems
            continue
        seen[task.public.task_id] = f"{row.file}, row {row.number}"
        tasks.append(task)
    if not tasks and not bad:
        raise DataError(f"tasks.path={path}: the set {name} has no row there")
    return ReadSet(tasks=tuple(tasks), bad=tuple(bad))


def _is_id(text: str) -> bool:
    return 0 < len(text) <= MAX_ID_CHARS and text.isprintable()


def _rows(name: str, path: Path) -> Iterator[tuple[Row, Reader]]:
    if name in FOLDERS:
        for _, row in folder_rows(path):
            yield row, FOLDERS[name]
        return
    if name not in TABLES:
        raise ConfigError(f"tasks.source={name!r}; allowed: {', '.join(sorted(PUBLIC_SETS))}")
    for file in data_files(path):
        if file.name == "image-mapping.jsonl":
            continue
        reader = TABLES[name]
        if name == "mimo":
            reader = partial(reader, images=image_names(file))
        elif name == "swe_bench_pro":
            reader = partial(reader, scripts=script_folder(path))
        for number, found in read_rows(file):
            row = Row(file=str(file), number=number, values={})
            if isinstance(found, Broken):
                row.refuse(found.column, found.problem)
            else:
                row.values = found
            yield row, reader
