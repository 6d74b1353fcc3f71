"""The run directory: one folder, one owner, everything a run leaves behind.

    overrides.txt config.yaml plan.json   what was asked for, and what came of it
    manifest.json                         versions, machine, attempts
    metrics.jsonl events.jsonl            the source of truth for every view
    trajectories/ logs/ checkpoints/ weights/ tb/
    summary.json report.html              written at the end

Invariant: only the process that holds the lock writes here. Every file is either appended to line
by line or replaced as a whole, so a reader never meets half of anything.
"""

import asyncio
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson

from rlmix.core.errors import ConfigError
from rlmix.core.trajectory import Trajectory
from rlmix.observe import jsonl, trajectories
from rlmix.observe.events import EventLog, RunClock, run_seconds_before
from rlmix.observe.lock import RunLock
from rlmix.observe.manifest import (
    Attempt,
    Manifest,
    command_line,
    new_manifest,
    read_manifest,
)
from rlmix.observe.metrics import METRICS_FILE, MetricsLog
from rlmix.observe.redact import Redactor
from rlmix.observe.run_state import SUMMARY_FILE
from rlmix.observe.run_state import is_run_dir as is_run_dir
from rlmix.observe.sinks import SINKS, SinkContext, SinkWorker, check_sinks, close_sinks

