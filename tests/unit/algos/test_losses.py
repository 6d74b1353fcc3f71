"""The loss on single positions: what each part does, and which settings are refused.

The tables of docs/algorithms.md are in `test_docs_examples.py`, properties for any p and q in
`test_exactness.py`, damaged and degenerate input in `test_hostile_input.py`.
"""

import math

import pytest
import torch

from rlmix.algos.losses import policy_loss
from rlmix.algos.support import Support, full_logprobs, replayed_logprobs
from tests.unit.algos.docs_page import four_tokens

P, Q, _ = four_tokens()

MODES = {
    "none": {"importance": "none", "low": 0.5, "high": 5.0},
    "tis": {"importance": "tis", "low": 0.0, "high": 2.0},
    "mis": {"importance": "mis", "low": 0.5, "high": 5.0},
    "cispo": {"importance": "cispo", "low": 0.8, "high": 1.2},
}


def weight_function(name):
    """The textbook f(r), written independently of the code under test."""
    return {
        "none": lambda r: torch.ones_like(r),
        "tis": lambda r: torch.minimum(r, torch.tensor(2.0, dtype=r.dtype)),
        "mis": lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, torch.zeros_like(r)),
        "cispo": lambda r: torch.minimum(torch.maximum(r, r.new_tensor(0.8)), r.new_tensor(1.2)),
    }[name]


def loss_and_gradient(logits, q, sampled, advantages, *, mode, centering=True):
    """Loss of tokens `sampled` (all with the same prefix) and its gradient in the logits."""
    logits_TV = logits.expand(len(sampled), -1).clone().requires_grad_()
    ids = torch.tensor(sampled)
    kept_ids = torch.arange(len(q)).expand(len(sampled), -1)
    kept_logprobs = q.log().expand(len(sampled), -1)
    trainer, trainer_kept = replayed_logprobs(
        logits_TV, ids, kept_ids, torch.ones_like(kept_ids).bool()
    )
    loss, _ = policy_loss(
        trainer,
        q.log()[ids],
        torch.as_tensor(advantages, dtype=logits.dtype),
        torch.ones(len(sampled), dtype=torch.bool),
        **MODES[mode],
        denominator=1.0,
        centering=centering,
        support=Support(trainer_kept, kept_logprobs, True) if centering else None,
    )
    (gradient_TV,) = torch.autograd.grad(loss, logits_TV)
    return loss.item(), gradient_TV


def expected_push(logits, q, advantages, *, mode, centering):
    """E_q[-dloss/dlogits], summed exactly over the vocabulary."""
    _, gradient_TV = loss_and_gradient(
        logits, q, list(range(len(q))), advantages, mode=mode, centering=centering
    )
    return -(q[:, None] * gradient_TV).sum(dim=0)


def test_a_masked_token_keeps_its_centering_term():
    # D's ratio is 0.11, so its weight is 0; the push of the centering sum must remain
    _, gradient = loss_and_gradient(P.log(), Q, [3], [-1.0], mode="mis")
    assert gradient.abs().sum() > 0.03
    _, without = loss_and_gradient(P.log(), Q, [3], [-1.0], mode="mis", centering=False)
    assert without.abs().sum() == 0.0


def test_mean_score_of_two_tokens_is_centred_to_zero():
    p = torch.tensor([0.6, 0.4], dtype=torch.float64)
    q = torch.tensor([0.5, 0.5], dtype=torch.float64)
    ones = torch.ones(2, dtype=torch.float64)
    mean_score = expected_push(p.log(), q, ones, mode="none", centering=False)
    assert mean_score.tolist() == pytest.approx([-0.1, 0.1], abs=1e-15)
    centred = expected_push(p.log(), q, ones, mode="none", centering=True)
    assert centred.tolist() == pytest.approx([0.0, 0.0], abs=1e-15)


def random_policies(seed, vocab=7, spread=1.5):
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(vocab, generator=generator, dtype=torch.float64)
    q = (spread * torch.randn(vocab, generator=generator, dtype=torch.float64)).softmax(0)
    advantages = torch.randn(vocab, generator=generator, dtype=torch.float64)
    return logits, q, advantages


@pytest.mark.parametrize("mode", ["none", "tis", "mis"])
def test_autograd_equals_finite_differences_with_weights_held_fixed(mode):
    logits, q, _ = random_policies(2, vocab=5)
    p = logits.softmax(0)
    weights = weight_function(mode)(p / q)

    def frozen_loss(z):
        logp = z.log_softmax(0)
        return -0.7 * (weights[1] * logp[1] - (q * weights * logp).sum())

    _, gradient_TV = loss_and_gradient(logits, q, [1], [0.7], mode=mode)
    step = 1e-6
    for index in range(len(q)):
        shift = torch.zeros_like(logits)
        shift[index] = step
        slope = (frozen_loss(logits + shift) - frozen_loss(logits - shift)) / (2 * step)
        assert gradient_TV[0, index].item() == pytest.approx(slope.item(), abs=1e-8)


def test_without_weights_centering_equals_the_straight_through_softmax():
    # the trainer's gradient through a softmax whose value is the sampler's
    logits, q, _ = random_policies(6)
    z = logits.clone().requires_grad_()
    oracle = -1.3 * (q.log() + z - z.detach()).log_softmax(0)[3]
    (expected,) = torch.autograd.grad(oracle, z)
    _, gradient_TV = loss_and_gradient(logits, q, [3], [1.3], mode="none")
    assert gradient_TV[0].tolist() == pytest.approx(expected.tolist(), abs=1e-12)


