"""Metrics: the file first, sinks as copies that cannot hurt."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rlmix.core.errors import ConfigError, DataError
from rlmix.observe import sinks
from rlmix.observe.jsonl import read_jsonl
from rlmix.observe.run_dir import RunDir
from rlmix.observe.sinks import SinkWorker, close_sinks


class ListSink:
    def __init__(self) -> None:
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.is_closed = False

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.rows.append((step, numbers))

    def close(self) -> None:
        self.is_closed = True


class BrokenSink:
    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        raise ConnectionError("server said 503")

    def close(self) -> None: ...


class HangingSink:
    def __init__(self, release: threading.Event) -> None:
        self._release = release

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._release.wait(30)

    def close(self) -> None: ...


def start(open_sink: Callable[[], sinks.Sink], failures: list[tuple[str, str]]) -> SinkWorker:
    return SinkWorker("s", open_sink, on_failure=lambda name, why: failures.append((name, why)))


def test_step_must_be_an_integer_and_increase(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    with pytest.raises(DataError, match="needs an integer `step`, got None"):
        run.metrics.append({"loss/policy": 1.0})
    run.metrics.append({"step": 5})
    with pytest.raises(DataError, match="step 5 after step 5"):
        run.metrics.append({"step": 5})
    run.close("finished")


def test_not_a_number_becomes_null_and_is_named(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.metrics.append({"step": 1, "loss/policy": math.nan, "loss/grad_norm": math.inf, "a/b": 2.0})
    run.close("finished")
    row = next(iter(read_jsonl(run.path / "metrics.jsonl")))
    assert (row["loss/policy"], row["a/b"]) == (None, 2.0)
    assert row["observe/non_finite"] == {"loss/policy": "nan", "loss/grad_norm": "inf"}


def test_sink_gets_the_numbers_of_each_step_in_order(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    sink, failures = ListSink(), []
    worker = start(lambda: sink, failures)
    run.metrics.attach([worker])
    run.metrics.append({"step": 1, "reward/mean": 0.5, "note": "text", "flag": True})
    run.metrics.append({"step": 2, "reward/mean": math.nan})
    close_sinks([worker])
    assert [step for step, _ in sink.rows] == [1, 2]
    assert sink.rows[0][1]["reward/mean"] == 0.5
    assert {"note", "flag", "step"}.isdisjoint(sink.rows[0][1])
    assert "reward/mean" not in sink.rows[1][1]
    assert sink.is_closed
    assert failures == []


def test_broken_sink_warns_once_and_loses_only_its_own_rows(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    failures: list[tuple[str, str]] = []
    good = ListSink()
    workers = [start(BrokenSink, failures), start(lambda: good, failures)]
    run.metrics.attach(workers)
    for step in range(1, 6):
        run.metrics.append({"step": step})
    close_sinks(workers)
    assert failures == [("s", "ConnectionError: server said 503")]
    assert [step for step, _ in good.rows] == [1, 2, 3, 4, 5]
    assert len(list(read_jsonl(run.path / "metrics.jsonl"))) == 5


def test_sink_whose_library_is_missing_warns_and_the_run_goes_on() -> None:
    failures: list[tuple[str, str]] = []

    def missing() -> sinks.Sink:
        raise ModuleNotFoundError("No module named 'wandb'")

    worker = start(missing, failures)
    close_sinks([worker])
    worker.put(1, {})
    assert failures == [("s", "ModuleNotFoundError: No module named 'wandb'")]


def test_hanging_sinks_are_left_behind_together_at_the_end() -> None:
    failures: list[tuple[str, str]] = []
    release = threading.Event()
    workers = [start(lambda: HangingSink(release), failures) for _ in range(20)]
    for worker in workers:
        worker.put(1, {})
    started_s = time.monotonic()
    close_sinks(workers, limit_s=0.5)
    assert time.monotonic() - started_s < 5.0  # One after the other: 10.
    assert failures == [("s", "it did not finish in time at the end of the run")] * 20
    release.set()


def test_sink_that_falls_too_far_behind_is_dropped_without_waiting() -> None:
    failures: list[tuple[str, str]] = []
    release = threading.Event()
    worker = start(lambda: HangingSink(release), failures)
    for step in range(sinks.QUEUE_ROWS + 2):
        worker.put(step, {})
    assert failures == [("s", "it is 1000 rows behind")]
    release.set()


def test_unknown_sink_lists_the_known_ones(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    with pytest.raises(ConfigError, match="no sink tensorbored; known are tensorboard, wandb"):
        run.open_sinks(["tensorbored"])
    run.close("failed")


def test_tensorboard_reads_every_step_once_over_two_attempts(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.open_sinks(["tensorboard"])
    for step in (1, 2, 3):
        run.metrics.append({"step": step, "reward/mean": step / 10})
    run.close("interrupted")
    run = RunDir.open(tmp_path / "x")
    run.truncate_after(1)
    run.open_sinks(["tensorboard"])
    run.metrics.append({"step": 2, "reward/mean": 0.9})
    run.close("finished")
    assert not [e for e in read_jsonl(run.path / "events.jsonl") if e["kind"] == "sink_failed"]

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run.path / "tb"))
    accumulator.Reload()
    scalars = [(e.step, round(e.value, 4)) for e in accumulator.Scalars("reward/mean")]
    assert scalars == [(1, 0.1), (2, 0.9)]


def test_tensorboard_does_not_import_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from pathlib import Path; from rlmix.observe.run_dir import RunDir\n"
        "run = RunDir.create(Path(sys.argv[1]), 'x'); run.open_sinks(['tensorboard'])\n"
        "run.metrics.append({'step': 1, 'a/b': 1.0}); run.close('finished')\n"
        "assert 'torch' not in sys.modules and 'tensorflow' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert list((tmp_path / "x" / "tb").glob("events.out.tfevents.*"))
