"""`rlmix scale pools` in one process changes the pools of a run in another."""

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rlmix.observe.trajectories import read_trajectories

pytestmark = pytest.mark.slow

POOLS = ("+pool@pools.h100=embedded_h100", "pools.h100.replicas=1")


def scale(run, *arguments, limit_s=300):
    rlmix = str(Path(sys.executable).with_name("rlmix"))
    done = subprocess.run(
        [rlmix, "scale", "pools", *arguments, "--dir", str(run.root), "--json"],
        capture_output=True, text=True, timeout=limit_s, stdin=subprocess.DEVNULL, check=False,
        cwd=run.root,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout), done.stderr


def all_sessions(run):
    return [
        trajectory
        for file in sorted((run.path / "trajectories").glob("step_*.jsonl"))
        for trajectory in read_trajectories(file)
    ]


def test_a_pool_grows_and_another_drains_while_the_run_goes_on(start_run):
    run = start_run("s", "loop.steps=400", "scaling.drain_s=30", *POOLS)
    run.wait_until(lambda: len(run.rows()) >= 1, "first step", 300)
    assert stat.S_IMODE((run.path / "control.json").stat().st_mode) == 0o600

    code, document, _ = scale(run)
    assert code == 0
    assert {name: pool["replicas"] for name, pool in document["pools"].items()} == {
        "b200": 1, "a100": 1, "h100": 1,
    }  # fmt: skip
    for pool in document["pools"].values():
        assert {"replicas", "ready", "target", "load", "usd_per_hour"} <= set(pool)

    for arguments, said in (
        (["x100=1"], "x100=1: no pool 'x100'; pools are b200, a100, h100"),
        (["b200=0", "a100=0", "h100=0"], "nothing could sample"),
        (["algo.top_p=0.9"], "a running run does not take it"),
        (["--cancel", "nobody"], "no scale operation 'nobody'"),
    ):
        code, refused, _ = scale(run, *arguments)
        assert code == 2, arguments
        assert said in refused["error"]

    code, document, stderr = scale(run, "h100=2", "a100=0", "--id", "one")
    assert code == 0, stderr
    assert document["operation"]["status"] == "done"
    assert document["pools"]["h100"]["ready"] == 2
    assert document["pools"]["a100"]["replicas"] == 0
    assert document["usd_per_hour"] == pytest.approx(5.0 + 2 * 2.71)
    # The same name again is the same change.
    code, again, _ = scale(run, "h100=2", "a100=0", "--id", "one")
    assert (code, again["operation"]["status"]) == (0, "done")
    assert len(run.events("scale_started")) == 1

    before = len(run.rows())
    run.wait_until(lambda: len(run.rows()) >= before + 4, "steps after the change", 300)
    os.kill(run.process.pid, signal.SIGINT)
    code, _ = run.finish()
    assert code == 130, run.stderr()

    # Nothing was sampled on the new replica before it was verified and rotated in.
    events = run.rows("events.jsonl")
    steps = [event for event in events if event["kind"] == "scale_step"]
    order = [(event["replica"], event["step"]) for event in steps]
    assert order == [
        ("h100-1", "catching_up"), ("h100-1", "verifying"), ("h100-1", "rotating_in"),
        ("h100-1", "serving"), ("a100-0", "draining"), ("a100-0", "stopping"), ("a100-0", "gone"),
    ]  # fmt: skip
    serving_unix_s = next(e["unix_s"] for e in steps if e["step"] == "rotating_in")
    gone_unix_s = next(e["unix_s"] for e in steps if e["step"] == "gone")
    sessions = all_sessions(run)
    turns = [turn for session in sessions for turn in session.turns]
    new = [turn for turn in turns if turn.replica == "h100-1"]
    assert new
    started = {s.session_id: s.started_s for s in sessions if s.turns}
    first_on_new = min(
        s.finished_s for s in sessions if any(t.replica == "h100-1" for t in s.turns)
    )
    assert first_on_new > serving_unix_s - 1.0
    # The drained replica lost no session, and got none after it was closed.
    assert all(s.rehomed == 0 for s in sessions)
    late = [s for s in sessions if s.started_s > gone_unix_s]
    assert late
    assert not any(t.replica == "a100-0" for s in late for t in s.turns)
    assert len(started) == len(set(started))
    voids = [row["rollout/void_frac"] for row in run.rows()]
    assert max(voids) == 0.0
    # The rows follow.
    last = run.rows()[-1]
    assert (last["pools/h100/replicas"], last["pools/a100/replicas"]) == (2.0, 0.0)
    assert "one: h100 1" in (run.path / "report.html").read_text()
    assert not (run.path / "control.json").exists()
    run.assert_nothing_left()
