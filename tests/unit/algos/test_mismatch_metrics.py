"""Two sequences of three tokens, worked by hand: r = 1.25 1 .5 / 1 3 1."""

import math

import pytest
import torch

from rlmix.algos.corrections import importance_weights
from rlmix.algos.metrics import (
    TokenFacts,
    head_facts,
    head_metrics,
    mismatch_metrics,
    step_metrics,
)
from rlmix.algos.support import Support

TRAINER = torch.tensor([0.5, 0.25, 0.1, 0.3, 0.3, 0.3], dtype=torch.float64)
SAMPLER = torch.tensor([0.4, 0.25, 0.2, 0.3, 0.1, 0.3], dtype=torch.float64)
D = TRAINER.log() - SAMPLER.log()
SEQUENCES = torch.tensor([4, 4, 4, 9, 9, 9])


def test_kl_estimates_and_differences_of_the_worked_example():
    metrics = mismatch_metrics(D)
    assert metrics["mismatch/k1_kl"] == pytest.approx(-0.104768, abs=1e-6)
    assert metrics["mismatch/k2_kl"] == pytest.approx(0.144766, abs=1e-6)
    assert metrics["mismatch/k3_kl"] == pytest.approx(0.186899, abs=1e-6)
    assert metrics["mismatch/mean_abs"] == pytest.approx(0.335817, abs=1e-6)
    assert metrics["mismatch/max_abs"] == pytest.approx(math.log(3))
    assert metrics["mismatch/chi2"] == pytest.approx(1.302083, abs=1e-6)
    reverse = sum(1 / r - 1 + math.log(r) for r in (1.25, 1, 0.5, 1, 3, 1)) / 6
    assert metrics["mismatch/k3_reverse"] == pytest.approx(reverse)
    assert metrics["mismatch/prob_error"] == pytest.approx(1.541667, abs=1e-6)
    assert "mismatch/chi2_sequence" not in metrics


def test_sequence_numbers_of_the_worked_example():
    metrics = mismatch_metrics(D, SEQUENCES)
    # Products of ratios .625 and 3: (.625^2 + 9) / 2 - 1. Geometric means .854988 and 1.442250.
    assert metrics["mismatch/chi2_sequence"] == pytest.approx(3.695313, abs=1e-6)
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(0.931484, abs=1e-6)
    assert metrics["mismatch/ppl_ratio"] == pytest.approx(
        (1 / 0.854988 + 1 / 1.442250) / 2, abs=1e-6
    )


def test_effective_sample_and_outside_share_of_the_worked_example():
    arms = {"tis": 0.861702, "mis": 0.724736}
    for kind, ess in arms.items():
        high = 2.0 if kind == "tis" else 5.0
        _, metrics = importance_weights(TRAINER.log(), SAMPLER.log(), kind=kind, low=0.5, high=high)
        assert metrics["correction/ess_frac"] == pytest.approx(ess, abs=1e-6)
    assert metrics["correction/outside_frac"] == 0.0


def test_expected_k3_over_the_vocabulary_is_the_kl_divergence():
    p = torch.tensor([0.60, 0.25, 0.13, 0.02], dtype=torch.float64)
    q = torch.tensor([0.45, 0.25, 0.12, 0.18], dtype=torch.float64)
    d = p.log() - q.log()
    k3 = sum(q[v].item() * mismatch_metrics(d[v : v + 1])["mismatch/k3_kl"] for v in range(4))
    assert k3 == pytest.approx(0.256438, abs=1e-6)


def test_hostile_differences_stay_finite_and_equal_policies_give_zero():
    assert all(map(math.isfinite, mismatch_metrics(torch.tensor([1e4, -1e4, 95.0])).values()))
    for nothing in (torch.zeros(3), torch.zeros(0)):
        ids = torch.zeros(nothing.numel(), dtype=torch.int64)
        equal = mismatch_metrics(nothing, ids)
        ratios = {equal.pop(f"mismatch/{name}") for name in ("prob_error", "ppl_ratio")}
        assert ratios == {1.0}
        assert set(equal.values()) == {0.0}


