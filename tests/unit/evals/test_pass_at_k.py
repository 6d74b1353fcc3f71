"""pass@k, its interval and the comparison of two checkpoints against worked numbers."""

import itertools
import math

import pytest

from rlmix.evals.pass_at_k import compare, mcnemar, pass_at_k, task_bootstrap


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
    assert (same.difference, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="pair the same tasks"):
        compare(first, first[:-1])
