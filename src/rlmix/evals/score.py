"""What the attempts of an evaluation amount to: pass@1, pass@k, by repository and language.

Invariant: void attempts are counted both ways. Left out: a task with fewer valid attempts than k
drops out of pass@k and is counted. As failures: nothing drops out. Both denominators are given.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmix.core.trajectory import Outcome
from rlmix.evals.ledger import Attempt
from rlmix.evals.pass_at_k import Estimate, pass_at_k, task_interval
from rlmix.tasks.benchmark import BenchTask


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScore:
    """Attempts of one task."""

    task_id: str
    repository: str
    language: str
    num_valid: int
    num_passed: int
    num_void: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """An evaluation's result."""

    k: int
    n: int
    pass_at_1: Estimate
    pass_at_k: Estimate
    pass_at_1_void_failed: Estimate
    pass_at_k_void_failed: Estimate
    tasks: tuple[TaskScore, ...]
    num_attempts: int
    num_void: int
    num_dropped: int
    """Tasks with fewer than k valid attempts: in no `pass_at_k`."""
    num_timed_out: int
    num_empty: int
    num_patch_failed: int
    stop_reasons: Mapping[str, int]
    """Why attempts ended, most frequent first; void ones by themselves."""
    by_repository: Mapping[str, Mapping[str, float]]
    by_language: Mapping[str, Mapping[str, float]]


def score(
    tasks: Sequence[BenchTask], attempts: Iterable[Attempt], *, k: int, n: int, seed: int = 0
) -> Score:
    """Score an evaluation. A mean over no task at all is NaN."""
    by_task: dict[str, list[Attempt]] = {task.public.task_id: [] for task in tasks}
    for attempt in attempts:
        if attempt.task_id in by_task:
            by_task[attempt.task_id].append(attempt)
    scores = [_task_score(task, by_task[task.public.task_id]) for task in tasks]
    valid = [one for one in scores if one.num_valid]
    enough = [one for one in scores if one.num_valid >= k]
    every = [attempt for some in by_task.values() for attempt in some]

    def failed(at: int) -> Estimate:
        """Void attempts as failures; those that were not made yet are nothing."""
        made = [(one.num_valid + one.num_void, one.num_passed) for one in scores]
        rates = [pass_at_k(count, passed, at) for count, passed in made if count >= at]
        return _mean(rates, seed)

    return Score(
        k=k,
        n=n,
        pass_at_1=_mean([one.num_passed / one.num_valid for one in valid], seed),
        pass_at_k=_mean([pass_at_k(one.num_valid, one.num_passed, k) for one in enough], seed),
        pass_at_1_void_failed=failed(1),
        pass_at_k_void_failed=failed(k),
        tasks=tuple(scores),
        num_attempts=len(every),
        num_void=sum(attempt.outcome == Outcome.VOID for attempt in every),
        num_dropped=len(scores) - len(enough),
        num_timed_out=sum(attempt.timed_out for attempt in every),
        num_empty=sum(
            attempt.diff_bytes == 0 and attempt.outcome != Outcome.VOID for attempt in every
        ),
        num_patch_failed=sum(attempt.detail.startswith("patch_failed") for attempt in every),
        stop_reasons=dict(Counter(_ending(attempt) for attempt in every).most_common()),
        by_repository=_table(scores, "repository"),
        by_language=_table(scores, "language"),
    )


def _ending(attempt: Attempt) -> str:
    if attempt.outcome == Outcome.VOID:
        return "void"
    return attempt.stop_reason or "diff given"


def _task_score(task: BenchTask, attempts: list[Attempt]) -> TaskScore:
    counts = Counter(attempt.outcome for attempt in attempts)
    return TaskScore(
        task_id=task.public.task_id,
        repository=task.repository,
        language=task.language,
        num_valid=counts[Outcome.PASS.value] + counts[Outcome.FAIL.value],
        num_passed=counts[Outcome.PASS.value],
        num_void=counts[Outcome.VOID.value],
    )


def _mean(values: list[float], seed: int) -> Estimate:
    if not values:
        return Estimate(value=float("nan"), low=float("nan"), high=float("nan"), num_tasks=0)
    return task_interval(values, seed=seed)


def _table(scores: Sequence[TaskScore], field: str) -> dict[str, dict[str, float]]:
    groups: dict[str, list[TaskScore]] = {}
    for one in scores:
        groups.setdefault(getattr(one, field) or "unknown", []).append(one)
    return {name: _row(group) for name, group in sorted(groups.items())}


def _row(group: list[TaskScore]) -> dict[str, float]:
    valid = [one for one in group if one.num_valid]
    rates = [one.num_passed / one.num_valid for one in valid]
    made = [one for one in group if one.num_valid or one.num_void]
    return {
        "tasks": len(group),
        "pass_at_1": sum(rates) / len(rates) if rates else float("nan"),
        "any": sum(one.num_passed > 0 for one in made) / len(made) if made else float("nan"),
        "void": sum(one.num_void for one in group),
    }


def document(result: Score) -> dict[str, Any]:
    """The parts of a score that scripts read."""
    return {
        "pass_at_1": result.pass_at_1.value,
        "pass_at_k": result.pass_at_k.value,
        "k": result.k,
        "n": result.n,
        "tasks": len(result.tasks),
        "void": result.num_void,
        "ci95": [result.pass_at_1.low, result.pass_at_1.high],
        "ci95_k": [result.pass_at_k.low, result.pass_at_k.high],
        "void_as_failed": {
            "pass_at_1": result.pass_at_1_void_failed.value,
            "pass_at_k": result.pass_at_k_void_failed.value,
        },
        "dropped": result.num_dropped,
        "attempts": result.num_attempts,
        "timed_out": result.num_timed_out,
        "empty": result.num_empty,
        "patch_failed": result.num_patch_failed,
        "stop_reasons": dict(result.stop_reasons),
        "intervals": {
            "pass_at_1": _interval(result.pass_at_1),
            "pass_at_k": _interval(result.pass_at_k),
        },
        "task_scores": [
            {
                "task_id": one.task_id,
                "repository": one.repository,
                "language": one.language,
                "valid": one.num_valid,
                "passed": one.num_passed,
                "void": one.num_void,
            }
            for one in result.tasks
        ],
        "by_repository": result.by_repository,
        "by_language": result.by_language,
    }


def _interval(estimate: Estimate) -> dict[str, Any]:
    """How an interval was made, and over how many tasks."""
    return {"method": estimate.method, "tasks": estimate.num_tasks}
