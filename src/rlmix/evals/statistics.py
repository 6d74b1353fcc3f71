"""How sure an evaluation is: intervals for a pass rate and for the difference of two.

All results are closed formulas of counts, so the same verdicts always give the same interval.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True, kw_only=True, slots=True)
class RateInterval:
    """A pass rate with its interval."""

    rate: float
    low: float
    high: float
    num_tasks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedDifference:
    """Second policy minus first, on the same tasks."""

    difference: float
    """Observed: (gained - lost) / num_tasks."""
    low: float
    high: float
    num_tasks: int
    num_gained: int
    """Tasks that only the second policy solved."""
    num_lost: int
    """Tasks that only the first policy solved."""
    confidence: float

    @property
    def is_above_zero(self) -> bool:
        return self.low > 0.0


def paired_difference(
    first: Sequence[float], second: Sequence[float], *, confidence: float = 0.95
) -> PairedDifference:
    """Difference of two pass rates measured on the same tasks, with an interval.

    Only tasks on which the two disagree carry information about the difference; pairing removes
    the spread between easy and hard tasks, which an unpaired interval would count as noise.
    The interval is Wald's with one pseudo-count added to each kind of disagreement: it keeps its
    coverage for few tasks and has a width even when the policies never disagree, where the plain
    one collapses to a point and where resampling tasks (the bootstrap) does too.

    Args:
        first: rewards, each 0 or 1, one per task.
        second: the same tasks in the same order.
        confidence: two-sided, in (0, 1).
    Raises:
        ValueError: lengths differ, no task, or a reward that is neither 0 nor 1.
    Source: D. G. Bonett and R. M. Price, "Adjusted Wald confidence interval for a difference of
        binomial proportions based on paired data", J. Educ. Behav. Stat. 37(4), 2012; recommended
        by Fagerland, Lydersen and Laake, Statistics in Medicine 33(16), 2014.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} rewards against {len(second)}; pair the same tasks")
    num_tasks = len(first)
    _check_rewards(first)
    _check_rewards(second)
    gained = sum(b > a for a, b in zip(first, second, strict=True))
    lost = sum(b < a for a, b in zip(first, second, strict=True))
    low, high = adjusted_wald(
        [b - a for a, b in zip(first, second, strict=True)], confidence=confidence
    )
    return PairedDifference(
        difference=(gained - lost) / num_tasks,
        low=low,
        high=high,
        num_tasks=num_tasks,
        num_gained=gained,
        num_lost=lost,
        confidence=confidence,
    )


def pass_rate(rewards: Sequence[float], *, confidence: float = 0.95) -> RateInterval:
    """Share of solved tasks with Wilson's score interval.

    Args:
        rewards: each 0 or 1, one per task; void tasks are left out by the caller.
    Raises:
        ValueError: no task, or a reward that is neither 0 nor 1.
    Source: E. B. Wilson, J. Am. Stat. Assoc. 22, 1927; Brown, Cai and DasGupta, Statistical
        Science 16(2), 2001.
    """
    _check_rewards(rewards)
    num_tasks = len(rewards)
    rate = sum(rewards) / num_tasks
    low, high = wilson(rate, num_tasks, confidence=confidence)
    return RateInterval(
        rate=rate,
        low=low,
        high=high,
        num_tasks=num_tasks,
    )


def wilson(rate: float, num_tasks: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share of `num_tasks` trials; has a width at 0 and at 1.

    Raises:
        ValueError: no task.
    """
    if num_tasks < 1:
        raise ValueError("no task: every one was void, or none was run")
    z = _z(confidence)
    shrink = 1 + z**2 / num_tasks
    centre = (rate + z**2 / (2 * num_tasks)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / num_tasks + z**2 / (4 * num_tasks**2))
    # At 0 and 1 one end is exact; rounding may miss it by 1e-17.
    low = 0.0 if rate == 0 else max(0.0, centre - half)
    return low, 1.0 if rate == 1 else min(1.0, centre + half)


def adjusted_wald(differences: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Interval of a mean of paired differences in [-1, 1], with one pair of +1 and one of -1 added.

    For differences of -1, 0 and 1 this is the interval of Bonett and Price (see
    `paired_difference`); it has a width even when all differences are equal.
    """
    num_pairs = len(differences) + 2
    centre = sum(differences) / num_pairs
    square = (sum(difference**2 for difference in differences) + 2) / num_pairs
    half = _z(confidence) * math.sqrt((square - centre**2) / num_pairs)
    return max(-1.0, centre - half), min(1.0, centre + half)


def _check_rewards(rewards: Sequence[float]) -> None:
    if not rewards:
        raise ValueError("no task: every one was void, or none was run")
    if bad := sorted({reward for reward in rewards if reward not in (0, 1)}):
        raise ValueError(f"rewards must be 0 or 1, got {bad[:3]}")


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence}: must lie between 0 and 1, e.g. 0.95")
    return NormalDist().inv_cdf(0.5 + confidence / 2)
