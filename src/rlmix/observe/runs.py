"""Runs on this machine, from outside: list, show, find logs, stop, export.

Every function returns data; `runs_view` draws it. Nothing here owns a run or writes into it.
"""

import csv
import io
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rlmix.core.errors import ConfigError, DataError
from rlmix.observe.events import EVENTS_FILE
from rlmix.observe.jsonl import read_jsonl, read_last
from rlmix.observe.lock import LOCK_FILE, Owner, is_locked, read_owner
from rlmix.observe.manifest import Manifest, read_manifest
from rlmix.observe.metrics import METRICS_FILE
from rlmix.observe.report_data import read_document
from rlmix.observe.run_state import SUMMARY_FILE, RunState, is_run_dir, read_run_state
from rlmix.observe.stop_request import forget_stop_requests, request_stop

STOP_POLL_S = 0.5
STOP_LIMIT_S = 120.0
"""Draining waits for turns in flight and writes a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRow:
    """One line of `rlmix runs list`."""

    name: str
    path: Path
    run_id: str
    state: RunState
    steps: int
    """Optimizer steps done."""
    reward: float | None
    """Of the last step."""
    started_s: float
    """Unix time of the run's creation."""
    age_s: float
    attempts: int
    pid: int | None
    """Of the owner, while it runs."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path), "state": self.state.value}


@dataclass(frozen=True, kw_only=True, slots=True)
class LogFile:
    """The log of one process of a run."""

    process: str
    """File name without its ending: `trainer_0`, `pool_b200_0`, `router`."""
    path: Path
    size_bytes: int
    modified_s: float
    """Unix time."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path)}


@dataclass(frozen=True, kw_only=True, slots=True)
class StopResult:
    run: str
    was_running: bool
    is_stopped: bool
    state: RunState
    waited_s: float
    message: str
    """For a reader: what happened and, if it still runs, what to do."""

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}


def list_runs(root: Path, *, now_s: float | None = None) -> list[RunRow]:
    """All runs of a folder, newest first; a missing folder has none."""
    return read_runs(root, now_s=now_s)[0]


def read_runs(root: Path, *, now_s: float | None = None) -> tuple[list[RunRow], dict[str, str]]:
    """`list_runs`, and the folders of runs that this version cannot read, with the reason."""
    if not root.is_dir():
        return [], {}
    now_s = time.time() if now_s is None else now_s
    rows, unreadable = [], {}
    for path in sorted(root.iterdir()):
        if is_run_dir(path):
            try:
                rows.append(_row(path, read_manifest(path), now_s))
            except DataError as error:
                unreadable[path.name] = str(error)
    return sorted(rows, key=lambda row: row.started_s, reverse=True), unreadable


def find_run(root: Path, run: str | None = None) -> Path:
    """The directory of a run given by name, by path, or not at all (the newest one).

    Raises:
        ConfigError: there is no such run; the message names what is there.
    """
    if run is None:
        rows = list_runs(root)
        if not rows:
            raise ConfigError(f"{root}: no run here yet; start one with `rlmix train`")
        return rows[0].path
    for path in (root / run, Path(run)):
        if is_run_dir(path):
            return path.resolve()
    names = [row.name for row in list_runs(root)]
    likely = get_close_matches(run, names, n=3) or names[:3]
    hint = f"; there is {', '.join(likely)}" if likely else "; there is no run there"
    raise ConfigError(f"no run {run!r} in {root}{hint}")


def show_run(path: Path, *, now_s: float | None = None) -> dict[str, Any]:
    """Everything about one run as a JSON document.

    Raises:
        DataError: `path` is no run directory.
    """
    manifest = read_manifest(path)
    row = _row(path, manifest, time.time() if now_s is None else now_s)
    notes: list[str] = []
    summary = read_document(path / SUMMARY_FILE, notes, is_expected=False)
    plan = read_document(path / "plan.json", notes)
    overrides = path / "overrides.txt"
    return {
        **row.to_dict(),
        "summary": summary or None,
        "metrics": read_last(path / METRICS_FILE),
        "pools": plan.get("pools", {}),
        "overrides": overrides.read_text().split() if overrides.is_file() else [],
        "attempt_list": [
            {**asdict(attempt), "argv": list(attempt.argv)} for attempt in manifest.attempts
        ],
        "software": manifest.software,
        "machine": manifest.machine,
        "last_events": _last_events(path, 10),
        "logs": [log.to_dict() for log in log_files(path)],
        "report": str(path / "report.html") if (path / "report.html").is_file() else None,
    }


def log_files(path: Path, process: str | None = None) -> list[LogFile]:
    """Logs in `logs/`, by name; with `process` only those whose name begins so.

    Raises:
        ConfigError: no log begins with `process`.
    """
    folder = path / "logs"
    logs = []
    for file in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if file.is_file():
            facts = file.stat()
            logs.append(
                LogFile(
                    process=str(file.relative_to(folder).with_suffix("")),
                    path=file,
                    size_bytes=facts.st_size,
                    modified_s=facts.st_mtime,
                )
            )
    if process is None:
        return logs
    chosen = [log for log in logs if log.process.startswith(process)]
    if not chosen:
        known = ", ".join(log.process for log in logs) or "none"
        raise ConfigError(f"{path.name}: no log of {process!r}; there are {known}")
    return chosen


