"""Runs seen from outside: honest states, and a stop that hits the right process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from rich.console import Console

from rlmix.core.errors import ConfigError, DataError
from rlmix.observe import runs, runs_view
from rlmix.observe.run_dir import RunDir
from rlmix.observe.run_state import RunState

DRIVER = """
import signal, sys, time
from pathlib import Path
from rlmix.observe.run_dir import RunDir
if sys.argv[2] == "stubborn":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with RunDir.create(Path(sys.argv[1]), "live") as run:
    run.metrics.append({"step": 1, "reward/mean": 0.25})
    (run.logs / "router.log").write_text("one\\ntwo\\nthree\\n")
    print("ready", flush=True)
    time.sleep(60)
"""


def start_driver(root: Path, manner: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(root), manner],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def polite(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    process = start_driver(tmp_path, "polite")
    yield process
    end(process)


@pytest.fixture
def stubborn(tmp_path: Path) -> "Iterator[subprocess.Popen[str]]":
    process = start_driver(tmp_path, "stubborn")
    yield process
    end(process)


def text_of(renderable: object) -> str:
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(renderable)
    return console.export_text()


def test_states_come_from_lock_and_manifest(
    tmp_path: Path, polite: "subprocess.Popen[str]"
) -> None:
    for reason in ("finished", "failed", "interrupted"):
        RunDir.create(tmp_path, reason).close(reason)
    (tmp_path / "no_run").mkdir()
    rows = {row.name: row for row in runs.list_runs(tmp_path)}
    assert {name: row.state.value for name, row in rows.items()} == {
        "finished": "finished",
        "failed": "failed",
        "interrupted": "interrupted",
        "live": "running",
    }
    assert (rows["live"].pid, rows["live"].steps, rows["live"].reward) == (polite.pid, 1, 0.25)
    os.kill(polite.pid, signal.SIGKILL)
    polite.wait()
    assert runs.find_run(tmp_path, "live").name == "live"
    assert {row.name: row.state for row in runs.list_runs(tmp_path)}["live"] is RunState.LOST


def test_newest_run_comes_first_and_is_the_default(tmp_path: Path) -> None:
    for name in ("b", "a"):
        RunDir.create(tmp_path, name).close("finished")
        time.sleep(0.01)
    assert [row.name for row in runs.list_runs(tmp_path)] == ["a", "b"]
    assert runs.find_run(tmp_path).name == "a"
    assert runs.find_run(tmp_path, str(tmp_path / "b")).name == "b"


def test_unknown_run_names_the_likely_one(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "mixed_fleet").close("finished")
    with pytest.raises(ConfigError, match=r"no run 'mixed_flet'.*there is mixed_fleet"):
        runs.find_run(tmp_path, "mixed_flet")
    with pytest.raises(ConfigError, match="no run here yet"):
        runs.find_run(tmp_path / "empty")


def test_stop_interrupts_the_owner_and_says_how_it_ended(
    tmp_path: Path, polite: "subprocess.Popen[str]"
) -> None:
    result = runs.stop(tmp_path / "live", limit_s=20)
    assert (result.was_running, result.is_stopped, result.state) == (
        True,
        True,
        RunState.INTERRUPTED,
    )
    assert "stopped after" in result.message
    assert polite.wait() == -signal.SIGINT


def test_stop_of_a_process_that_does_not_end_says_what_to_do(
    tmp_path: Path, stubborn: "subprocess.Popen[str]"
) -> None:
    result = runs.stop(tmp_path / "live", limit_s=0.3)
    assert not result.is_stopped
    assert result.state is RunState.RUNNING
    assert f"kill -9 {stubborn.pid}" in result.message
    assert stubborn.poll() is None


def test_stop_never_signals_a_process_that_only_has_the_old_pid(
    tmp_path: Path, stubborn: "subprocess.Popen[str]"
) -> None:
    # The lock file names a live process, but one that started at another time.
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    lock = tmp_path / "live" / ".lock"
    owner = orjson.loads(lock.read_bytes())
    earlier = {**owner, "pid": bystander.pid, "started_s": owner["started_s"] - 100}
    lock.write_bytes(orjson.dumps(earlier))
    result = runs.stop(tmp_path / "live", limit_s=0.2)
    assert not result.is_stopped
    assert "nothing was signalled" in result.message
    assert (bystander.poll(), stubborn.poll()) == (None, None)
    bystander.kill()
    bystander.wait()


def test_stop_of_a_finished_run_is_no_error(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "x").close("finished")
    result = runs.stop(tmp_path / "x")
    assert (result.was_running, result.message) == (False, "run x is not running (finished)")


def test_nobody_here_is_signalled_for_a_run_of_another_machine(
    tmp_path: Path, stubborn: "subprocess.Popen[str]"
) -> None:
    lock = tmp_path / "live" / ".lock"
    owner = orjson.loads(lock.read_bytes())
    lock.write_bytes(orjson.dumps({**owner, "host": "node7"}))
    result = runs.stop(tmp_path / "live", limit_s=0.2)
    assert not result.is_stopped
    assert "process on node7 has not ended" in result.message
    assert stubborn.poll() is None


def test_each_process_has_its_log_and_an_unknown_one_is_named(
    tmp_path: Path, polite: "subprocess.Popen[str]"
) -> None:
    run = tmp_path / "live"
    (run / "logs" / "pool_b200_0.log").write_text("x" * 9000 + "\nlast\n")
    assert [log.process for log in runs.log_files(run)] == ["pool_b200_0", "router"]
    assert runs.read_tail(run / "logs" / "router.log", num_lines=2) == ["two", "three"]
    assert runs.read_tail(run / "logs" / "pool_b200_0.log", num_lines=1) == ["last"]
    assert [log.process for log in runs.log_files(run, "pool")] == ["pool_b200_0"]
    with pytest.raises(ConfigError, match=r"no log of 'trainer'.*pool_b200_0, router"):
        runs.log_files(run, "trainer")
    assert "router" in text_of(runs_view.logs_table(runs.log_files(run), now_s=time.time()))


def test_show_is_one_json_document_and_one_view(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x", overrides=["loop.steps=3"], plan={"pools": {"b200": {}}})
    run.metrics.append({"step": 1, "reward/mean": 0.5})
    run.events.append("replica_lost", "b200-0: signal 9")
    run.write_summary({"run": "x", "steps": 1, "reward_first": 0.5, "reward_last": 0.5})
    run.close("finished")
    document = runs.show_run(run.path)
    assert orjson.loads(orjson.dumps(document)) == document
    assert document["overrides"] == ["loop.steps=3"]
    assert document["attempt_list"][0]["exit_reason"] == "finished"
    shown = text_of(runs_view.run_view(document))
    assert "replica_lost: b200-0: signal 9" in shown
    assert "first 0.500, last 0.500" in shown
    with pytest.raises(DataError, match="no run directory"):
        runs.show_run(tmp_path)


def test_export_has_one_column_per_key_and_one_row_per_step(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.metrics.append({"step": 1, "reward/mean": 0.5})
    run.metrics.append({"step": 2, "reward/mean": 0.75, "loss/policy": -0.5})
    run.close("finished")
    lines = runs.export_metrics(run.path).splitlines()
    head = lines[0].split(",")
    assert head[0] == "step"
    table = [dict(zip(head, line.split(","), strict=True)) for line in lines[1:]]
    assert [(row["step"], row["reward/mean"], row["loss/policy"]) for row in table] == [
        ("1", "0.5", ""),
        ("2", "0.75", "-0.5"),
    ]


def test_list_of_no_run_says_how_to_start_one(tmp_path: Path) -> None:
    assert "rlmix train" in text_of(runs_view.runs_table([], root=tmp_path, unreadable={}))
    RunDir.create(tmp_path, "x").close("failed")
    rows = runs.list_runs(tmp_path)
    shown = text_of(runs_view.runs_table(rows, root=tmp_path, unreadable={"y": "too new"}))
    assert "failed" in shown
    assert "y: too new" in shown