def facts(**changes):
    weights = torch.tensor([1.25, 1.0, 0.5, 1.0, 0.0, 1.0])
    values = {
        "log_ratios_T": D,
        "weights_T": weights,
        "outside_T": weights == 0,
        "entropy_T": torch.full((6,), 0.7),
        "pools_T": torch.tensor([0, 0, 1, 1, 1, 1]),
        "lags_T": torch.tensor([0, 0, 0, 1, 2, 7]),
        "positions_T": torch.tensor([63, 64, 1023, 1024, 65535, 65536]),
        "sequences_T": SEQUENCES,
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


def test_lags_fall_into_the_buckets_that_their_names_say():
    lags = torch.tensor([1, 2, 3, 4, 5, 6])
    metrics = step_metrics(facts(lags_T=lags), pool_names=["h100", "b200"])
    tokens = {
        key.split("/")[2]: value
        for key, value in metrics.items()
        if key.startswith("mismatch/by_lag/") and key.endswith("/tokens")
    }
    assert tokens == {"0-1": 1, "2-3": 2, "4-5": 2, "6+": 1}


def test_step_metrics_split_by_weight_view_and_by_position():
    names = ["h100", "b200"]
    metrics = step_metrics(facts(), pool_names=names, pool_views={"b200": "nvfp4"})
    assert metrics["mismatch/tokens"] == 6
    assert metrics["mismatch/by_view/nvfp4/k3_kl"] == metrics["mismatch/by_pool/b200/k3_kl"]
    assert metrics["mismatch/by_view/unknown/tokens"] == 2
    both = step_metrics(facts(), pool_names=names, pool_views=dict.fromkeys(names, "fp8"))
    assert both["mismatch/by_view/fp8/chi2_sequence"] == pytest.approx(3.695313, abs=1e-6)
    tokens = {
        key.split("/")[2]: value
        for key, value in metrics.items()
        if key.startswith("mismatch/by_position/") and key.endswith("/tokens")
    }
    # 4k-16k has no token, so it is absent; ends of a bucket belong to it.
    assert tokens == {"0-63": 1, "64-255": 1, "256-1023": 1, "1k-4k": 1, "16k-64k": 1, "64k+": 1}
    assert metrics["mismatch/by_position/16k-64k/mean_abs"] == pytest.approx(math.log(3))
    assert metrics["correction/by_position/16k-64k/masked_frac"] == 1.0
    assert not [key for key in step_metrics(facts(), pool_names=names) if "by_view" in key]


def test_head_of_the_worked_example_has_twice_the_trainers_tail():
    # p = (.60, .25, .13, .02), q = (.45, .25, .12, .18); the head is {A, B}, tails .30 and .15.
    p, q = torch.tensor([0.60, 0.25]).double(), torch.tensor([0.45, 0.25]).double()
    padded = torch.tensor([[1.0, 0.0]]).double().log()
    support = Support(
        trainer_logprobs_TK=torch.cat([p.log()[None], padded]),
        sampler_logprobs_TK=torch.cat([q.log()[None], padded]),
        is_exact=False,
    )
    found = head_facts(support, torch.tensor([1, 0]), kind="none", low=0.0, high=1.0)
    metrics = head_metrics(found, pool_names=["h100", "b200", "a100"])
    assert metrics["correction/by_pool/b200/head_tail_ratio"] == pytest.approx(2.0)
    assert metrics["correction/by_pool/b200/head_mass_sampler"] == pytest.approx(0.70)
    assert metrics["correction/by_pool/b200/head_mass_trainer"] == pytest.approx(0.85)
    # q^ - p = (-.15, 0, .13, .02)
    assert metrics["correction/by_pool/b200/head_coeff_l1"] == pytest.approx(0.30)
    # A token without a tail adds nothing to the ratio of the mean tails.
    assert metrics["correction/by_pool/h100/head_tail_ratio"] == 1.0
    assert metrics["correction/head_tail_ratio"] == pytest.approx(2.0)
    assert metrics["correction/head_tokens"] == 2
    assert "correction/by_pool/a100/head_tokens" not in metrics
    assert head_metrics(None, pool_names=["h100"]) == {}


def test_without_centering_its_health_numbers_are_absent():
    metrics = step_metrics(facts(coeff_l1_T=None, tail_ratio_T=None), pool_names=["h100", "b200"])
    assert not [key for key in metrics if "sc_" in key]
    assert "mismatch/k3_kl" in metrics