def test_sampler_and_advantages_receive_no_gradient():
    trainer = torch.tensor([-1.0, -2.0], requires_grad=True)
    sampler = torch.tensor([-1.1, -1.9], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0], requires_grad=True)
    kept_sampler = torch.tensor([[-1.1, -0.4], [-1.9, -0.2]], requires_grad=True)
    kept_trainer = torch.tensor([[-1.0, -0.5], [-2.0, -0.1]], requires_grad=True)
    for is_exact in (True, False):
        loss, _ = policy_loss(
            trainer, sampler, advantages, torch.ones(2, dtype=torch.bool), **MODES["mis"],
            denominator=2, centering=True, support=Support(kept_trainer, kept_sampler, is_exact),
        )  # fmt: skip
        inputs = [sampler, advantages, kept_sampler]
        assert (
            torch.autograd.grad(loss, inputs, allow_unused=True, retain_graph=True) == (None,) * 3
        )
        assert torch.autograd.grad(loss, kept_trainer)[0].abs().sum() > 0


def test_masked_weights_stay_in_the_denominator():
    # two tokens, one out of range: the loss is that of the other divided by 2, not by 1
    trainer = torch.tensor([0.5, 0.9], dtype=torch.float64).log()
    sampler = torch.tensor([0.5, 0.1], dtype=torch.float64).log()
    loss, metrics = policy_loss(
        trainer, sampler, torch.ones(2), torch.ones(2, dtype=torch.bool), **MODES["mis"],
        denominator=2, centering=False,
    )  # fmt: skip
    assert loss.item() == pytest.approx(-math.log(0.5) / 2)
    assert metrics["correction/masked_frac"] == 0.5


def test_ppo_is_the_clipped_surrogate_in_value_and_gradient():
    # ratio 1.3 with A = 1 is clipped to 1.2 and flat; with A = -1 it is not clipped
    sampler = torch.tensor([0.3, 0.3], dtype=torch.float64).log()
    trainer = (sampler + math.log(1.3)).requires_grad_()
    advantages = torch.tensor([1.0, -1.0], dtype=torch.float64)
    loss, metrics = policy_loss(
        trainer, sampler, advantages, torch.ones(2).bool(), importance="ppo", low=0.8, high=1.2,
        denominator=1, centering=False,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, trainer)
    assert loss.item() == pytest.approx(-1.2 + 1.3)
    assert gradient.tolist() == pytest.approx([0.0, 1.3])
    assert metrics["correction/masked_frac"] == 0.5


def test_a_mask_of_zeros_and_ones_is_not_taken_for_positions():
    trainer = torch.tensor([-1.0, -2.0, -4.0], dtype=torch.float64)
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        mask = torch.tensor([1, 0, 1]).to(dtype)
        loss, metrics = policy_loss(
            trainer, trainer, torch.ones(3), mask, **MODES["none"], denominator=1, centering=False
        )
        assert loss.item() == pytest.approx(5.0)
        assert metrics["mismatch/max_abs"] == 0.0


def test_an_unlikely_token_still_gets_its_gradient():
    # ln of the smallest float32 is -103: as far as a softmax of real logits goes
    trainer = torch.tensor([-95.0, -103.0], requires_grad=True)
    loss, _ = policy_loss(
        trainer, torch.full((2,), -3.0), torch.tensor([-1.0, 1.0]), torch.ones(2).bool(),
        **MODES["none"], denominator=1, centering=False,
    )  # fmt: skip
    assert torch.autograd.grad(loss, trainer)[0].tolist() == [1.0, -1.0]
    assert loss.item() == pytest.approx(-95 + 103)


def test_a_good_token_is_pushed_up_and_a_bad_one_down():
    for mode in MODES:
        for advantage in (1.0, -1.0):
            _, gradient = loss_and_gradient(P.log(), Q, [0], [advantage], mode=mode)
            assert math.copysign(1.0, -gradient[0, 0].item()) == advantage


def test_wrong_settings_are_refused():
    zeros, ones = torch.zeros(1), torch.ones(1)
    mask = torch.ones(1).bool()

    def call(**changes):
        settings = {**MODES["mis"], "denominator": 1, "centering": False} | changes
        return policy_loss(zeros, zeros, ones, mask, **settings)

    with pytest.raises(ValueError, match="centering=True needs the candidates"):
        call(centering=True)
    with pytest.raises(ValueError, match="centering is not defined for importance='ppo'"):
        call(importance="ppo", centering=True)
    with pytest.raises(ValueError, match="denominator=0"):
        call(denominator=0)
    with pytest.raises(ValueError, match=r"must both be \[T, K\]"):
        Support(torch.zeros(1, 2), torch.zeros(1, 3), True)


def test_metrics_name_mismatch_and_correction_of_the_policy_tokens():
    logits_TV = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
    trainer = full_logprobs(logits_TV, torch.tensor([0]))
    _, metrics = policy_loss(
        trainer, torch.tensor([0.4], dtype=torch.float64).log(), torch.ones(1),
        torch.ones(1).bool(), **MODES["mis"], denominator=1, centering=True,
        support=Support(logits_TV.log_softmax(1), torch.tensor([[0.4, 0.6]]).log(), True),
    )  # fmt: skip
    # r = 1.25: k3 = 1.25 - 1 - log 1.25
    assert metrics["mismatch/k3_kl"] == pytest.approx(0.25 - math.log(1.25))
    assert metrics["correction/sc_tail_ratio"] == 1.0
    assert metrics["correction/ess_frac"] == 1.0
