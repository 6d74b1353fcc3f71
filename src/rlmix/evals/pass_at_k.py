"""pass@k from n attempts a task, its interval over tasks, and the comparison of two checkpoints.

Invariant: tasks are what is resampled, never attempts: attempts of one task are not independent.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over tasks with its interval."""

    value: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Second checkpoint minus first, on the same tasks."""

    difference: float
    low: float
    high: float
    num_tasks: int
    num_gained: int
    """Tasks that only the second one solves (any of its attempts)."""
    num_lost: int
    p_value: float
    """Exact McNemar test of gained against lost, two-sided."""


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
    low, high = np.quantile(means, [0.5 - confidence / 2, 0.5 + confidence / 2])
    gained = sum(b > 0 and a == 0 for a, b in zip(first, second, strict=True))
    lost = sum(a > 0 and b == 0 for a, b in zip(first, second, strict=True))
    return Comparison(
        difference=float(differences.mean()),
        low=float(low),
        high=float(high),
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
