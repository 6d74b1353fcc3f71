"""Weights by hand; the tables of docs/algorithms.md are in `test_docs_examples.py`."""

import math

import pytest
import torch

from rlmix.algos.corrections import (
    IMPORTANCE_KINDS,
    applied_weights,
    centering_term,
    effective_sample_frac,
    importance_weights,
)
from rlmix.algos.losses import policy_loss
from rlmix.algos.support import Support


def weights_of(ratios, *, kind, low=0.5, high=5.0):
    trainer = torch.tensor(ratios, dtype=torch.float64).log()
    weights, _ = importance_weights(
        trainer, torch.zeros_like(trainer), kind=kind, low=low, high=high
    )
    return weights.tolist()


def test_mis_keeps_the_ratio_inside_inclusive_bounds_and_zeroes_the_rest():
    assert weights_of([0.49, 0.5, 5.0, 5.01], kind="mis") == pytest.approx([0, 0.5, 5, 0])
    ratios = [0.1, 0.4999, 0.5, 2.0, 2.0001, 4.0, 5.0, 5.0001]
    assert weights_of(ratios, kind="mis") == pytest.approx([0, 0, 0.5, 2, 2.0001, 4, 5, 0])


def test_tis_caps_at_high_and_ignores_low():
    ratios = [0.1, 0.4999, 0.5, 2.0, 2.0001, 4.0, 5.0, 5.0001]
    expected = [0.1, 0.4999, 0.5, 2, 2, 2, 2, 2]
    assert weights_of(ratios, kind="tis", low=9.0, high=2.0) == pytest.approx(expected)