REQUEST_FILES = ("overrides.txt", "config.yaml", "plan.json")
SUPERSEDED_DIR = "superseded"
"""Holds, per attempt, the steps that a later attempt ran again."""
FOLDERS = ("trajectories", "logs", "checkpoints", "weights")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class RunDir:
    """Made by `create` (a new run) or `open` (the next attempt of an old one)."""

    def __init__(self, path: Path, lock: RunLock, manifest: Manifest, from_step: int) -> None:
        """Takes over a locked directory; use `create` or `open`."""
        self.path = path
        self.name = path.name
        self.run_id = manifest.run_id
        self.attempt = manifest.attempts[-1].number
        self.from_step = from_step
        """Optimizer steps in the run when this attempt opened it; 0 for a fresh run."""
        self.logs = path / "logs"
        self.checkpoints = path / "checkpoints"
        self.weights = path / "weights"
        self.trajectories = path / "trajectories"
        self.manifest = manifest
        self._lock = lock
        self._redactor = Redactor(os.environ)
        self._sinks: tuple[SinkWorker, ...] = ()
        clock = RunClock(run_seconds_before(path))
        self.events = EventLog(path, attempt=self.attempt, clock=clock, redactor=self._redactor)
        self.metrics = MetricsLog(path, attempt=self.attempt, clock=clock, redactor=self._redactor)
        self._index = jsonl.JsonlWriter(self.trajectories / trajectories.INDEX_FILE)
        if self.metrics.repaired_bytes:
            self.events.append(
                "log_repaired",
                "the previous attempt died while writing; its unfinished last line was removed",
                file=METRICS_FILE,
                removed_bytes=self.metrics.repaired_bytes,
            )

    @classmethod
    def create(
        cls,
        root: Path,
        name: str | None = None,
        *,
        overrides: Sequence[str] = (),
        config_yaml: str = "",
        plan: Mapping[str, Any] | None = None,
        argv: Sequence[str] | None = None,
    ) -> "RunDir":
        """Make the directory of a new run and own it.

        Args:
            root: folder of all runs (`run.dir`); made when missing.
            name: `run.name`; None or empty for date, time and a short id.
            overrides: KEY=VALUE arguments, written one a line.
            config_yaml: the composed configuration.
            plan: the RunPlan as JSON values.
            argv: command line for the manifest; this process's own when None.
        Raises:
            ConfigError: the name is no file name, or a run of that name exists.
        """
        name = name or default_name()
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"run.name={name!r}: use letters, digits, '.', '_' and '-', starting with a "
                "letter or digit, at most 100 characters"
            )
        path = root.resolve() / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            raise ConfigError(
                f"run.name={name}: {path} exists; choose another run.name, continue that run "
                f"with `rlmix train --resume {name}`, or delete the folder"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"run.dir={root}: cannot make {path}: {error.strerror}; choose a folder that you "
                "may write to"
            ) from None
        lock = RunLock.acquire(path)
        for folder in FOLDERS:
            (path / folder).mkdir()
        _write_request(path, overrides, config_yaml, plan or {})
        return cls._begin(path, lock, new_manifest(name), from_step=0, argv=argv)

    @classmethod
    def open(cls, path: Path, *, argv: Sequence[str] | None = None) -> "RunDir":
        """Own an existing run for another attempt; torn last lines are repaired.

        Raises:
            DataError: `path` is no run directory.
            ConfigError: a live process owns it.
        """
        path = path.resolve()
        manifest = read_manifest(path)
        lock = RunLock.acquire(path)
        for folder in FOLDERS:
            (path / folder).mkdir(exist_ok=True)
        last = jsonl.read_last(path / METRICS_FILE)
        return cls._begin(
            path, lock, manifest, from_step=int(last["step"]) if last else 0, argv=argv
        )

    @classmethod
    def _begin(
        cls,
        path: Path,
        lock: RunLock,
        manifest: Manifest,
        *,
        from_step: int,
        argv: Sequence[str] | None,
    ) -> "RunDir":
        redactor = Redactor(os.environ)
        attempt = Attempt(
            number=len(manifest.attempts) + 1,
            owner=lock.owner,
            argv=tuple(redactor.assignments(argument) for argument in command_line(argv)),
            started_s=round(time.time(), 3),
            from_step=from_step,
        )
        manifest = manifest.with_attempt(attempt)
        manifest.write(path)
        run = cls(path, lock, manifest, from_step)
        run.events.append(
            "attempt_started",
            "new run" if attempt.number == 1 else "resumed",
            run_id=manifest.run_id,
            from_step=from_step,
        )
        return run

    def open_sinks(self, names: Sequence[str], *, config: Mapping[str, Any] | None = None) -> None:
        """Start copying metrics to the named sinks; call after `truncate_after` on a resume.

        Raises:
            ConfigError: no sink has such a name.
        """
        check_sinks(tuple(names))
        flat = orjson.loads(self._redactor.line(orjson.dumps(dict(config or {}))))
        workers = []
        for name in names:
            context = SinkContext(
                run_path=self.path,
                run_id=self.run_id,
                run_name=self.name,
                from_step=self.metrics.last_step or 0,
                config=flat,
                known=self.manifest.sinks.get(name),
                remember=lambda value, name=name: self._remember_sink(name, value),  # type: ignore[misc]
            )
            workers.append(
                SinkWorker(
                    name,
                    lambda context=context, name=name: SINKS[name](context),  # type: ignore[misc]
                    on_failure=self._sink_failed,
                )
            )
        self._sinks = tuple(workers)
        self.metrics.attach(self._sinks)

    def write_trajectories(
        self, step: int, finished: Sequence[Trajectory], *, kind: str = "step"
    ) -> Path:
        """Write `trajectories/<kind>_NNNNNN.jsonl` and its index line; returns the file."""
        entry = trajectories.write_trajectories(self.trajectories, step, finished, kind=kind)
        self._index.append(entry)
        return self.trajectories / str(entry["file"])

    def write_summary(self, document: Mapping[str, Any]) -> Path:
        """Write `summary.json`: the document that `rlmix train --json` prints."""
        path = self.path / SUMMARY_FILE
        content = orjson.dumps(dict(document), option=orjson.OPT_INDENT_2)
        jsonl.write_atomically(path, self._redactor.line(content))
        return path

    def rewrite_request(
        self, overrides: Sequence[str], config_yaml: str, plan: Mapping[str, Any]
    ) -> None:
        """Write down what this attempt was asked for; the former files are set aside."""
        aside = self.path / SUPERSEDED_DIR / f"attempt_{self.attempt - 1:03d}"
        aside.mkdir(parents=True, exist_ok=True)
        for name in REQUEST_FILES:
            shutil.copyfile(self.path / name, aside / name)
        _write_request(self.path, overrides, config_yaml, plan)

    def truncate_after(self, step: int) -> int:
        """Set aside metrics and trajectories of steps above `step`; they will be run again.

        They move to `superseded/attempt_NNN/`, named by the attempt that wrote them last. Events
        stay, and one is added. Returns the number of metric rows set aside.
        """
        kept: list[dict[str, Any]] = []
        dropped: list[dict[str, Any]] = []
        for row in jsonl.read_jsonl(self.path / METRICS_FILE):
            (kept if row["step"] <= step else dropped).append(row)
        files = [
            path
            for path in self.trajectories.glob("*_[0-9]*.jsonl")
            if int(path.stem.rsplit("_", 1)[1]) > step
        ]
        if dropped or files:
            aside = self.path / SUPERSEDED_DIR / f"attempt_{self.attempt - 1:03d}"
            aside.mkdir(parents=True, exist_ok=True)
            # Copies first: a crash between the two leaves a second copy, never a lost row.
            before = list(jsonl.read_jsonl(aside / METRICS_FILE))
            jsonl.replace_jsonl(aside / METRICS_FILE, [*before, *dropped])
            for path in files:
                shutil.move(path, aside / path.name)
            self._rewrite(kept, step)
        self.from_step = step
        attempt = replace(self.manifest.attempts[-1], from_step=step)
        self.manifest = self.manifest.with_attempt(attempt)
        self.manifest.write(self.path)
        self.events.append(
            "steps_superseded",
            f"continuing after step {step}; events of later steps before this one belong to "
            "steps that are run again",
            after_step=step,
            dropped_steps=len(dropped),
        )
        return len(dropped)

    def _rewrite(self, kept: list[dict[str, Any]], step: int) -> None:
        index = self.trajectories / trajectories.INDEX_FILE
        entries = [entry for entry in jsonl.read_jsonl(index) if entry["step"] <= step]
        jsonl.replace_jsonl(index, entries)
        jsonl.replace_jsonl(self.path / METRICS_FILE, kept)
        self._index.reopen()
        self.metrics.reopen()

    def _remember_sink(self, name: str, value: str) -> None:
        self.manifest = replace(self.manifest, sinks={**self.manifest.sinks, name: value})
        self.manifest.write(self.path)

    def _sink_failed(self, name: str, reason: str) -> None:
        self.events.append(
            "sink_failed",
            f"{name} gets no more metrics in this attempt: {reason}; {METRICS_FILE} has them all",
            sink=name,
        )

    def close(self, exit_reason: str) -> None:
        """End the attempt: `finished`, `interrupted` or `failed`. A second call does nothing."""
        if self.manifest.attempts[-1].exit_reason is not None:
            return
        close_sinks(self._sinks)
        self.events.append("attempt_ended", exit_reason, step=self.metrics.last_step or 0)
        ended = replace(
            self.manifest.attempts[-1], ended_s=round(time.time(), 3), exit_reason=exit_reason
        )
        self.manifest = self.manifest.with_attempt(ended)
        self.manifest.write(self.path)
        for log in (self.events, self.metrics, self._index):
            log.close()
        self._lock.release()

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close("finished")
        else:
            was_stopped = issubclass(kind, (KeyboardInterrupt, asyncio.CancelledError))
            self.close("interrupted" if was_stopped else "failed")


def _write_request(
    path: Path, overrides: Sequence[str], config_yaml: str, plan: Mapping[str, Any]
) -> None:
    redactor = Redactor(os.environ)
    lines = [redactor.assignments(override) + "\n" for override in overrides]
    plan_json = redactor.line(orjson.dumps(dict(plan), option=orjson.OPT_INDENT_2))
    contents = ("".join(lines).encode(), redactor.assignments(config_yaml).encode(), plan_json)
    for name, content in zip(REQUEST_FILES, contents, strict=True):
        jsonl.write_atomically(path / name, content)


def default_name() -> str:
    """Date, time and a short random id, e.g. `20260829-141503-k3f9`; sorts by age."""
    alphabet = "abcdefghjkmnpqrstuvwxyz23456789"
    suffix = "".join(secrets.choice(alphabet) for _ in range(4))
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{suffix}"
