"""Two sequences of three tokens, worked by hand: r = 1.25 1 .5 / 1 3 1."""

import math

import pytest
import torch

from rlmix.algos.metrics import TokenFacts, mismatch_metrics, step_metrics

TRAINER = torch.tensor([0.5, 0.25, 0.1, 0.3, 0.3, 0.3], dtype=torch.float64)
SAMPLER = torch.tensor([0.4, 0.25, 0.2, 0.3, 0.1, 0.3], dtype=torch.float64)
D = TRAINER.log() - SAMPLER.log()


def test_kl_estimates_and_differences_of_the_worked_example():
    metrics = mismatch_metrics(D)
    assert metrics["mismatch/k1_kl"] == pytest.approx(-0.104768, abs=1e-6)
    assert metrics["mismatch/k3_kl"] == pytest.approx(0.186899, abs=1e-6)
    assert metrics["mismatch/mean_abs"] == pytest.approx(0.335817, abs=1e-6)
    assert metrics["mismatch/max_abs"] == pytest.approx(math.log(3))
    assert metrics["mismatch/chi2"] == pytest.approx(1.302083, abs=1e-6)
    reverse = sum(1 / r - 1 + math.log(r) for r in (1.25, 1, 0.5, 1, 3, 1)) / 6
    assert metrics["mismatch/k3_reverse"] == pytest.approx(reverse)


def test_expected_k3_over_the_vocabulary_is_the_kl_divergence():
    p = torch.tensor([0.60, 0.25, 0.13, 0.02], dtype=torch.float64)
    q = torch.tensor([0.45, 0.25, 0.12, 0.18], dtype=torch.float64)
    d = p.log() - q.log()
    k3 = sum(q[v].item() * mismatch_metrics(d[v : v + 1])["mismatch/k3_kl"] for v in range(4))
    assert k3 == pytest.approx(0.256438, abs=1e-6)


def test_hostile_differences_stay_finite_and_equal_policies_give_zero():
    assert all(map(math.isfinite, mismatch_metrics(torch.tensor([1e4, -1e4, 95.0])).values()))
    assert set(mismatch_metrics(torch.zeros(3)).values()) == {0.0}
    assert set(mismatch_metrics(torch.zeros(0)).values()) == {0.0}


def facts(**changes):
    weights = torch.tensor([1.25, 1.0, 0.5, 1.0, 0.0, 1.0])
    values = {
        "log_ratios_T": D,
        "weights_T": weights,
        "outside_T": weights == 0,
        "entropy_T": torch.full((6,), 0.7),
        "pools_T": torch.tensor([0, 0, 1, 1, 1, 1]),
        "lags_T": torch.tensor([0, 0, 0, 1, 2, 7]),
        "coeff_l1_T": torch.tensor([0.0, 0.2, 0.4, 0.0, 0.0, 0.0]),
        "tail_ratio_T": torch.tensor([1.0, 1.0, 1.0, 1.0, 3.0, 1.0]),
    }
    return TokenFacts(**(values | changes))


def test_step_metrics_split_by_pool_and_by_lag():
    metrics = step_metrics(facts(), pool_names=["h100", "b200", "a100"])
    assert metrics["mismatch/by_pool/h100/mean_abs"] == pytest.approx(math.log(1.25) / 2)
    assert metrics["mismatch/by_pool/b200/tokens"] == 4
    assert metrics["mismatch/by_pool/b200/max_abs"] == pytest.approx(math.log(3))
    assert "mismatch/by_pool/a100/mean_abs" not in metrics  # no token: absent, not 0
    assert metrics["mismatch/by_lag/0/tokens"] == 3
    assert metrics["mismatch/by_lag/0-1/tokens"] == 4
    assert metrics["mismatch/by_lag/2-3/mean_abs"] == pytest.approx(math.log(3))
    assert "mismatch/by_lag/4-5/tokens" not in metrics
    assert metrics["mismatch/by_lag/6+/mean_abs"] == 0.0
    assert metrics["staleness/mean_versions"] == pytest.approx(10 / 6)
    assert metrics["staleness/max_versions"] == 7
    assert metrics["correction/masked_frac"] == pytest.approx(1 / 6)
    assert metrics["correction/by_pool/b200/masked_frac"] == 0.25
    assert metrics["correction/sc_tail_ratio"] == pytest.approx(8 / 6)
    assert metrics["correction/sc_tail_ratio_max"] == 3.0
    assert metrics["correction/sc_coeff_l1"] == pytest.approx(0.1)
    assert metrics["loss/entropy"] == pytest.approx(0.7)


def test_without_centering_its_health_numbers_are_absent():
    metrics = step_metrics(facts(coeff_l1_T=None, tail_ratio_T=None), pool_names=["h100", "b200"])
    assert not [key for key in metrics if "sc_" in key]
    assert "mismatch/k3_kl" in metrics
