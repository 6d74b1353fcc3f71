"""The numbers that a comparison always prints, by hand."""

import math

import numpy as np
import pytest

from rlmix.diff.signatures import signatures
from rlmix.diff.statistics import coarsest_dtype, gap


def test_a_gap_of_three_tokens_by_hand() -> None:
    trainer = np.log(np.array([0.5, 0.25, 0.1], dtype=np.float32))
    sampler = np.log(np.array([0.4, 0.25, 0.2], dtype=np.float32))
    found = gap(trainer, sampler, np.array([7, 8, 9]))
    d = [math.log(0.5 / 0.4), 0.0, math.log(0.1 / 0.2)]
    assert (found.tokens, found.mismatch_count, found.first_mismatch) == (3, 2, 7)
    assert found.mean_abs == pytest.approx((d[0] - d[2]) / 3, abs=1e-6)
    assert found.max_abs == pytest.approx(math.log(2), abs=1e-6)
    assert found.p50_abs == pytest.approx(d[0], abs=1e-6)
    assert found.signed_mean == pytest.approx(sum(d) / 3, abs=1e-6)
    # k3 = mean(r - 1 - log r) with r = 1.25, 1, 0.5; reverse with 0.8, 1, 2.
    assert found.k3_kl == pytest.approx((0.25 - d[0] + -0.5 - d[2]) / 3, abs=1e-6)
    assert found.k3_reverse == pytest.approx((-0.2 + d[0] + 1.0 + d[2]) / 3, abs=1e-6)
    assert found.prob_diff_mean == pytest.approx(0.2 / 3, abs=1e-6)
    assert found.prob_diff_max == pytest.approx(0.1, abs=1e-6)


def test_equal_lists_have_no_first_mismatch_and_no_divergence() -> None:
    same = np.array([-0.3, -1.7], dtype=np.float32)
    found = gap(same, same.copy())
    assert (found.mismatch_count, found.first_mismatch, found.k3_kl, found.max_abs) == (
        0,
        None,
        0,
        0,
    )


def test_k3_of_one_far_token_depends_on_the_direction() -> None:
    found = gap(np.array([-15.0], dtype=np.float32), np.array([-5.0], dtype=np.float32))
    assert found.k3_kl == pytest.approx(math.exp(-10) - 1 + 10)
    assert found.k3_reverse == pytest.approx(math.exp(10) - 1 - 10)


@pytest.mark.parametrize(
    ("first", "second"),
    [([0.0], [float("nan")]), ([float("-inf")], [0.0]), ([0.0, 0.0], [0.0]), ([], [])],
)
def test_what_is_no_list_of_logprobs_is_refused(first: list[float], second: list[float]) -> None:
    with pytest.raises(ValueError, match="diff:"):
        gap(np.array(first, dtype=np.float32), np.array(second, dtype=np.float32))


def test_the_dtype_is_the_shortest_that_holds_all_numbers() -> None:
    assert coarsest_dtype(np.array([-0.5, -1.25], dtype=np.float32)) == "bfloat16"
    assert coarsest_dtype(np.array([-0.5, -1.0009765625], dtype=np.float32)) == "float16"
    assert coarsest_dtype(np.array([-0.1], dtype=np.float32)) == "float32"


def hints(d: np.ndarray, logprobs: np.ndarray | None = None) -> str:
    draws = np.random.default_rng(0)
    own = -draws.exponential(2.0, len(d)) if logprobs is None else logprobs
    return "; ".join(signatures(d, own, np.arange(len(d)), tile=16))


def test_signatures_tell_patterns_apart() -> None:
    noise = np.random.default_rng(1).normal(0, 0.01, 200)
    at_tile = np.where(np.arange(200) < 64, 0.0, noise)
    assert "64, a multiple of 16" in hints(at_tile)
    after_sixty = np.where(np.arange(200) < 60, 0.0, noise)
    assert "nothing differs before position 60" in hints(after_sixty)
    assert "constant offset of +0.0513" in hints(np.full(200, 0.0513))
    logprobs = -np.random.default_rng(2).exponential(2.0, 200)
    assert "correlation +1.00" in hints(0.3 * logprobs, logprobs)
    assert "one sign" in hints(np.abs(noise))
    assert hints(np.zeros(200)) == ""
    assert hints(noise) == ""