def test_none_weighs_one_and_cispo_clips_both_ways():
    assert weights_of([0.1, 3.0], kind="none") == [1.0, 1.0]
    assert weights_of([0.1, 3.0, 9.0], kind="cispo") == pytest.approx([0.5, 3.0, 5.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("p", "q"), [(0.5, 0.1), (0.05, 0.1), (1e-3, 2e-4), (0.15, 0.3)])
def test_bounds_stay_inclusive_when_the_logarithms_round(dtype, p, q):
    trainer = torch.tensor([p], dtype=torch.float64).log().to(dtype)
    sampler = torch.tensor([q], dtype=torch.float64).log().to(dtype)
    weights, _ = importance_weights(trainer, sampler, kind="mis", low=0.5, high=5.0)
    assert weights.item() == pytest.approx(p / q, rel=1e-5)


def test_in_float32_bounds_end_two_millionths_beyond_themselves():
    sampler = torch.full((4,), -3.7)
    ratios = torch.tensor([0.49999, 0.4999995, 5.000005, 5.0001], dtype=torch.float64)
    trainer = (sampler.double() + ratios.log()).float()
    weights, _ = importance_weights(trainer, sampler, kind="mis", low=0.5, high=5.0)
    assert (weights > 0).tolist() == [False, True, True, False]


def test_ppo_stops_good_tokens_above_and_bad_tokens_below_the_clip():
    ratios = torch.tensor([1.3, 1.3, 0.7, 0.7, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    weights = applied_weights(ratios.log(), kind="ppo", low=0.8, high=1.2, advantages_T=advantages)
    assert weights.tolist() == pytest.approx([0.0, 1.3, 0.7, 0.0, 1.0])


def test_infinite_and_huge_ratios_stay_finite():
    trainer = torch.tensor([0.0, -math.inf, -math.inf, -0.1])
    sampler = torch.tensor([-math.inf, 0.0, -math.inf, -95.0])
    extra = {"advantages_T": torch.tensor([1.0, -1, 1, -1]), "sequences_T": torch.arange(4) // 2}
    for kind in IMPORTANCE_KINDS:
        weights, metrics = importance_weights(
            trainer, sampler, kind=kind, low=0.5, high=5.0, **extra
        )
        assert torch.isfinite(weights).all()
        assert all(math.isfinite(value) for value in metrics.values())


def test_weights_carry_no_gradient_and_bfloat16_is_computed_in_float32():
    trainer = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    weights, _ = importance_weights(
        trainer, torch.tensor([-1.5, -1.0]), kind="mis", low=0.1, high=5.0
    )
    assert weights.dtype == torch.float32
    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([math.exp(0.5), math.exp(-1.0)], rel=1e-6)


def test_effective_sample_share_of_the_worked_example():
    # trainer (.5 .25 .1 / .3 .3 .3) over sampler (.4 .25 .2 / .3 .1 .3): r = 1.25 1 .5 / 1 3 1
    ratios = torch.tensor([1.25, 1, 0.5, 1, 3, 1], dtype=torch.float64)
    assert effective_sample_frac(ratios) == pytest.approx(0.724736, abs=1e-6)
    assert effective_sample_frac(ratios.clamp(max=2)) == pytest.approx(0.861702, abs=1e-6)
    _, metrics = importance_weights(
        ratios.log(), torch.zeros_like(ratios), kind="tis", low=0.0, high=2.0
    )
    assert metrics["correction/ess_frac"] == pytest.approx(0.861702, abs=1e-6)
    assert metrics["correction/outside_frac"] == pytest.approx(1 / 6)
    assert metrics["correction/masked_frac"] == 0.0
    assert metrics["correction/ratio_mean"] == pytest.approx(7.75 / 6)


def test_no_tokens_give_neutral_numbers():
    weights, metrics = importance_weights(
        torch.zeros(0), torch.zeros(0), kind="mis", low=0.5, high=5.0
    )
    assert weights.numel() == 0
    assert metrics["correction/ess_frac"] == 1.0
    assert metrics["correction/masked_frac"] == 0.0


def test_wrong_arguments_are_refused_with_what_is_allowed():
    zeros = torch.zeros(1)
    with pytest.raises(ValueError, match="importance='miss' is unknown; use one of none, tis, mis"):
        importance_weights(zeros, zeros, kind="miss", low=0.5, high=5.0)
    with pytest.raises(ValueError, match="0 <= low <= high"):
        importance_weights(zeros, zeros, kind="mis", low=5.0, high=0.5)
    with pytest.raises(ValueError, match="ppo needs advantages_T"):
        importance_weights(zeros, zeros, kind="ppo", low=0.8, high=1.2)
    for kind in ("gspo", "seq_tis"):
        with pytest.raises(ValueError, match=f"{kind} needs sequences_T"):
            importance_weights(zeros, zeros, kind=kind, low=0.8, high=1.2, advantages_T=zeros)


def test_the_outside_share_of_sequence_kinds_is_that_of_their_sequences():
    # ratios 4 and 1/4 cancel in the geometric mean of sequence 0; sequence 1 has 1.5
    trainer = torch.tensor([4.0, 0.25, 1.5], dtype=torch.float64).log()
    facts = {"advantages_T": torch.ones(3), "sequences_T": torch.tensor([0, 0, 1])}
    for kind, low, outside in (("gspo", 0.8, 1 / 3), ("seq_tis", 9.0, 1 / 3), ("ppo", 0.8, 1.0)):
        _, metrics = importance_weights(
            trainer, torch.zeros(3), kind=kind, low=low, high=1.2, **facts
        )
        assert metrics["correction/outside_frac"] == pytest.approx(outside)
        _, metrics = policy_loss(
            trainer, torch.zeros(3), mask_T=torch.ones(3).bool(), importance=kind, low=low,
            high=1.2, denominator=3, centering=False, **facts,
        )  # fmt: skip
        assert metrics["correction/outside_frac"] == pytest.approx(outside)


def test_tails_are_told_apart_down_to_a_millionth():
    def ratio(sampler_tail, trainer_tail):
        tails = torch.tensor([[sampler_tail], [trainer_tail]], dtype=torch.float64)
        sampler, trainer = (1 - tails).log()
        return centering_term(
            Support(trainer[None], sampler[None], False), kind="none", low=0.0, high=1.0
        ).tail_ratio_T.item()

    assert ratio(8e-6, 2e-6) == pytest.approx(4.0, rel=1e-6)
    assert ratio(2e-6, 1e-9) == pytest.approx(2.0, rel=1e-6)
    assert ratio(1e-9, 1e-12) == 1.0


def test_a_float32_sampler_beside_a_float64_trainer_costs_no_further_digits():
    p = torch.tensor([[0.60, 0.25, 0.13, 0.02]], dtype=torch.float64).log().requires_grad_()
    q = torch.tensor([[0.45, 0.25, 0.12, 0.18]]).log()
    term = centering_term(Support(p, q, True), kind="none", low=0.0, high=1.0)
    (mass,) = torch.autograd.grad(term.sum_T.sum(), p)
    assert torch.allclose(mass, q.double().exp(), atol=1e-15, rtol=0)


def test_empty_tails_of_a_head_stay_finite():
    # the head holds everything: both tails are rounding noise and meet at the floor
    logprobs = torch.tensor([[0.7, 0.3]]).log()
    support = Support(logprobs.clone().requires_grad_(), logprobs, False)
    term = centering_term(support, kind="mis", low=0.5, high=5.0)
    assert term.tail_ratio_T.item() == pytest.approx(1.0, abs=0.2)
    assert torch.isfinite(term.sum_T).all()
