"""Whole runs with real processes: engines, sandboxes, trainer, Ray."""

import json
import os
import signal

import pytest

from rlmix.observe.trajectories import read_trajectories

pytestmark = pytest.mark.slow

STEPS = 40
METRIC_KEYS = (
    "step",
    "loss/policy",
    "loss/grad_norm",
    "reward/mean",
    "mismatch/k3_kl",
    "mismatch/mean_abs",
    "correction/masked_frac",
    "correction/sc_tail_ratio",
    "correction/ess_frac",
    "staleness/mean_versions",
    "staleness/max_versions",
    "cost/step_usd",
    "time/step_s",
    "time/trainer_wait_frac",
    "rollout/tokens",
    "rollout/void_frac",
)
RUN_FILES = (
    "overrides.txt",
    "config.yaml",
    "plan.json",
    "manifest.json",
    "metrics.jsonl",
    "events.jsonl",
    "trajectories",
    "logs",
    "checkpoints",
    "weights",
    "report.html",
)


def test_a_run_survives_a_killed_engine_and_leaves_its_records_and_nothing_else(start_run):
    # Long enough for a replacement to boot while steps go on without it.
    run = start_run("x", f"loop.steps={STEPS}", "loop.eval_tasks=8", "--json")
    run.wait_until(lambda: len(run.rows()) >= 1, "first step")
    victim = json.loads((run.path / "ready" / "b200-0.json").read_text())
    os.kill(victim["pid"], signal.SIGKILL)
    code, stdout = run.finish()
    assert code == 0, run.stderr()

    document = json.loads(stdout)
    assert document["run"] == "x"
    assert document["run_dir"] == str(run.path)
    assert document["steps"] == STEPS
    assert document["wall_s"] > 0
    assert document["cost_usd"] > 0
    assert 0 <= document["reward_first"] <= 1
    assert 0 <= document["reward_last"] <= 1
    assert document["eval"]["tasks"] == 8

    assert all((run.path / name).exists() for name in RUN_FILES)
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for key in METRIC_KEYS:
        assert all(key in row for row in rows), key
    for pool in ("b200", "a100"):
        for key in (f"cost/by_pool/{pool}_usd", f"pools/{pool}/replicas"):
            assert all(key in row for row in rows), key

    dead = [event for event in run.events("replica_dead") if event["replica"] == "b200-0"]
    assert len(dead) == 1
    assert "SIGKILL" in dead[0]["reason"]
    ready = [event for event in run.events("replica_ready") if event["replica"] == "b200-0"]
    assert len(ready) >= 2

    sessions = [
        trajectory
        for file in sorted((run.path / "trajectories").glob("step_*.jsonl"))
        for trajectory in read_trajectories(file)
    ]
    assert len(sessions) == STEPS * 8
    assert len({session.session_id for session in sessions}) == len(sessions)
    turns = [turn for session in sessions for turn in session.turns]
    assert {turn.pool for turn in turns} == {"b200", "a100"}
    assert all(turn.version_spans and "emulated" in turn.numerics_key for turn in turns)
    # Score centering needs the whole support of every sampled token.
    assert all(turn.kept is not None and turn.kept_exact for turn in turns)
    run.assert_nothing_left()


def test_a_killed_run_is_resumed_with_its_version_and_task_order(start_run):
    first = start_run("r", "loop.steps=6")
    first.wait_until(lambda: len(first.rows()) >= 3, "third step")
    first.kill()
    first.assert_nothing_left()
    before = first.rows()

    second = start_run("r2", "--resume", "r", "--json")
    code, stdout = second.finish()
    assert code == 0, second.stderr()
    document = json.loads(stdout)
    assert document["run"] == "r"
    assert document["steps"] == 6
    assert document["policy_version"] == 6

    rows = first.rows()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    resumed_at = first.events("resume_point")[0]
    assert "newest complete checkpoint" in resumed_at["reason"]
    kept = [row for row in rows if row["run/attempt"] == 1]
    # A checkpoint follows every step here, so at most the step in flight is done again.
    assert len(kept) >= len(before) - 1
    assert kept == before[: len(kept)]
    sessions = [
        trajectory
        for file in sorted((first.path / "trajectories").glob("step_*.jsonl"))
        for trajectory in read_trajectories(file)
    ]
    # Every place in the task order was trained on at most once, over both attempts.
    groups = {}
    for session in sessions:
        index = session.group_id.split("r")[0]
        groups.setdefault(index, set()).add(session.group_id)
    assert len(groups) == 6 * 2
    assert all(len(names) == 1 for names in groups.values())
    assert {name.split("r")[0] for name in groups} <= {f"g{index:06d}" for index in range(16)}
    first.assert_nothing_left()
    assert second.marked_processes() == []


