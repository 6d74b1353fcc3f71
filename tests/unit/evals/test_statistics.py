"""Intervals, against numbers worked by hand and against exact coverage."""

import math
import random

import pytest

from rlmix.evals.statistics import paired_difference, pass_rate


def pairs(both: int, gained: int, lost: int, neither: int) -> tuple[list[int], list[int]]:
    first = [1] * both + [0] * gained + [1] * lost + [0] * neither
    second = [1] * both + [1] * gained + [0] * lost + [0] * neither
    return first, second


def test_paired_difference_of_400_tasks_matches_the_hand_calculation() -> None:
    # 80 gained, 20 lost of 400: difference 60/400 = 0.15.
    # Shares with pseudo-counts 81/402 = 0.201493 and 21/402 = 0.052239, centre 0.149254,
    # variance (0.253731 - 0.022277) / 402 = 5.75757e-4, half 1.959964 x 0.0239949 = 0.047029.
    result = paired_difference(*pairs(100, 80, 20, 200))
    assert result.difference == 0.15
    assert (result.num_gained, result.num_lost, result.num_tasks) == (80, 20, 400)
    assert result.low == pytest.approx(0.102225, abs=1e-5)
    assert result.high == pytest.approx(0.196282, abs=1e-5)
    assert result.is_above_zero


def test_agreement_does_not_change_the_interval_only_disagreement_does() -> None:
    one = paired_difference(*pairs(300, 10, 10, 80))
    other = paired_difference(*pairs(0, 10, 10, 380))
    assert (one.low, one.high) == (other.low, other.high)


def test_swapping_the_policies_mirrors_the_interval() -> None:
    first, second = pairs(10, 25, 5, 60)
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert there.difference == -back.difference
    assert (there.low, there.high) == pytest.approx((-back.high, -back.low))


def test_policies_that_always_agree_still_have_an_uncertain_difference() -> None:
    # Centre 0, shares 1/12 each: half = 1.959964 x sqrt((2/12) / 12) = 0.230984.
    result = paired_difference([1, 0] * 5, [1, 0] * 5)
    assert result.difference == 0.0
    assert (result.low, result.high) == pytest.approx((-0.230984, 0.230984), abs=1e-5)
    assert not result.is_above_zero


def test_interval_agrees_with_the_paired_bootstrap_on_400_tasks() -> None:
    first, second = pairs(120, 75, 30, 175)
    result = paired_difference(first, second)
    differences = [b - a for a, b in zip(first, second, strict=True)]
    chooser = random.Random(7)
    means = sorted(sum(chooser.choices(differences, k=400)) / 400 for _ in range(4000))
    assert result.low == pytest.approx(means[100], abs=0.008)
    assert result.high == pytest.approx(means[3899], abs=0.008)


@pytest.mark.parametrize(("num_tasks", "p_gain", "p_loss"), [(20, 0.2, 0.05), (60, 0.3, 0.1)])
def test_exact_coverage_is_close_to_the_promised_95_percent(
    num_tasks: int, p_gain: float, p_loss: float
) -> None:
    truth, covered = p_gain - p_loss, 0.0
    for gained in range(num_tasks + 1):
        for lost in range(num_tasks + 1 - gained):
            same = num_tasks - gained - lost
            weight = (
                math.comb(num_tasks, gained)
                * math.comb(num_tasks - gained, lost)
                * p_gain**gained
                * p_loss**lost
                * (1 - p_gain - p_loss) ** same
            )
            if weight > 1e-12:
                result = paired_difference(*pairs(0, gained, lost, same))
                covered += weight * (result.low <= truth <= result.high)
    assert 0.94 < covered < 0.99


def test_wilson_interval_matches_the_hand_calculation() -> None:
    # 8 of 10: z^2 = 3.841459, centre (0.8 + 0.192073) / 1.384146 = 0.716740,
    # half = 1.959964 / 1.384146 x sqrt(0.016 + 0.009604) = 0.226577.
    result = pass_rate([1] * 8 + [0] * 2)
    assert result.rate == 0.8
    assert (result.low, result.high) == pytest.approx((0.490162, 0.943317), abs=1e-5)


def test_all_solved_is_not_certainty() -> None:
    result = pass_rate([1] * 20)
    assert (result.rate, result.high) == (1.0, 1.0)
    assert result.low == pytest.approx(20 / (20 + 1.959964**2), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ([1, 0], [1], "2 rewards against 1"),
        ([], [], "no task"),
        ([0.5], [1], "must be 0 or 1"),
    ],
)
def test_what_is_no_pair_of_verdicts_is_refused(
    first: list[float], second: list[float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        paired_difference(first, second)
