"""Copies of the metrics for TensorBoard, Weights & Biases and MLflow.

Each sink runs in its own thread behind a bounded queue, because its library may block on a network
or raise anything at all. Who fills the queue: `MetricsLog.append`. What unblocks it: the thread.

Invariant: a sink that fails or hangs costs one warning and its own rows, nothing else; the JSONL
file has them all.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rlmix.core.errors import ConfigError

QUEUE_ROWS = 1000
CLOSE_LIMIT_S = 10.0
"""Longest time that the end of a run waits for its sinks."""


class Sink(Protocol):
    """Called from one thread only, in order: `write` for each step, then `close`."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class SinkContext:
    """What a sink may know about the run. No credentials: the libraries find their own."""

    run_path: Path
    run_id: str
    run_name: str
    from_step: int
    """Steps that exist already; later ones of an earlier attempt are void."""
    config: dict[str, Any]
    known: str | None = None
    """What `remember` was given in an earlier attempt."""
    remember: Callable[[str], None] = field(default=lambda value: None)


class TensorBoardSink:
    """Event files in `tb/`, written without importing torch or TensorFlow."""

    def __init__(self, context: SinkContext) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(context.run_path / "tb"))
        # Tells TensorBoard to forget the steps of an earlier attempt that are run again.
        self._writer.add_event(
            Event(step=context.from_step + 1, session_log=SessionLog(status=SessionLog.START))
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [
            self._summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()
        ]
        unix_s = numbers.get("time/unix_s", 0.0)
        self._writer.add_event(
            self._event(step=step, wall_time=unix_s, summary=self._summary(value=values))
        )
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Steps are an ordinary column, because W&B silently drops rows whose own step goes back."""

    def __init__(self, context: SinkContext) -> None:
        import wandb

        self._run = wandb.init(
            project="rlmix",
            id=context.run_id,
            name=context.run_name,
            resume="allow",
            dir=str(context.run_path),
            config=context.config,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"step": step, **numbers})

    def close(self) -> None:
        self._run.finish()


class MlflowSink:
    """One MLflow run per rlmix run, found again after a resume."""

    def __init__(self, context: SinkContext) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client = MlflowClient()
        if context.known is not None:
            self._run_id = context.known
            return
        experiment = self._client.get_experiment_by_name("rlmix")
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment("rlmix")
        )
        created = self._client.create_run(
            experiment_id, run_name=context.run_name, tags={"rlmix.run_id": context.run_id}
        )
        self._run_id = created.info.run_id
        context.remember(self._run_id)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        unix_ms = int(1000 * numbers.get("time/unix_s", 0.0))
        metrics = [self._metric(key, value, unix_ms, step) for key, value in numbers.items()]
        for start in range(0, len(metrics), 1000):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


SINKS: dict[str, Callable[[SinkContext], Sink]] = {
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": MlflowSink,
}


class SinkWorker:
    """Owns one sink and the thread it lives in."""

    def __init__(
        self,
        name: str,
        open_sink: Callable[[], Sink],
        *,
        on_failure: Callable[[str, str], None],
    ) -> None:
        """`on_failure(sink name, reason)` is called at most once, from the sink's thread."""
        self.name = name
        self._open_sink = open_sink
        self._on_failure = on_failure
        self._rows: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(QUEUE_ROWS)
        self._has_failed = False
        # A daemon: a sink that hangs in a network call must not keep the process alive.
        self._thread = threading.Thread(target=self._work, name=f"sink {name}", daemon=True)
        self._thread.start()

    def put(self, step: int, numbers: Mapping[str, float]) -> None:
        """Hand over one row; never waits."""
        if self._has_failed:
            return
        try:
            self._rows.put_nowait((step, numbers))
        except queue.Full:
            self._fail(f"it is {QUEUE_ROWS} rows behind")

    def begin_close(self) -> None:
        """Let the thread end after the rows it has; never waits."""
        if not self._has_failed:
            with contextlib.suppress(queue.Full):
                self._rows.put_nowait(None)

    def join(self, limit_s: float) -> None:
        self._thread.join(0.0 if self._has_failed else limit_s)
        if self._thread.is_alive() and not self._has_failed:
            self._fail("it did not finish in time at the end of the run")

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(self.name, reason)

    def _work(self) -> None:
        # The one place where any exception is swallowed: the libraries behind a sink may raise
        # anything, and telemetry must not end a run (JSONL has every row).
        try:
            sink = self._open_sink()
            while (item := self._rows.get()) is not None:
                sink.write(*item)
            sink.close()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")


def close_sinks(workers: Sequence[SinkWorker], *, limit_s: float = CLOSE_LIMIT_S) -> None:
    """End all sinks at once, waiting no longer than `limit_s` for all of them together."""
    deadline_s = time.monotonic() + limit_s
    for worker in workers:
        worker.begin_close()
    for worker in workers:
        worker.join(max(0.0, deadline_s - time.monotonic()))


def check_sinks(names: tuple[str, ...]) -> None:
    """Raise ConfigError for a sink that does not exist."""
    if unknown := [name for name in names if name not in SINKS]:
        raise ConfigError(f"observe: no sink {', '.join(unknown)}; known are {', '.join(SINKS)}")
