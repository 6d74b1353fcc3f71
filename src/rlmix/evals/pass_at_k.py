"""pass@k from n attempts a task, its interval over tasks, and the comparison of two checkpoints.

Invariant: tasks are what is resampled, never attempts: attempts of one task are not independent.
No interval is a point: where resampling shows no spread (every task passed, every task failed, two
checkpoints never differ) a closed formula with a width takes its place, and `method` says so.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlmix.evals.statistics import adjusted_wald, wilson

RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over tasks with its interval."""

    value: float
    low: float
    high: float
    num_tasks: int
    method: str = "bootstrap"
    """`bootstrap`: percentiles over resampled tasks. `wilson`: Wilson's score with tasks as trials,
    where every task's value is 0 or 1, or all are equal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Second checkpoint minus first, on the same tasks."""

    difference: float
    low: float
    high: float
    """Adjusted Wald: one task more that only the second solves, and one that only the first does,
    so that the interval has a width where the two never differ."""
    bootstrap_low: float
    bootstrap_high: float
    """Percentiles over resampled pairs of tasks; a point where all differences are equal."""
    num_tasks: int
    num_gained: int
    """Tasks that only the second one solves (any of its attempts)."""
    num_lost: int
    p_value: float
    """Exact McNemar test of gained against lost, two-sided."""

    @property
    def is_above_zero(self) -> bool:
        return self.low > 0.0


def pass_at_k(num_attempts: int, num_passed: int, k: int) -> float:
    """Probability that k attempts drawn without replacement hold a passed one.

    1 - C(n-c, k) / C(n, k), unbiased for n >= k. The plug-in 1 - (1 - c/n)^k is biased low.

    Raises:
        ValueError: fewer attempts than k, or counts that cannot be.
    Source: M. Chen et al., "Evaluating Large Language Models Trained on Code", 2021.
    """
    if not 0 <= num_passed <= num_attempts or not 1 <= k <= num_attempts:
        raise ValueError(
            f"pass@{k} of {num_passed} passed in {num_attempts} attempts; needs 1 <= k <= attempts "
            "and 0 <= passed <= attempts"
        )
    left = num_attempts - num_passed
    if left < k:
        return 1.0
    product = 1.0
    for taken in range(k):
        product *= (left - taken) / (num_attempts - taken)
    return 1.0 - product


def task_bootstrap(
    values: Sequence[float], *, seed: int = 0, confidence: float = 0.95, resamples: int = RESAMPLES
) -> Estimate:
    """Mean over tasks with the percentile interval of resampled tasks.

    Args:
        values: one per task, e.g. its pass@k.

    Raises:
        ValueError: no task.
    """
    if not values:
        raise ValueError("no task: every one was void, or none was run")
    sample = np.asarray(values, dtype=np.float64)
    means = _resampled(sample, seed=seed, resamples=resamples)
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Estimate(
        value=float(sample.mean()), low=float(low), high=float(high), num_tasks=len(sample)
    )


def task_interval(
    values: Sequence[float], *, seed: int = 0, confidence: float = 0.95, resamples: int = RESAMPLES
) -> Estimate:
    """Mean over tasks with the interval that suits the values.

    Wilson's score interval where every value is 0 or 1 (pass@k with n = k, or tasks that pass
    always or never) and where all values are equal; else `task_bootstrap`. Wilson's is conservative
    for other values between 0 and 1, whose variance is below that of coins with the same mean.

    Args:
        values: one per task, 0 to 1.

    Raises:
        ValueError: no task.
    """
    if not values or (len(set(values)) > 1 and any(value not in (0, 1) for value in values)):
        return task_bootstrap(values, seed=seed, confidence=confidence, resamples=resamples)
    mean = sum(values) / len(values)
    low, high = wilson(mean, len(values), confidence=confidence)
    return Estimate(value=mean, low=low, high=high, num_tasks=len(values), method="wilson")


def _resampled(sample: np.ndarray, *, seed: int, resamples: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    # In blocks, so that 10,000 resamples of 642 tasks need no 50 MB at once.
    for start in range(0, resamples, 500):
        count = min(500, resamples - start)
        picks = generator.integers(0, len(sample), size=(count, len(sample)))
        means[start : start + count] = sample[picks].mean(axis=1)
    return means


def compare(
    first: Sequence[float],
    second: Sequence[float],
    *,
    seed: int = 0,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Two checkpoints on the same tasks, in the same order.

    Args:
        first, second: one value per task (its pass@k or share of passed attempts), 0 to 1.

    Raises:
        ValueError: lengths differ, or no task.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"{len(first)} tasks against {len(second)}; pair the same tasks")
    differences = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    means = _resampled(differences, seed=seed, resamples=resamples)
    resampled = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    low, high = adjusted_wald(differences.tolist(), confidence=confidence)
    gained = sum(b > 0 and a == 0 for a, b in zip(first, second, strict=True))
    lost = sum(a > 0 and b == 0 for a, b in zip(first, second, strict=True))
    return Comparison(
        difference=float(differences.mean()),
        low=low,
        high=high,
        bootstrap_low=float(resampled[0]),
        bootstrap_high=float(resampled[1]),
        num_tasks=len(first),
        num_gained=gained,
        num_lost=lost,
        p_value=mcnemar(gained, lost),
    )


def mcnemar(num_gained: int, num_lost: int) -> float:
    """Two-sided exact p-value: the chance of a split at least this uneven of fair coins.

    Source: Q. McNemar, Psychometrika 12, 1947; the exact form is the sign test.
    """
    total = num_gained + num_lost
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, i) for i in range(min(num_gained, num_lost) + 1)) / 2**total
    return min(1.0, 2 * tail)