def read_tail(path: Path, *, num_lines: int) -> list[str]:
    """Last lines of a log, decoded as far as possible."""
    chunk_bytes = 4096 * max(1, num_lines // 20 + 1)
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while True:
            start = max(0, size - chunk_bytes)
            file.seek(start)
            text = file.read(size - start)
            if start == 0 or text.count(b"\n") > num_lines:
                return text.decode("utf-8", "replace").splitlines()[-num_lines:]
            chunk_bytes *= 4


def stop(path: Path, *, limit_s: float = STOP_LIMIT_S) -> StopResult:
    """Ask the owner of a run to end it, and wait until it has.

    On this machine by SIGINT, which reaches the very process that holds the run or nobody: its
    start time is compared after the process was pinned, so a reused pid is never signalled. On
    another machine by a file in the run's folder.

    Raises:
        DataError: `path` is no run directory.
    """
    if is_over(path):
        return _stopped(path, was_running=False, waited_s=0.0)
    owner = read_owner(path)
    if owner is None or not owner.is_here():
        return _stop_elsewhere(path, owner, limit_s)
    started_s = time.monotonic()
    if not _interrupt_and_wait(owner, limit_s):
        return _not_stopped(
            path,
            waited_s=time.monotonic() - started_s,
            message=(
                f"process {owner.pid} has not ended within {limit_s:g} s; it may still be "
                f"draining (`rlmix runs logs {path.name}`). `kill -9 {owner.pid}` ends it at "
                "once, its children with it; the run can be resumed from its last checkpoint"
            ),
        )
    if is_locked(path):
        return _not_stopped(
            path,
            waited_s=time.monotonic() - started_s,
            message=(
                f"process {owner.pid} is gone, but another one still holds {path / LOCK_FILE}; "
                "nothing was signalled, because it is not the one that the run recorded"
            ),
        )
    return _stopped(path, was_running=True, waited_s=time.monotonic() - started_s)


def is_over(path: Path) -> bool:
    """True when no process runs the run. Where locks of other machines are not seen the manifest
    decides: an attempt of another machine that has no end goes on.

    Raises:
        DataError: `path` is no run directory.
    """
    attempts = read_manifest(path).attempts
    if is_locked(path):
        return False
    owner = read_owner(path)
    is_open = bool(attempts) and attempts[-1].exit_reason is None
    return not (is_open and owner is not None and not owner.is_here())


def _stop_elsewhere(path: Path, owner: Owner | None, limit_s: float) -> StopResult:
    host = owner.host if owner else "another machine"
    started_s = time.monotonic()
    request_stop(path)
    while (waited_s := time.monotonic() - started_s) < limit_s:
        attempts = read_manifest(path).attempts
        if attempts and attempts[-1].exit_reason is not None:
            return _stopped(path, was_running=True, waited_s=waited_s)
        time.sleep(STOP_POLL_S)
    forget_stop_requests(path)
    return _not_stopped(
        path,
        waited_s=time.monotonic() - started_s,
        message=(
            f"the run's process on {host} has not ended within {limit_s:g} s; it may still be "
            f"draining (`rlmix runs logs {path.name}`), or {host} is gone: then `rlmix train "
            f"--resume {path.name}` continues it from its last checkpoint"
        ),
    )


def export_metrics(path: Path) -> str:
    """`metrics.jsonl` as CSV: `step` first, then every key in order of appearance."""
    rows = list(read_jsonl(path / METRICS_FILE))
    keys = dict.fromkeys(["step"])
    for row in rows:
        keys.update(dict.fromkeys(row))
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(keys), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _row(path: Path, manifest: Manifest, now_s: float) -> RunRow:
    last = read_last(path / METRICS_FILE) or {}
    state = read_run_state(path)
    owner = read_owner(path) if state is RunState.RUNNING else None
    return RunRow(
        name=path.name,
        path=path,
        run_id=manifest.run_id,
        state=state,
        steps=int(last.get("step", 0)),
        reward=last.get("reward/mean"),
        started_s=manifest.created_s,
        age_s=round(max(0.0, now_s - manifest.created_s), 1),
        attempts=len(manifest.attempts),
        pid=owner.pid if owner else None,
    )


def _last_events(path: Path, number: int) -> list[dict[str, Any]]:
    events: Iterable[dict[str, Any]] = read_jsonl(path / EVENTS_FILE)
    return list(events)[-number:]


def _not_stopped(path: Path, *, waited_s: float, message: str) -> StopResult:
    return StopResult(
        run=path.name,
        was_running=True,
        is_stopped=False,
        state=RunState.RUNNING,
        waited_s=round(waited_s, 1),
        message=message,
    )


def _stopped(path: Path, *, was_running: bool, waited_s: float) -> StopResult:
    state = read_run_state(path)
    message = f"run {path.name} is not running ({state.value})"
    if was_running:
        message = f"run {path.name} stopped after {waited_s:.1f} s ({state.value})"
    return StopResult(
        run=path.name,
        was_running=was_running,
        is_stopped=True,
        state=state,
        waited_s=round(waited_s, 1),
        message=message,
    )


def _interrupt_and_wait(owner: Owner, limit_s: float) -> bool:
    """True when the process has ended within the limit (or had already)."""
    try:
        pinned = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return True
    try:
        if not owner.is_alive():
            return True
        signal.pidfd_send_signal(pinned, signal.SIGINT)
        poll = select.poll()
        poll.register(pinned, select.POLLIN)
        return bool(poll.poll(1000 * limit_s))
    finally:
        os.close(pinned)
