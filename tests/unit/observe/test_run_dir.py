"""The run directory: one owner, one identity over attempts, no step twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlmix.core.errors import ConfigError, DataError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory
from rlmix.observe.jsonl import read_jsonl
from rlmix.observe.lock import is_locked, read_owner
from rlmix.observe.manifest import read_manifest
from rlmix.observe.run_dir import RunDir, default_name

OWN_A_RUN = """
import sys
from pathlib import Path
from rlmix.observe.run_dir import RunDir
run = RunDir.create(Path(sys.argv[1]), "x")
for step in (1, 2, 3):
    run.metrics.append({"step": step, "reward/mean": step / 10})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that owns run `x` and has written three steps."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWN_A_RUN, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


def void_trajectory() -> Trajectory:
    return Trajectory(
        session_id="s",
        group_id="g",
        task_id="t",
        prompt_ids=(1,),
        turns=(),
        stop_reason=StopReason.ENGINE_LOST,
        outcome=Outcome.VOID,
        reward=0.0,
    )


def test_new_run_holds_what_was_asked_for_and_who_runs_it(tmp_path: Path) -> None:
    run = RunDir.create(
        tmp_path,
        "x",
        overrides=["loop.steps=3", "net.token=s3cret"],
        config_yaml="loop:\n  steps: 3\n",
        plan={"pools": {"b200": {"replicas": 1}}},
        argv=["rlmix", "train"],
    )
    assert (run.path / "overrides.txt").read_text() == "loop.steps=3\nnet.token=***\n"
    assert (run.path / "config.yaml").read_text() == "loop:\n  steps: 3\n"
    assert json.loads((run.path / "plan.json").read_text())["pools"]["b200"]["replicas"] == 1
    assert {"logs", "checkpoints", "weights", "trajectories"} <= set(os.listdir(run.path))
    manifest = read_manifest(run.path)
    assert manifest.run_id == run.run_id
    assert manifest.attempts[0].owner.pid == os.getpid()
    assert manifest.attempts[0].argv == ("rlmix", "train")
    assert manifest.attempts[0].exit_reason is None
    assert manifest.software["packages"]["numpy"]
    assert manifest.machine["cpu_cores"] >= 1
    run.close("finished")
    assert read_manifest(run.path).attempts[0].exit_reason == "finished"


def test_existing_name_is_refused_with_both_ways_out(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "x").close("finished")
    with pytest.raises(ConfigError, match=r"another run\.name.*--resume x"):
        RunDir.create(tmp_path, "x")


@pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", "a b", "x" * 101])
def test_name_that_is_no_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.name"):
        RunDir.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


def test_default_names_differ_and_sort_by_time() -> None:
    assert default_name() != default_name()
    assert default_name()[:2] == "20"


def test_second_process_cannot_own_a_running_run(
    tmp_path: Path, owner: "subprocess.Popen[str]"
) -> None:
    assert is_locked(tmp_path / "x")
    with pytest.raises(ConfigError, match=f"process {owner.pid} .*rlmix runs stop x"):
        RunDir.open(tmp_path / "x")


def test_lock_is_free_the_moment_its_owner_is_killed(
    tmp_path: Path, owner: "subprocess.Popen[str]"
) -> None:
    holder = read_owner(tmp_path / "x")
    assert holder is not None
    assert holder.is_alive()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert not holder.is_alive()
    run = RunDir.open(tmp_path / "x")
    assert run.attempt == 2
    assert run.from_step == 3
    run.close("interrupted")


def test_resume_keeps_the_run_id_and_counts_no_step_twice(
    tmp_path: Path, owner: "subprocess.Popen[str]"
) -> None:
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    first_id = read_manifest(tmp_path / "x").run_id
    run = RunDir.open(tmp_path / "x")
    with pytest.raises(DataError, match="step 3 after step 3"):
        run.metrics.append({"step": 3})
    assert run.truncate_after(1) == 2
    run.metrics.append({"step": 2, "reward/mean": 0.9})
    run.close("finished")
    rows = list(read_jsonl(run.path / "metrics.jsonl"))
    assert [(row["step"], row["reward/mean"], row["run/attempt"]) for row in rows] == [
        (1, 0.1, 1),
        (2, 0.9, 2),
    ]
    aside = list(read_jsonl(run.path / "superseded" / "attempt_001" / "metrics.jsonl"))
    assert [row["step"] for row in aside] == [2, 3]
    kinds = [event["kind"] for event in read_jsonl(run.path / "events.jsonl")]
    assert kinds == ["attempt_started", "attempt_started", "steps_superseded", "attempt_ended"]
    manifest = read_manifest(run.path)
    assert manifest.run_id == first_id
    assert [(a.number, a.from_step, a.exit_reason) for a in manifest.attempts] == [
        (1, 0, None),
        (2, 1, "finished"),
    ]


def test_trajectories_of_repeated_steps_move_away_with_their_index(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    for step in (1, 2):
        run.write_trajectories(step, [void_trajectory()])
        run.metrics.append({"step": step})
    run.close("interrupted")
    run = RunDir.open(tmp_path / "x")
    run.truncate_after(1)
    run.write_trajectories(2, [void_trajectory(), void_trajectory()])
    run.close("finished")
    index = [(e["step"], e["sessions"]) for e in read_jsonl(run.trajectories / "index.jsonl")]
    assert index == [(1, 1), (2, 2)]
    assert len(list(read_jsonl(run.path / "superseded/attempt_001/step_000002.jsonl"))) == 1


def test_torn_metrics_line_is_repaired_and_the_repair_is_an_event(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.metrics.append({"step": 1})
    run.close("failed")
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step":2,"rew')
    run = RunDir.open(tmp_path / "x")
    run.metrics.append({"step": 2})
    run.close("finished")
    assert [row["step"] for row in read_jsonl(run.path / "metrics.jsonl")] == [1, 2]
    repaired = [e for e in read_jsonl(run.path / "events.jsonl") if e["kind"] == "log_repaired"]
    assert [(e["file"], e["removed_bytes"]) for e in repaired] == [("metrics.jsonl", 14)]


def test_run_time_goes_on_where_the_last_attempt_stopped(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "x")
    run.close("interrupted")
    events = tmp_path / "x" / "events.jsonl"
    lines = events.read_text().splitlines()
    last = json.loads(lines[-1])
    last["run_s"] = 1000.0
    events.write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    run = RunDir.open(tmp_path / "x")
    run.metrics.append({"step": 1})
    run.close("finished")
    row = next(iter(read_jsonl(run.path / "metrics.jsonl")))
    assert 1000.0 <= row["time/run_s"] < 1005.0


def test_leaving_the_block_records_how_the_run_ended(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), RunDir.create(tmp_path, "a"):
        raise KeyboardInterrupt
    with pytest.raises(ValueError, match="bug"), RunDir.create(tmp_path, "b"):
        raise ValueError("bug")
    reasons = [read_manifest(tmp_path / name).attempts[0].exit_reason for name in ("a", "b")]
    assert reasons == ["interrupted", "failed"]


def test_folder_without_manifest_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no run directory"):
        RunDir.open(tmp_path)
