"""The tasks of a benchmark: the bundled one, held-out generated ones, or a public one.

Invariant: what a session may see, what decides and the reference are three values; the reference
is handed out to the gold agent only.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlmix.core.errors import ConfigError, DataError
from rlmix.core.task import HiddenTask, PublicTask
from rlmix.tasks.prepared import HARD_FILES, PreparedSource
from rlmix.tasks.record import SourceTask
from rlmix.tasks.releases import (
    HUB,
    REPOSITORY,
    fetch,
    hidden_of,
    image_name,
    public_of,
    read_release,
)
from rlmix.tasks.source import open_source
from rlmix.tasks.sources.read import EVALUATION_ONLY, read_set

MINI = Path(__file__).parent / "mini"
SUMS = "SHA256SUMS"
GENERATED = "generated"
GENERATED_AGENT_S, GENERATED_VERIFY_S = 60.0, 20.0
"""A session of the tiny policy, and hidden tests that take 0.05 s."""
BENCHMARKS = (GENERATED, "mini", *EVALUATION_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchTask:
    """One task of a benchmark."""

    public: PublicTask
    hidden: HiddenTask
    gold: bytes
    """The reference fix; empty when the set has none."""
    repository: str
    language: str
    agent_s: float
    """Time that the protocol gives the agent."""
    verify_s: float
    image: str = ""
    """Container image with its digest where one is pinned; empty for none."""

    @property
    def has_repository(self) -> bool:
        """False: known from a release that holds no repository; it can be planned only."""
        return bool(self.public.repository)


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark's tasks, and what a number on them depends on."""

    name: str
    revision: str
    checksum: str
    """SHA-256 over all that decides: the list of sums, or the prepared set's files."""
    tasks: tuple[BenchTask, ...]
    excluded: tuple[str, ...] = ()
    """Why tasks of the set are not among them, one sentence each."""
    subset_sha256: str = ""
    """Of the list of ids that chose a part; empty for all tasks."""

    @property
    def num_excluded(self) -> int:
        return len(self.excluded)


def open_benchmark(
    data: str,
    *,
    subset: str = "all",
    path: str | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> Benchmark:
    """The benchmark called `data`.

    Args:
        subset: `all`, `hard`, or a file with one task id per line.
        path: for public ones: a prepared set, a release, or `hub`.
        limit: tasks to take from the front; None: all.
        seed: of generated tasks.

    Raises:
        ConfigError: unknown name, missing folder or subset.
        DataError: a file of the benchmark is damaged.
    """
    if path is not None and data in ("mini", GENERATED):
        raise ConfigError(
            f"eval.path={path}: eval.data={data} is bundled and reads no folder; leave eval.path "
            f"out, or set eval.data to one of {', '.join(EVALUATION_ONLY)}"
        )
    if data == "mini":
        benchmark, folder = _mini(), MINI
    elif data == GENERATED:
        benchmark, folder = _generated(seed, limit), Path()
    elif data in EVALUATION_ONLY:
        benchmark, folder = _public(data, path)
    else:
        raise ConfigError(f"eval.data={data!r}; allowed: {', '.join(BENCHMARKS)}")
    part = _part(benchmark, subset, folder)
    return part if limit is None else replace(part, tasks=part.tasks[:limit])


def _public(data: str, path: str | None) -> tuple[Benchmark, Path]:
    if path is None:
        raise ConfigError(
            f"eval.path=null: eval.data={data} needs a prepared set (`rlmix tasks prepare "
            f"{data} --path DATA --images DIR --out FOLDER`), its release, or {HUB}"
        )
    place, revision = fetch(data) if path == HUB else (Path(path).expanduser(), "local")
    if (place / "set.json").is_file():
        return _prepared(data, place), place
    found, checksum = read_release(data, place, revision=revision)
    folder = place if place.is_dir() else place.parent
    roots = {file.parent.name: file.parent for file in folder.rglob("task.toml")}
    tasks = [_released_task(task, roots.get(task.public.task_id)) for task in found.tasks]
    return Benchmark(
        name=data,
        revision=revision,
        checksum=checksum,
        tasks=tuple(sorted(tasks, key=lambda task: task.public.task_id)),
        excluded=tuple(bad.sentence() for bad in found.bad),
    ), folder


def _generated(seed: int, limit: int | None) -> Benchmark:
    """The held-out split: other names than in training, and bug kinds that training never shows."""
    source = open_source(GENERATED, split="eval", seed=seed, limit=limit)
    digest = hashlib.sha256()
    tasks = []
    for task_id in source.task_ids():
        public, hidden = source.public(task_id), source.hidden(task_id)
        digest.update(repr((public, hidden)).encode())
        tasks.append(
            BenchTask(
                public=public,
                hidden=hidden,
                gold=hidden.reference_diff.encode(),
                repository=_part_of(public.tags),
                language="python",
                agent_s=GENERATED_AGENT_S,
                verify_s=GENERATED_VERIFY_S,
            )
        )
    return Benchmark(
        name=GENERATED,
        revision=f"held-out split, tasks.seed={seed}",
        checksum=digest.hexdigest(),
        tasks=tuple(tasks),
    )


def _part_of(tags: Mapping[str, str]) -> str:
    """What stands for a repository in the tables of generated tasks: how hard, and whether training
    ever shows such a bug."""
    is_new = tags.get("held_out_kind") == "true"
    return f"{tags.get('difficulty', GENERATED)}{', unseen kind of bug' if is_new else ''}"


def _part(benchmark: Benchmark, subset: str, folder: Path) -> Benchmark:
    if subset == "all":
        return benchmark
    wanted, digest = _ids(subset, folder)
    known = {task.public.task_id for task in benchmark.tasks}
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ConfigError(
            f"eval.subset={subset}: {len(missing)} of its {len(wanted)} tasks are not in "
            f"{benchmark.name}, e.g. {missing[0]!r}"
        )
    keep = set(wanted)
    return replace(
        benchmark,
        name=f"{benchmark.name}/{Path(subset).stem}",
        tasks=tuple(task for task in benchmark.tasks if task.public.task_id in keep),
        subset_sha256=digest,
    )


def _ids(subset: str, folder: Path) -> tuple[list[str], str]:
    """The ids of a list, and its SHA-256."""
    places = [folder / name for name in HARD_FILES] if subset == "hard" else [Path(subset)]
    for place in places:
        if place.is_file():
            try:
                text = place.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                text = ""
            lines = (line.split("#")[0].strip() for line in text.splitlines())
            ids = list(dict.fromkeys(line for line in lines if line))
            if not ids:
                raise ConfigError(
                    f"eval.subset={subset}: {place} names no task; write one task id per line"
                )
            return ids, hashlib.sha256(place.read_bytes()).hexdigest()
    raise ConfigError(
        f"eval.subset={subset!r}: no such list; allowed: all, hard (a file "
        f"{' or '.join(HARD_FILES)} beside the data), or a file with one task id per line"
    )


def _mini() -> Benchmark:
    check_sums(MINI)
    found = read_set("swe_bench_pro_v2", MINI, revision="bundled")
    if found.bad:
        raise DataError(f"bundled benchmark: {found.bad[0].sentence()}")
    tasks = tuple(_released_task(task, MINI / task.public.task_id) for task in found.tasks)
    return Benchmark(
        name="mini",
        revision="bundled",
        checksum=hashlib.sha256((MINI / SUMS).read_bytes()).hexdigest(),
        tasks=tasks,
    )


def check_sums(folder: Path) -> None:
    """Compare every file of `folder` with its list of sums.

    Raises:
        DataError: a file is missing, changed, or not listed.
    """
    listed = {}
    for line in (folder / SUMS).read_text().splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    there = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    } - {SUMS, *HARD_FILES}
    for name in sorted(there ^ set(listed)):
        raise DataError(f"{folder}/{name}: {'missing' if name in listed else 'not in ' + SUMS}")
    for name, digest in listed.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise DataError(f"{folder}/{name}: not the file that {SUMS} lists")


