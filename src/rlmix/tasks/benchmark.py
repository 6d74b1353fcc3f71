"""The tasks of a benchmark: the bundled one, or a prepared set of a public one.

Invariant: what a session may see, what decides and the reference are three values; the reference
is handed out to the gold agent only.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlmix.core.errors import ConfigError, DataError
from rlmix.core.task import Commit, HiddenTask, PublicTask
from rlmix.tasks.prepared import HARD_FILES, PreparedSource, hidden_task
from rlmix.tasks.record import SourceTask
from rlmix.tasks.sources.read import EVALUATION_ONLY, read_set

MINI = Path(__file__).parent / "mini"
SUMS = "SHA256SUMS"


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmark:
    """A benchmark's tasks, and what a number on them depends on."""

    name: str
    revision: str
    checksum: str
    """SHA-256 over all that decides: the list of sums, or the prepared set's files."""
    tasks: tuple[BenchTask, ...]
    num_excluded: int


def open_benchmark(data: str, *, subset: str = "all", path: str | None = None) -> Benchmark:
    """The benchmark called `data`.

    Args:
        subset: `all`, `hard`, or a file with one task id per line.
        path: folder of a prepared set, for all but `mini`.

    Raises:
        ConfigError: unknown name, missing folder or subset.
        DataError: a file of the benchmark is damaged.
    """
    if data == "mini":
        benchmark = _mini()
        folder = MINI
    elif data in EVALUATION_ONLY:
        if path is None:
            raise ConfigError(
                f"eval.path=null: eval.data={data} needs a prepared set; make it with `rlmix tasks "
                f"prepare {data} --path DATA --images DIR --out FOLDER`"
            )
        folder = Path(path)
        benchmark = _prepared(data, folder)
    else:
        allowed = ", ".join(("mini", *EVALUATION_ONLY))
        raise ConfigError(f"eval.data={data!r}; allowed: {allowed}")
    return _part(benchmark, subset, folder)


def _part(benchmark: Benchmark, subset: str, folder: Path) -> Benchmark:
    if subset == "all":
        return benchmark
    wanted = _ids(subset, folder)
    known = {task.public.task_id for task in benchmark.tasks}
    missing = [name for name in wanted if name not in known]
    if missing:
        raise ConfigError(
            f"eval.subset={subset}: {len(missing)} of its {len(wanted)} tasks are not in "
            f"{benchmark.name}, e.g. {missing[0]!r}"
        )
    keep = set(wanted)
    return Benchmark(
        name=f"{benchmark.name}/{Path(subset).stem}",
        revision=benchmark.revision,
        checksum=benchmark.checksum,
        tasks=tuple(task for task in benchmark.tasks if task.public.task_id in keep),
        num_excluded=benchmark.num_excluded,
    )


def _ids(subset: str, folder: Path) -> list[str]:
    places = [folder / name for name in HARD_FILES] if subset == "hard" else [Path(subset)]
    for place in places:
        if place.is_file():
            lines = (line.split("#")[0].strip() for line in place.read_text().splitlines())
            return list(dict.fromkeys(line for line in lines if line))
    raise ConfigError(
        f"eval.subset={subset!r}: no such list; allowed: all, hard (a file "
        f"{' or '.join(HARD_FILES)} beside the data), or a file with one task id per line"
    )


def _mini() -> Benchmark:
    check_sums(MINI)
    found = read_set("swe_bench_pro_v2", MINI, revision="bundled")
    if found.bad:
        raise DataError(f"bundled benchmark: {found.bad[0].sentence()}")
    tasks = tuple(_bundled_task(task) for task in found.tasks)
    return Benchmark(
        name="mini",
        revision="bundled",
        checksum=hashlib.sha256((MINI / SUMS).read_bytes()).hexdigest(),
        tasks=tasks,
        num_excluded=0,
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


def _bundled_task(task: SourceTask) -> BenchTask:
    folder = MINI / task.public.task_id / "environment/repository"
    files = {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    public = PublicTask(
        task_id=task.public.task_id,
        split="eval",
        issue=task.public.prompt,
        history=(Commit(message="start", files=files),),
        tags={"language": task.public.language},
    )
    hidden = task.hidden
    record = {
        "task_id": hidden.task_id,
        "runner": hidden.runner,
        "files": hidden.files,
        "fail_to_pass": hidden.fail_to_pass,
        "pass_to_pass": hidden.pass_to_pass,
        "test_command": hidden.test_command,
        "hidden_patch": hidden.hidden_patch,
        "name_style": hidden.name_style,
        "env": hidden.env,
    }
    return BenchTask(
        public=public,
        hidden=hidden_task(record),
        gold=task.gold.patch.encode() if task.gold else b"",
        repository=task.public.repository,
        language=task.public.language,
        agent_s=float(task.public.limits.agent_s),
        verify_s=float(task.public.limits.verify_s),
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
    excluded = (folder / "excluded.jsonl").read_text().splitlines()
    return Benchmark(
        name=name,
        revision=sources[0].revision,
        checksum=digest.hexdigest(),
        tasks=tuple(sorted(tasks, key=lambda task: task.public.task_id)),
        num_excluded=len(excluded),
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
    )


def repositories(tasks: Sequence[BenchTask]) -> dict[str, int]:
    """Tasks per repository."""
    counts: dict[str, int] = {}
    for task in tasks:
        counts[task.repository] = counts.get(task.repository, 0) + 1
    return dict(sorted(counts.items()))


class BenchmarkSource:
    """A benchmark as a task source, for sessions of a policy that is judged on it."""

    def __init__(self, benchmark: Benchmark) -> None:
        self._tasks = {task.public.task_id: task for task in benchmark.tasks}

    def task_ids(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    def public(self, task_id: str) -> PublicTask:
        return self._find(task_id).public

    def hidden(self, task_id: str) -> HiddenTask:
        return self._find(task_id).hidden

    def _find(self, task_id: str) -> BenchTask:
        if task_id not in self._tasks:
            raise DataError(f"tasks: {task_id!r} is not in this benchmark")
        return self._tasks[task_id]
