"""What an evaluation would take, before it starts: tasks, images, disk, time, cost. Pure."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rlmix.evals.facts import shown_ids
from rlmix.plan.runplan import PoolPlan
from rlmix.tasks.benchmark import Benchmark, repositories

PULL_GIB, IMAGE_GIB = 3.0, 7.5
"""Assumed size of one task image, compressed (the median of a public set) and unpacked, where
nobody has measured it; images of one repository share layers, so this is an upper forecast."""
PULL_MIB_PER_S = 50.0
"""Assumed speed of pulling; registries limit anonymous pulls, so a login or mirror is needed for
hundreds of images."""
DIFF_MIB = 0.1


def forecast(
    benchmark: Benchmark,
    facts: Mapping[str, Any],
    *,
    n: int,
    jobs: int,
    pool: PoolPlan | None = None,
    replicas: int = 0,
) -> dict[str, Any]:
    """The plan's document.

    Args:
        pool: that serves the policy; None: nothing is served.
    """
    tasks = benchmark.tasks
    agent_s = sum(task.agent_s for task in tasks) * n
    verify_s = sum(task.verify_s for task in tasks) * n
    hours = (agent_s + verify_s) / jobs / 3600
    images = Counter(task.image for task in tasks if task.image)
    usd_per_hour = pool.usd_per_replica_hour * replicas if pool is not None else 0.0
    return {
        **facts,
        "attempts": len(tasks) * n,
        "at_most_h": round(hours, 2),
        "task_ids": shown_ids(benchmark),
        "repositories": repositories(tasks),
        "without_repository": sum(not task.has_repository for task in tasks),
        "images": [{"image": name, "tasks": count} for name, count in sorted(images.items())],
        "pull": [f"docker pull {name}" for name in sorted(images)],
        "pull_h": round(PULL_GIB * len(images) * 1024 / PULL_MIB_PER_S / 3600, 2),
        "disk_gib": round(IMAGE_GIB * len(images) + len(tasks) * n * DIFF_MIB / 1024, 2),
        "disk_is": f"assumed: {IMAGE_GIB} GiB per unpacked image" if images else "diffs only",
        "usd_per_hour": usd_per_hour,
        "cost_usd": round(usd_per_hour * hours, 2),
        "cost_is": _cost_kind(pool),
    }


def _cost_kind(pool: PoolPlan | None) -> str:
    if pool is None:
        return "nothing is served"
    kind = "modelled: the accelerator is emulated" if pool.is_emulated else "list price"
    return f"at most, all limits used; {kind}"
