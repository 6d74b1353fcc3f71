"""pass@k, its interval and the comparison of two checkpoints against worked numbers."""

import itertools
import math

import pytest

from rlmix.evals.pass_at_k import compare, mcnemar, pass_at_k, task_bootstrap, task_interval
from rlmix.evals.statistics import paired_difference, wilson


def test_pass_at_4_of_8_attempts() -> None:
    values = [round(pass_at_k(8, passed, 4), 3) for passed in range(6)]
    assert values == [0.0, 0.5, 0.786, 0.929, 0.986, 1.0]


def test_pass_at_4_of_4_attempts_is_any_of_four() -> None:
    assert [pass_at_k(4, passed, 4) for passed in range(5)] == [0.0, 1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(("n", "c", "k"), [(6, 2, 3), (5, 0, 2), (7, 7, 1), (9, 4, 9), (6, 1, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_passed_attempt(n: int, c: int, k: int) -> None:
    draws = list(itertools.combinations(range(n), k))
    share = sum(any(attempt < c for attempt in draw) for draw in draws) / len(draws)
    assert math.isclose(pass_at_k(n, c, k), share, abs_tol=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 1, 4), (4, 5, 1), (4, -1, 1), (4, 1, 0)])
def test_counts_that_cannot_be_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k <= attempts"):
        pass_at_k(n, c, k)


def test_the_bootstrap_of_51_tasks_is_near_the_binomial_interval() -> None:
    """At 18 of 51 the normal approximation gives 0.353 +- 1.96 * 0.0669."""
    estimate = task_bootstrap([1.0] * 18 + [0.0] * 33, seed=1)
    half = 1.96 * math.sqrt(18 / 51 * 33 / 51 / 51)
    assert estimate.value == 18 / 51
    assert math.isclose(estimate.low, 18 / 51 - half, abs_tol=0.015)
    assert math.isclose(estimate.high, 18 / 51 + half, abs_tol=0.015)


def test_the_bootstrap_repeats_for_a_seed_and_needs_a_task() -> None:
    values = [0.0, 0.5, 1.0, 0.25]
    assert task_bootstrap(values, seed=3) == task_bootstrap(values, seed=3)
    with pytest.raises(ValueError, match="no task"):
        task_bootstrap([])


def test_mcnemar_of_worked_splits() -> None:
    """8 against 2: 2 * (1 + 10 + 45) / 1024."""
    assert math.isclose(mcnemar(8, 2), 112 / 1024)
    assert math.isclose(mcnemar(2, 8), 112 / 1024)
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(3, 3) == 1.0
    assert math.isclose(mcnemar(5, 0), 2 / 32)


def test_a_comparison_counts_what_only_one_solves() -> None:
    first = [0.0, 0.0, 1.0, 1.0, 0.5, 0.0]
    second = [1.0, 0.5, 0.0, 1.0, 1.0, 0.0]
    found = compare(first, second)
    assert math.isclose(found.difference, 1.0 / 6)
    assert (found.num_gained, found.num_lost) == (2, 1)
    assert found.low <= found.difference <= found.high
    same = compare(first, first)
    assert (same.difference, same.bootstrap_low, same.bootstrap_high, same.p_value) == (0, 0, 0, 1)
    with pytest.raises(ValueError, match="pair the same tasks"):
        compare(first, first[:-1])


def test_intervals_of_51_and_642_tasks_are_those_of_the_tables() -> None:
    """Wilson's, to three digits, as the evaluation notes have them."""
    worked = {
        (0.20, 51): (0.113, 0.329), (0.35, 51): (0.234, 0.487), (0.50, 51): (0.368, 0.632),
        (0.20, 642): (0.171, 0.233), (0.35, 642): (0.314, 0.388), (0.50, 642): (0.461, 0.539),
    }  # fmt: skip
    for (rate, num_tasks), expected in worked.items():
        assert tuple(round(end, 3) for end in wilson(rate, num_tasks)) == expected
    found = task_interval([1.0] * 18 + [0.0] * 33)
    assert (found.low, found.high, found.method) == (*wilson(18 / 51, 51), "wilson")


def test_an_interval_has_a_width_where_every_task_passed_or_none_did() -> None:
    """12 of 12: the lower end is 1 / (1 + 1.96^2 / 12) = 0.7575; 0 of 12 mirrors it."""
    every, none = task_interval([1.0] * 12), task_interval([0.0] * 12)
    assert (every.value, round(every.low, 4), every.high) == (1.0, 0.7575, 1.0)
    assert (none.value, none.low, round(none.high, 4)) == (0.0, 0.0, 0.2425)
    equal = task_interval([0.5] * 4)
    assert (equal.value, equal.method) == (0.5, "wilson")
    assert equal.low < 0.5 < equal.high
    assert task_interval([0.0, 0.5, 1.0]).method == "bootstrap"
    with pytest.raises(ValueError, match="no task"):
        task_interval([])


def test_two_checkpoints_that_never_differ_leave_room_for_a_difference() -> None:
    """10 equal pairs: half width 1.96 * sqrt(2 / 12 / 12)."""
    found = compare([1.0] * 10, [1.0] * 10)
    half = 1.959964 * math.sqrt(2 / 144)
    assert math.isclose(found.high, half, rel_tol=1e-6)
    assert math.isclose(found.low, -half, rel_tol=1e-6)
    assert (found.bootstrap_low, found.bootstrap_high) == (0.0, 0.0)


def test_a_comparison_of_single_attempts_is_the_paired_interval_of_rewards() -> None:
    first = [1.0] * 5 + [0.0] * 25
    second = [1.0] * 4 + [0.0] + [1.0] * 12 + [0.0] * 13
    found, paired = compare(first, second), paired_difference(first, second)
    assert math.isclose(found.low, paired.low)
    assert math.isclose(found.high, paired.high)
    assert (found.num_gained, found.num_lost, found.is_above_zero) == (12, 1, True)
