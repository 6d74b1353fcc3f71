"""Runs the closing evaluation of a training run: BF16 weights and KV, both policies, same tasks.

The pools of the run are stopped first: what is compared is the policy, not a pool, and the cores
belong to the evaluation. Versions are kept in a folder of their own, so that pruning the run's
weights cannot take the warm start away.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmix.config.schema.train import TrainConfig
from rlmix.core.trajectory import Trajectory
from rlmix.evals.closing import EvalArm, check_complete, evaluate_arm, paired_rewards
from rlmix.evals.statistics import paired_difference
from rlmix.loop.runtime import Runtime
from rlmix.loop.specs import eval_session
from rlmix.observe.run_dir import RunDir
from rlmix.pools.spec import FleetSpec
from rlmix.tasks.source import open_source
from rlmix.weights.store import finish_folder, version_dir

EVAL_VIEW = "bf16"
CATCH_UP_S = 60.0


def keep_version(store: Path, kept: Path, version: int) -> None:
    """Copy one BF16 version out of the run's store; hard links where the file system has them."""
    source = version_dir(store, EVAL_VIEW, version)
    target = version_dir(kept, EVAL_VIEW, version)
    if target.is_dir():
        return
    unfinished = target.with_name(f".new-{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(source, unfinished, copy_function=_link)
    finish_folder(unfinished, target)


def _link(source: str, target: str) -> None:
    """Versions never change, so a second name is as good as a copy and reads nothing."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


async def closing_evaluation(
    config: TrainConfig,
    *,
    run: RunDir,
    runtime: Runtime,
    fleet_spec: FleetSpec,
    trained_version: int,
    on_progress: Callable[[str, int], None],
) -> dict[str, Any]:
    """Evaluate version 0 and `trained_version`; returns the `eval` part of the summary."""
    task_ids = open_source(
        config.tasks.source,
        split="eval",
        seed=config.tasks.seed,
        limit=config.loop.eval_tasks,
        path=config.tasks.path,
    ).task_ids()
    fleet = runtime.start_fleet(fleet_spec, held_version=lambda: trained_version)
    arms: list[EvalArm] = []
    try:
        for name, version in (("warm_start", 0), ("trained", trained_version)):
            if not arms:
                await fleet.start(version)
            else:
                await fleet.roll_out(version)
                await fleet.wait_for_version(version, timeout_s=CATCH_UP_S)
            arms.append(await _run_arm(name, version, task_ids, config, run, runtime, on_progress))
    finally:
        await fleet.stop()
    return summarize(*arms)


async def _run_arm(
    name: str,
    version: int,
    task_ids: tuple[str, ...],
    config: TrainConfig,
    run: RunDir,
    runtime: Runtime,
    on_progress: Callable[[str, int], None],
) -> EvalArm:
    finished: list[Trajectory] = []

    async def run_task(task_id: str, attempt: int) -> Trajectory:
        trajectory = await runtime.workers.run(
            eval_session(config, task_id, arm=name, attempt=attempt, run_id=run.run_id)
        )
        finished.append(trajectory)
        return trajectory

    arm = await evaluate_arm(
        name,
        task_ids,
        run_task,
        concurrency=config.session.workers * config.session.concurrency,
        on_progress=lambda done: on_progress(name, done),
    )
    run.write_trajectories(version, finished, kind=f"eval_{name}")
    check_complete(arm)
    return arm


def summarize(warm_start: EvalArm, trained: EvalArm) -> dict[str, Any]:
    """The `eval` document: both rates, their paired difference, and the same by task group."""
    document = _compare(warm_start, trained)
    groups: dict[str, dict[str, Any]] = {}
    for key in ("held_out_kind", "difficulty"):
        for value in sorted({tags[key] for tags in warm_start.tags if key in tags}):
            chosen = [i for i, tags in enumerate(warm_start.tags) if tags.get(key) == value]
            groups[f"{key}={value}"] = _compare(_part(warm_start, chosen), _part(trained, chosen))
    return document | {"groups": groups}


def _part(arm: EvalArm, chosen: list[int]) -> EvalArm:
    return EvalArm(
        name=arm.name,
        task_ids=tuple(arm.task_ids[i] for i in chosen),
        rewards=tuple(arm.rewards[i] for i in chosen),
        tags=tuple(arm.tags[i] for i in chosen),
    )


def _compare(warm_start: EvalArm, trained: EvalArm) -> dict[str, Any]:
    before, after = paired_rewards(warm_start, trained)
    document: dict[str, Any] = {
        "tasks": len(before),
        "void": len(warm_start.task_ids) - len(before),
        "warm_start": sum(before) / len(before) if before else None,
        "trained": sum(after) / len(after) if after else None,
        "difference": None,
        "ci95": None,
    }
    if len(before) > 1:
        result = paired_difference(before, after)
        document |= {"difference": result.difference, "ci95": [result.low, result.high]}
    return document
