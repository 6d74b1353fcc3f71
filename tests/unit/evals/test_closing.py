"""The closing evaluation: pairing, retries of voids, and when there is no result."""

import asyncio

import pytest

from rlmix.core.errors import EngineError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory
from rlmix.evals.closing import EvalArm, check_complete, evaluate_arm, paired_rewards


def session(task_id: str, outcome: Outcome) -> Trajectory:
    return Trajectory(
        session_id=task_id,
        group_id="eval",
        task_id=task_id,
        prompt_ids=(1,),
        turns=(),
        stop_reason=StopReason.SUBMITTED,
        outcome=outcome,
        reward=1.0 if outcome is Outcome.PASS else 0.0,
    )


def arm(*rewards: float | None) -> EvalArm:
    names = tuple(f"t{i}" for i in range(len(rewards)))
    return EvalArm(name="a", task_ids=names, rewards=rewards, tags=tuple({} for _ in rewards))


def test_a_void_task_is_run_again_and_then_counts():
    attempts = []

    async def run_task(task_id: str, attempt: int) -> Trajectory:
        attempts.append((task_id, attempt))
        is_void = task_id == "t1" and attempt < 2
        return session(task_id, Outcome.VOID if is_void else Outcome.PASS)

    found = asyncio.run(evaluate_arm("a", ["t0", "t1"], run_task, concurrency=2, void_pause_s=0))
    assert found.rewards == (1.0, 1.0)
    assert attempts.count(("t1", 2)) == 1
    assert ("t0", 1) not in attempts


def test_a_task_that_stays_void_is_no_zero_and_leaves_the_comparison():
    async def run_task(task_id: str, attempt: int) -> Trajectory:
        return session(task_id, Outcome.VOID if task_id == "t1" else Outcome.FAIL)

    found = asyncio.run(
        evaluate_arm("a", ["t0", "t1", "t2"], run_task, concurrency=1, void_pause_s=0)
    )
    assert found.rewards == (0.0, None, 0.0)
    assert (found.num_void, found.mean) == (1, 0.0)
    assert paired_rewards(found, arm(1.0, 1.0, 1.0)) == ([0.0, 0.0], [1.0, 1.0])


def test_one_void_in_twenty_is_borne_and_two_are_not():
    check_complete(arm(*[1.0] * 19, None))
    with pytest.raises(EngineError, match=r"2 of 20 tasks of a stayed void"):
        check_complete(arm(*[1.0] * 18, None, None))


def test_arms_over_different_tasks_are_refused():
    with pytest.raises(ValueError, match="same tasks"):
        paired_rewards(arm(1.0), arm(1.0, 0.0))
