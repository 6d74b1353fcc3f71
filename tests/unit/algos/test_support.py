import math

import pytest
import torch

from rlmix.algos.corrections import centering_term
from rlmix.algos.support import (
    Support,
    entropy,
    full_logprobs,
    head_logprobs,
    kept_mask,
    replayed_logprobs,
)

P = torch.tensor([0.60, 0.25, 0.13, 0.02], dtype=torch.float64)
Q = torch.tensor([0.45, 0.25, 0.12, 0.18], dtype=torch.float64)


def test_replay_renormalises_the_trainer_on_the_recorded_kept_set():
    # top-p 0.7 of q keeps A and B: p^S = (.705882, .294118), ratios (1.098039, .823529)
    logits = P.log()[None].requires_grad_()
    kept_ids = torch.tensor([[0, 1]])
    sampled, kept = replayed_logprobs(logits, torch.tensor([1]), kept_ids, torch.ones(1, 2).bool())
    assert kept.exp()[0].tolist() == pytest.approx([0.705882, 0.294118], abs=1e-6)
    assert sampled.item() == pytest.approx(math.log(0.25 / 0.85))
    q_kept = (Q[:2] / Q[:2].sum()).log()[None]
    assert (kept - q_kept).exp()[0].tolist() == pytest.approx([1.098039, 0.823529], abs=1e-6)
    # the centering push, and nothing outside the kept set
    term = centering_term(Support(kept, q_kept, True), kind="none", low=0.5, high=5.0)
    (gradient,) = torch.autograd.grad(term.sum_T.sum(), logits)
    assert gradient[0].tolist() == pytest.approx([-0.063025, 0.063025, 0.0, 0.0], abs=1e-6)


def test_replay_gives_a_larger_logprob_than_the_whole_vocabulary():
    logits = P.log()[None]
    ids = torch.tensor([0])
    replayed, _ = replayed_logprobs(logits, ids, torch.tensor([[0, 1]]), torch.ones(1, 2).bool())
    # the trainer's mass on the kept set is .85
    assert (full_logprobs(logits, ids) - replayed).exp().item() == pytest.approx(0.85)


def test_padded_slots_are_minus_infinity_and_pass_no_gradient():
    logits = torch.zeros(2, 4, requires_grad=True)
    sampler = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]).log()
    kept = kept_mask(sampler)
    assert kept.tolist() == [[True, True, False], [True, False, False]]
    kept_ids = torch.tensor([[2, 3, 0], [1, 0, 0]])
    sampled, logprobs = replayed_logprobs(logits, torch.tensor([2, 1]), kept_ids, kept)
    assert sampled.tolist() == pytest.approx([math.log(0.5), 0.0])
    assert torch.isneginf(logprobs[~kept]).all()
    (gradient,) = torch.autograd.grad(sampled.sum() + logprobs[kept].sum(), logits)
    assert torch.isfinite(gradient).all()
    assert gradient[:, 0].tolist() == [0.0, 0.0]


def test_a_damaged_logprob_is_not_taken_for_padding():
    assert kept_mask(torch.tensor([[math.nan, -math.inf]])).tolist() == [[True, False]]


def test_head_logprobs_are_of_the_whole_vocabulary_and_the_sampled_id_may_lie_outside():
    logits = P.log()[None] + 3.0
    sampled, head = head_logprobs(
        logits, torch.tensor([3]), torch.tensor([[1, 0]]), torch.ones(1, 2).bool()
    )
    assert sampled.exp().item() == pytest.approx(0.02)
    assert head.exp()[0].tolist() == pytest.approx([0.25, 0.60])


def test_entropy_of_a_fair_choice_among_four_is_log_four():
    assert entropy(torch.zeros(1, 4)).item() == pytest.approx(math.log(4))
