"""Task sources by name. A source hands out public halves to sessions, hidden halves to verdicts."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from rlmix.core.errors import ConfigError, DataError
from rlmix.core.task import HiddenTask, PublicTask
from rlmix.tasks.generate import SPLITS, BuiltTask, build_task

DEFAULT_NUM_TASKS = {"train": 100_000, "eval": 400}
"""Train is as good as endless; eval is large enough for a standard error of 0.025."""


class TaskSource(Protocol):
    """A fixed, ordered set of tasks."""

    def task_ids(self) -> tuple[str, ...]: ...

    def public(self, task_id: str) -> PublicTask: ...

    def hidden(self, task_id: str) -> HiddenTask: ...


@lru_cache(maxsize=512)
def _built(split: str, seed: int, index: int) -> BuiltTask:
    return build_task(split=split, seed=seed, index=index)


class GeneratedSource:
    """Tasks made on demand; nothing is stored, any process gets the same task for an id."""

    def __init__(self, *, split: str, seed: int, limit: int | None) -> None:
        self._split = split
        self._seed = seed
        self._num_tasks = DEFAULT_NUM_TASKS[split] if limit is None else limit
        self._prefix = f"generated/{split}/{seed}/"

    def task_ids(self) -> tuple[str, ...]:
        return tuple(f"{self._prefix}{index}" for index in range(self._num_tasks))

    def _task(self, task_id: str) -> BuiltTask:
        index = task_id.removeprefix(self._prefix)
        if not task_id.startswith(self._prefix) or not index.isdecimal():
            raise DataError(
                f"tasks: {task_id!r} is not of this source; its ids look like {self._prefix}0"
            )
        return _built(self._split, self._seed, int(index))

    def public(self, task_id: str) -> PublicTask:
        return self._task(task_id).public

    def hidden(self, task_id: str) -> HiddenTask:
        return self._task(task_id).hidden


def _open_generated(
    *, name: str, split: str, seed: int, limit: int | None, path: str | None
) -> TaskSource:
    if path is not None:
        raise ConfigError(f"tasks.path={path}: generated tasks come from no folder; set it to null")
    return GeneratedSource(split=split, seed=seed, limit=limit)


def _open_prepared(
    *, name: str, split: str, seed: int, limit: int | None, path: str | None
) -> TaskSource:
    from rlmix.tasks.prepared import PreparedSource

    if path is None:
        raise ConfigError(
            f"tasks.path=null: tasks.source={name} needs the folder that `rlmix tasks prepare` made"
        )
    return PreparedSource(Path(path), name=name, split=split, limit=limit)


PREPARED = ("harbor", "mimo", "nemotron", "r2e_gym", "swe_gym", "swe_rebench", "swe_smith")
"""Public sets to train on. Those that models are judged on are not among them."""
SOURCES: dict[str, Callable[..., TaskSource]] = {
    "generated": _open_generated,
    **dict.fromkeys(PREPARED, _open_prepared),
}


def open_source(
    name: str, *, split: str, seed: int, limit: int | None = None, path: str | None = None
) -> TaskSource:
    """The source called `name`.

    Args:
        path: folder of a prepared set; None for generated tasks.

    Raises:
        ConfigError: unknown name or split, a limit below 1, or a folder without such a set.
    """
    if name not in SOURCES:
        raise ConfigError(f"tasks.source={name!r}; allowed: {', '.join(sorted(SOURCES))}")
    if split not in SPLITS:
        raise ConfigError(f"tasks: split={split!r}; allowed: {', '.join(SPLITS)}")
    if limit is not None and limit < 1:
        raise ConfigError(f"tasks.limit={limit}; allowed: 1 or more, or null for all")
    return SOURCES[name](name=name, split=split, seed=seed, limit=limit, path=path)