def _released_task(task: SourceTask, folder: Path | None) -> BenchTask:
    public = public_of(task, folder / REPOSITORY if folder else None)
    return BenchTask(
        public=public,
        hidden=hidden_of(task),
        gold=task.gold.patch.encode("utf-8", "surrogateescape") if task.gold else b"",
        repository=task.public.repository,
        language=task.public.language,
        agent_s=float(task.public.limits.agent_s),
        verify_s=float(task.public.limits.verify_s),
        image="" if public.repository else image_name(task.public.image),
    )


def _prepared(name: str, folder: Path) -> Benchmark:
    splits = ("train", "eval")
    try:
        sources = [PreparedSource(folder, name=name, split=split, limit=None) for split in splits]
    except ConfigError as error:
        said = (
            str(error).replace("tasks.path=", "eval.path=").replace("tasks.source=", "eval.data=")
        )
        raise ConfigError(said) from None
    digest = hashlib.sha256()
    for file in ("tasks.jsonl", "hidden.jsonl", "gold.jsonl"):
        digest.update((folder / file).read_bytes())
    tasks = [_prepared_task(source, task_id) for source in sources for task_id in source.task_ids()]
    rows = [json.loads(line) for line in (folder / "excluded.jsonl").read_text().splitlines()]
    return Benchmark(
        name=name,
        revision=sources[0].revision,
        checksum=digest.hexdigest(),
        tasks=tuple(sorted(tasks, key=lambda task: task.public.task_id)),
        excluded=tuple(f"{row['task_id']}: {row['reason']}" for row in rows),
    )


def _prepared_task(source: PreparedSource, task_id: str) -> BenchTask:
    record = source.record(task_id)
    return BenchTask(
        public=source.public(task_id),
        hidden=source.hidden(task_id),
        gold=source.reference(task_id),
        repository=record["repository"],
        language=record["language"],
        agent_s=float(record["limits"]["agent_s"]),
        verify_s=float(record["limits"]["verify_s"]),
        image=image_name(record.get("image")),
    )


def repositories(tasks: Sequence[BenchTask]) -> dict[str, int]:
    """Tasks per repository."""
    counts: dict[str, int] = {}
    for task in tasks:
        counts[task.repository] = counts.get(task.repository, 0) + 1
    return dict(sorted(counts.items()))
