"""`events.jsonl`: everything that happened to a run beside its steps, with time and reason.

Events are only ever added. A resumed run keeps the events of the steps it repeats, and an event
says from which step the repetition starts.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmix.observe.jsonl import JsonlWriter, read_last, valid_text
from rlmix.observe.redact import Redactor

EVENTS_FILE = "events.jsonl"


class RunClock:
    """Seconds spent running, summed over attempts; the pause between two attempts is left out."""

    def __init__(self, before_s: float, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._zero_s = monotonic() - before_s

    def now_s(self) -> float:
        return round(self._monotonic() - self._zero_s, 3)


class EventLog:
    """The run's one writer of events."""

    def __init__(
        self, run_path: Path, *, attempt: int, clock: RunClock, redactor: Redactor | None = None
    ) -> None:
        self._writer = JsonlWriter(run_path / EVENTS_FILE, redactor=redactor)
        self._attempt = attempt
        self._clock = clock
        self._listeners: list[Callable[[float, str, str], None]] = []
        if self._writer.repaired_bytes:
            self.append(
                "log_repaired",
                "the previous attempt died while writing; its unfinished last line was removed",
                file=EVENTS_FILE,
                removed_bytes=self._writer.repaired_bytes,
            )

    def append(self, kind: str, reason: str, **fields: Any) -> None:
        """Add one event.

        Args:
            kind: what happened, in snake_case (`replica_lost`, `checkpoint_saved`).
            reason: why, for a reader; may be empty only where the kind says it all.
            fields: facts as JSON or numpy values; `unix_s`, `run_s`, `attempt`, `kind` and
                `reason` are ours.
        """
        self._writer.append(
            {
                **fields,
                "unix_s": round(time.time(), 3),
                "run_s": self._clock.now_s(),
                "attempt": self._attempt,
                "kind": kind,
                "reason": valid_text(reason),
            }
        )
        for listener in self._listeners:
            listener(self._clock.now_s(), kind, reason)

    def subscribe(self, listener: Callable[[float, str, str], None]) -> None:
        """Call `listener(run_s, kind, reason)` for every event from now on."""
        self._listeners.append(listener)

    def close(self) -> None:
        self._writer.close()


def run_seconds_before(run_path: Path) -> float:
    """Run time at the last event of the previous attempt, in seconds; 0 for a fresh run."""
    last = read_last(run_path / EVENTS_FILE)
    return float(last["run_s"]) if last else 0.0
