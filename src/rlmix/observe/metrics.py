"""`metrics.jsonl`: one object per optimizer step, and the sinks that copy it elsewhere.

Invariant: steps strictly increase, so no step is counted twice, also over attempts. A row is on
its way to the file before any sink sees it; what a sink does with it cannot stop the run.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlmix.core.errors import DataError
from rlmix.observe.events import RunClock
from rlmix.observe.jsonl import JsonlWriter, read_last
from rlmix.observe.redact import Redactor
from rlmix.observe.sinks import SinkWorker

METRICS_FILE = "metrics.jsonl"
NON_FINITE_KEY = "observe/non_finite"


class MetricsLog:
    """The run's one writer of metrics."""

    def __init__(
        self, run_path: Path, *, attempt: int, clock: RunClock, redactor: Redactor | None = None
    ) -> None:
        path = run_path / METRICS_FILE
        self._writer = JsonlWriter(path, redactor=redactor)
        self.repaired_bytes = self._writer.repaired_bytes
        self.last_step: int | None = None
        """Newest step in the file; None before the first."""
        self._find_last_step()
        self._attempt = attempt
        self._clock = clock
        self._sinks: Sequence[SinkWorker] = ()

    def attach(self, sinks: Sequence[SinkWorker]) -> None:
        self._sinks = sinks

    def append(self, row: Mapping[str, Any]) -> None:
        """Write the metrics of one step.

        Args:
            row: `step` (int) and `room/quantity_unit` numbers. Run time (`time/run_s`), unix time
                (`time/unix_s`) and the attempt are added. NaN and infinities become null, and
                are named under `observe/non_finite`.
        Raises:
            DataError: `step` is missing, no integer, or not above the last one.
        """
        step = row.get("step")
        if not isinstance(step, int):
            raise DataError(f"{self._writer.path}: a row needs an integer `step`, got {step!r}")
        if self.last_step is not None and step <= self.last_step:
            raise DataError(
                f"{self._writer.path}: step {step} after step {self.last_step}; steps only "
                "increase (a resumed run calls truncate_after first)"
            )
        complete = {
            "step": step,
            "time/unix_s": round(time.time(), 3),
            "time/run_s": self._clock.now_s(),
            "run/attempt": self._attempt,
            **row,
        }
        non_finite = {
            key: str(float(value))
            for key, value in complete.items()
            if isinstance(value, float) and not math.isfinite(value)
        }
        if non_finite:
            complete[NON_FINITE_KEY] = non_finite
        self._writer.append(complete)
        self.last_step = step
        numbers = {
            key: float(value)
            for key, value in complete.items()
            if key != "step" and _is_finite_number(value)
        }
        for sink in self._sinks:
            sink.put(step, numbers)

    def reopen(self) -> None:
        """Continue behind a file that was replaced."""
        self._writer.reopen()
        self._find_last_step()

    def close(self) -> None:
        self._writer.close()

    def _find_last_step(self) -> None:
        last = read_last(self._writer.path)
        self.last_step = int(last["step"]) if last else None


def _is_finite_number(value: object) -> bool:
    try:
        return not isinstance(value, (bool, str)) and math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
