"""A whole run whose trainer has two ranks, killed one after the other."""

import json
import os
import signal

import pytest

pytestmark = pytest.mark.slow


def rank_pid(run, name):
    """The living process that writes the rank's log; None between two of them."""
    for process in run.marked_processes():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/logs/{name}.log"):
                return process.pid
        except OSError:
            continue
    return None


def test_killed_ranks_come_back_from_the_last_checkpoint_and_cost_no_step(start_run):
    run = start_run("ranks", "trainer.ranks=2", "loop.steps=6", "loop.checkpoint_every=2", "--json")
    for step, name in ((1, "trainer-1"), (3, "trainer-0")):
        run.wait_until(lambda step=step: len(run.rows()) >= step, f"step {step}", limit_s=200)
        run.wait_until(lambda name=name: rank_pid(run, name) is not None, name)
        os.kill(rank_pid(run, name), signal.SIGKILL)
    code, stdout = run.finish()
    assert code == 0, run.stderr()
    assert json.loads(stdout)["steps"] == 6
    assert [row["step"] for row in run.rows()] == [1, 2, 3, 4, 5, 6]
    lost, again = run.events("trainer_lost"), run.events("trainer_restarted")
    assert len(lost) == len(again) == 2
    assert lost[0]["reason"].startswith("trainer: trainer-1 died during ")
    assert lost[1]["reason"].startswith("trainer: trainer-0-again-2 died during ")
    # What the checkpoint did not hold was done again, so no step is missing.
    assert again[0]["step"] + again[0]["steps_done_again"] >= 1
    assert again[1]["step"] + again[1]["steps_done_again"] >= 3
    assert [event["incarnation"] for event in again] == [2, 3]
    assert len(run.events("policy_loaded")) == 1
    run.assert_nothing_left()
