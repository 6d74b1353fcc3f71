"""The closing evaluation: warm start against trained policy on the same held-out tasks.

Invariant: both policies see the same tasks in the same order with the same sampling seeds, so the
difference is paired. A void session is tried again; a task that stays void in either arm leaves
the comparison and is counted, it is never a 0.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlmix.core.errors import EngineError
from rlmix.core.trajectory import Outcome, Trajectory

RunTask = Callable[[str, int], Awaitable[Trajectory]]
"""(task id, attempt) -> finished session."""

VOID_RETRIES = 2
"""An infrastructure fault during an evaluation is rerun, not scored."""

VOID_PAUSE_S = 1.0
"""Before the first retry; doubles with each further one."""

MAX_VOID_FRAC = 0.05
"""Tasks that may be missing from a comparison. Those that survive a fault are no random sample,
so with more of them missing there is no result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalArm:
    """One policy's results, in task order."""

    name: str
    task_ids: tuple[str, ...]
    rewards: tuple[float | None, ...]
    """1.0, 0.0, or None when the task stayed void."""
    tags: tuple[dict[str, str], ...]

    @property
    def num_void(self) -> int:
        return sum(reward is None for reward in self.rewards)

    @property
    def mean(self) -> float | None:
        valid = [reward for reward in self.rewards if reward is not None]
        return sum(valid) / len(valid) if valid else None


async def evaluate_arm(
    name: str,
    task_ids: Sequence[str],
    run_task: RunTask,
    *,
    concurrency: int,
    void_pause_s: float = VOID_PAUSE_S,
    on_progress: Callable[[int], None] = lambda done: None,
) -> EvalArm:
    """Run every task once (void ones again, up to `VOID_RETRIES` times)."""
    slots = asyncio.Semaphore(concurrency)
    done = 0

    async def one(task_id: str) -> Trajectory:
        nonlocal done
        for attempt in range(VOID_RETRIES + 1):
            async with slots:
                trajectory = await run_task(task_id, attempt)
            if trajectory.outcome is not Outcome.VOID:
                break
            await asyncio.sleep(void_pause_s * 2**attempt)
        done += 1
        on_progress(done)
        return trajectory

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(task_id)) for task_id in task_ids]
    finished = [task.result() for task in tasks]
    return EvalArm(
        name=name,
        task_ids=tuple(task_ids),
        rewards=tuple(None if t.outcome is Outcome.VOID else t.reward for t in finished),
        tags=tuple(t.tags for t in finished),
    )


def check_complete(arm: EvalArm) -> None:
    """Refuse an arm that lost too many tasks to faults.

    Raises:
        EngineError: more than `MAX_VOID_FRAC` of the tasks stayed void.
    """
    if arm.num_void > MAX_VOID_FRAC * len(arm.task_ids):
        raise EngineError(
            f"evals: {arm.num_void} of {len(arm.task_ids)} tasks of {arm.name} stayed void after "
            f"{VOID_RETRIES} retries; at most {MAX_VOID_FRAC:.0%} may. What broke is in "
            "events.jsonl and logs/; evaluate again with --resume"
        )


def paired_rewards(first: EvalArm, second: EvalArm) -> tuple[list[float], list[float]]:
    """Rewards of the tasks that are valid in both arms, in task order.

    Raises:
        ValueError: the arms did not run the same tasks in the same order.
    """
    if first.task_ids != second.task_ids:
        raise ValueError(f"{first.name} and {second.name} did not evaluate the same tasks")
    pairs = [
        (a, b)
        for a, b in zip(first.rewards, second.rewards, strict=True)
        if a is not None and b is not None
    ]
    return [a for a, _ in pairs], [b for _, b in pairs]