def test_a_killed_router_comes_back_and_costs_no_step_and_no_evaluation(start_run):
    run = start_run("q", "loop.steps=12", "loop.eval_tasks=20", "--json")
    run.wait_until(lambda: len(run.rows()) >= 1, "first step")
    os.kill(json.loads((run.path / "ready" / "router.json").read_text())["pid"], signal.SIGKILL)
    code, stdout = run.finish()
    assert code == 0, run.stderr()
    document = json.loads(stdout)
    assert document["steps"] == 12
    assert document["eval"]["void"] == 0
    assert len(run.events("router_lost")) == 1
    assert [row["step"] for row in run.rows()] == list(range(1, 13))
    run.assert_nothing_left()


def test_ctrl_c_ends_after_the_step_with_130_and_the_run_can_go_on(start_run):
    run = start_run("c", "loop.steps=50")
    run.wait_until(lambda: len(run.rows()) >= 1, "first step")
    os.kill(run.process.pid, signal.SIGINT)
    code, _ = run.finish()
    assert code == 130, run.stderr()
    run.assert_nothing_left()
    done = len(run.rows())
    assert done < 50
    assert (run.path / "checkpoints" / f"step_{done:06d}" / "manifest.json").exists()
    assert run.events("attempt_ended")[-1]["reason"] == "interrupted"


def test_alarms_take_a_pool_out_and_stop_the_run_and_both_survive_a_resume(start_run):
    # k3 is never below 0, so both pools are accused at once: one goes, the last one must stay.
    # Weights are never all equal, so the run is stopped in the same step.
    run = start_run(
        "a", "loop.steps=50", "alarms.patience=2", "alarms.min_tokens=1",
        "alarms.pool_k3_limit=0", "alarms.pool_k3_action=quarantine",
        "alarms.ess_limit=1", "alarms.ess_action=stop",
    )  # fmt: skip
    code, _ = run.finish()
    assert code == 1
    assert "alarms: the run diverged: the weights are worth" in run.stderr()
    assert "to go on: rlmix train --resume" in run.stderr()
    (out,) = run.events("pool_quarantined")
    (refused,) = run.events("quarantine_refused")
    assert {out["pool"], refused["pool"]} == {"b200", "a100"}
    done = len(run.rows())
    assert out["step"] == done < 10
    assert (run.path / "checkpoints" / f"step_{done:06d}" / "manifest.json").exists()
    summary = json.loads((run.path / "summary.json").read_text())
    assert (summary["exit_reason"], summary["quarantined"]) == ("failed", [out["pool"]])
    run.assert_no_process_left()

    again = start_run(
        "a2", "--resume", "a", "alarms.ess_action=event", "loop.steps=500",
        "alarms.release_after_steps=3",
    )  # fmt: skip

    def readies():
        return [event["attempt"] for event in run.events("replica_ready")
                if event["pool"] == out["pool"]]  # fmt: skip

    # Booting takes as many steps as the machine is busy, so it is awaited and not counted.
    again.wait_until(lambda: len(readies()) >= 2, "the released pool to serve")
    os.kill(again.process.pid, signal.SIGINT)
    code, _ = again.finish()
    assert code == 130, again.stderr()
    held = run.events("pool_quarantined")[1]
    assert (held["pool"], held["reason"]) == (out["pool"], f"in quarantine since step {done}")
    assert run.events("pool_released")[0]["step"] == done + 3
    assert readies()[:2] == [1, 2]  # Once in the first attempt, and in the second when released.
    assert "pool_quarantined" in (run.path / "report.html").read_text()
    run.assert_nothing_left()
