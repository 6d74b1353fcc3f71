"""A prepared set on disk, and a task source that trains on it.

    OUT/tasks.jsonl     what may be seen of each task, with the folder of its repository
    OUT/hidden.jsonl    what decides it
    OUT/gold.jsonl      reference fixes, for gates and scripted agents
    OUT/excluded.jsonl  tasks that are not used, each with its reason
    OUT/gates.jsonl     what `rlmix tasks check` found; failed tasks are not used
    OUT/set.json        name, revision, counts; written last
    OUT/repositories/   one folder per task (`prepare/task.py`)

Invariant: `public` reads `tasks.jsonl` only, so a rollout process never opens the other two.
"""

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlmix.core.errors import ConfigError, DataError
from rlmix.core.task import HiddenTask, PreparedRepository, PublicTask
from rlmix.tasks.evidence.runners import RUNNERS
from rlmix.tasks.prepare.manifest import Excluded, Manifest
from rlmix.tasks.record import SourceTask
from rlmix.tasks.verdict import HARBOR

SCHEMA_VERSION = 2
PRO = "pro"
"""Kind of tests of SWE-bench Pro: a script and a parser per task."""
HARD_FILES = ("hard_ids.txt", "v2/hard51_ids.txt", "hard51_ids.txt")
"""Where a set lists its hard tasks."""
EVAL_FRAC = 0.1
"""Share of a set's tasks that are held out for the closing evaluation, by hash of the id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedTask:
    """One task whose repository is in place."""

    task: SourceTask
    manifest: Manifest
    folder: Path
    """Of its repository."""
    rootfs: Path
    """Its unpacked image."""
    diff: str
    """The reference fix; empty for none, or for one that a script makes."""


def write_set(
    out: Path,
    *,
    name: str,
    revision: str,
    done: list[PreparedTask],
    excluded: list[Excluded],
) -> None:
    """Write the files of a prepared set; the repositories are there already."""
    public = [
        {
            **asdict(one.task.public),
            "folder": str(one.folder.relative_to(out)),
            "commit": one.manifest.commit,
            "workdir": one.manifest.workdir,
            "image_bytes": one.manifest.image_bytes,
            "repository_bytes": one.manifest.repository_bytes,
            "rootfs": str(one.rootfs.resolve()) if one.manifest.has_programs else "",
        }
        for one in done
    ]
    hidden = [asdict(one.task.hidden) for one in done]
    gold = [
        {"task_id": one.task.public.task_id, "diff": one.diff, "script": _script(one.task)}
        for one in done
        if one.diff or _script(one.task)
    ]
    _write_lines(out / "tasks.jsonl", public)
    _write_lines(out / "hidden.jsonl", hidden)
    _write_lines(out / "gold.jsonl", gold)
    _write_lines(out / "excluded.jsonl", [asdict(one) for one in excluded])
    facts = {
        "schema_version": SCHEMA_VERSION,
        "source": name,
        "revision": revision,
        "tasks": len(done),
        "excluded": len(excluded),
    }
    _write(out / "set.json", json.dumps(facts, indent=1) + "\n")


def _script(task: SourceTask) -> dict[str, str]:
    return {} if task.gold is None else task.gold.script


def _write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    _write(path, "".join(json.dumps(record) + "\n" for record in records))


def forget_gates(out: Path, task_ids: Collection[str]) -> None:
    """What a check found of tasks that are not the same any more."""
    if reasons_in(out / "gates.jsonl").keys() & set(task_ids):
        rows = _read(out / "gates.jsonl")
        _write_lines(out / "gates.jsonl", [row for row in rows if row["task_id"] not in task_ids])


def _write(path: Path, text: str) -> None:
    if path.is_file() and path.read_bytes() == text.encode():
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
    part.replace(path)


class PreparedSource:
    """Tasks of a prepared set."""

    def __init__(
        self, folder: Path, *, name: str, split: str, limit: int | None, with_failed: bool = False
    ) -> None:
        """Open a set.

        Raises:
            ConfigError: the folder holds no prepared set, or another one than `name`.
        """
        self._folder = folder
        facts = _facts(folder, name)
        self.revision: str = facts["revision"]
        records = _read(folder / "tasks.jsonl")
        failed = frozenset() if with_failed else failed_gates(folder)
        chosen = [
            record
            for record in records
            if is_held_out(record["task_id"]) == (split == "eval")
            and record["task_id"] not in failed
        ]
        self._public = {record["task_id"]: record for record in chosen[:limit]}
        self._hidden: dict[str, dict[str, Any]] | None = None
        self._gold: dict[str, dict[str, Any]] | None = None

    def task_ids(self) -> tuple[str, ...]:
        return tuple(self._public)

    def public(self, task_id: str) -> PublicTask:
        record = self._find(task_id)
        return PublicTask(
            task_id=task_id,
            split="eval" if is_held_out(task_id) else "train",
            issue=record["prompt"],
            verify_s=float(record["limits"]["verify_s"]),
            prepared=PreparedRepository(
                folder=str((self._folder / record["folder"]).resolve()),
                commit=record["commit"],
                workdir=record["workdir"],
                image=(record["image"] or {}).get("ref", ""),
                rootfs=record["rootfs"],
                writable=tuple(record["writable"]),
            ),
            tags={"source": record["source"], "language": record["language"]},
        )

    def hidden(self, task_id: str) -> HiddenTask:
        self._find(task_id)
        if self._hidden is None:
            records = _read(self._folder / "hidden.jsonl")
            self._hidden = {record["task_id"]: record for record in records}
        return hidden_task(self._hidden[task_id])

    def reference(self, task_id: str) -> bytes:
        """The reference fix, for gates; empty when the set has none, or a script makes it."""
        diff: str = self._golden(task_id).get("diff", "")
        return diff.encode("utf-8", "surrogateescape")

    def script(self, task_id: str) -> dict[str, str]:
        """Absolute path -> content of the script (the first one) that makes the reference fix."""
        return dict(self._golden(task_id).get("script", {}))

    def _golden(self, task_id: str) -> dict[str, Any]:
        if self._gold is None:
            records = _read(self._folder / "gold.jsonl")
            self._gold = {one["task_id"]: one for one in records}
        return self._gold.get(task_id, {})

    def record(self, task_id: str) -> dict[str, Any]:
        """What `tasks.jsonl` says of a task."""
        return dict(self._find(task_id))

    def _find(self, task_id: str) -> dict[str, Any]:
        if task_id not in self._public:
            raise DataError(f"tasks: {task_id!r} is not in {self._folder}/tasks.jsonl")
        return self._public[task_id]


def reasons_in(file: Path) -> dict[str, str]:
    """Task -> reason, of a list of exclusions or of gates; empty where there is none yet."""
    if not file.is_file():
        return {}
    return {row["task_id"]: row["reason"] for row in _read(file)}


def failed_gates(folder: Path) -> frozenset[str]:
    """Tasks that a check found unfit; empty before the first one."""
    found = reasons_in(folder / "gates.jsonl")
    return frozenset(task_id for task_id, reason in found.items() if reason)


def hidden_task(record: dict[str, Any]) -> HiddenTask:
    """The hidden half in the form that verdicts take."""
    is_pro, is_harbor = record["runner"] == PRO, record["runner"] == HARBOR
    if record["runner"] and record["runner"] not in (*RUNNERS, PRO, HARBOR):
        raise DataError(
            f"task {record['task_id']}: nobody reads the runner {record['runner']!r}; allowed: "
            f"{', '.join((*RUNNERS, PRO, HARBOR))}"
        )
    has_scripts = is_pro or is_harbor
    return HiddenTask(
        task_id=record["task_id"],
        tests={} if has_scripts else record["files"],
        scripts=record["files"] if has_scripts else {},
        required_tests=tuple(record["fail_to_pass"]),
        skippable_tests=tuple(record["pass_to_pass"]),
        reference_diff="",
        test_command=record["test_command"],
        runner="" if is_pro else record["runner"],
        hidden_patch=record["hidden_patch"].encode("utf-8", "surrogateescape"),
        name_style=record["name_style"],
        test_env=record["env"],
    )


def is_held_out(task_id: str) -> bool:
    """Whether a task belongs to the part that is never trained on."""
    from hashlib import blake2b

    place = int.from_bytes(blake2b(task_id.encode(), digest_size=8).digest()) / 2**64
    return place < EVAL_FRAC


def _facts(folder: Path, name: str) -> dict[str, Any]:
    try:
        facts = json.loads((folder / "set.json").read_text())
    except (OSError, ValueError):
        raise ConfigError(
            f"tasks.path={folder}: no prepared set there; make one with `rlmix tasks prepare "
            f"{name} --path DATA --images DIR --out {folder}`"
        ) from None
    if facts.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"tasks.path={folder}: its form is {facts.get('schema_version')}, this version reads "
            f"{SCHEMA_VERSION}; prepare it again"
        )
    if facts["source"] != name:
        raise ConfigError(
            f"tasks.path={folder} holds {facts['source']}, and tasks.source={name}; set one of them"
        )
    return facts


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}; prepare the set again") from None
