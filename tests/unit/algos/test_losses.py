"""Losses against numbers worked by hand, closed forms and exact sums over a vocabulary.

The prefix of four tokens (A, B, C, D) is the one of docs/algorithms.md; all in float64.
"""

import math

import pytest
import torch

from rlmix.algos.losses import policy_loss
from rlmix.algos.support import Support, full_logprobs, head_logprobs, kept_mask, replayed_logprobs

P = torch.tensor([0.60, 0.25, 0.13, 0.02], dtype=torch.float64)
Q = torch.tensor([0.45, 0.25, 0.12, 0.18], dtype=torch.float64)
VALUE = torch.tensor([1.0, 0.6, 0.2, 0.0], dtype=torch.float64)
"""Value of each token, used as its advantage."""

MODES = {
    "none": {"importance": "none", "low": 0.5, "high": 5.0},
    "tis": {"importance": "tis", "low": 0.0, "high": 2.0},
    "mis": {"importance": "mis", "low": 0.5, "high": 5.0},
    "cispo": {"importance": "cispo", "low": 0.8, "high": 1.2},
}
UNTRUNCATED = {"importance": "tis", "low": 0.0, "high": math.inf}


def weight_function(name):
    """The textbook f(r), written independently of the code under test."""
    return {
        "none": lambda r: torch.ones_like(r),
        "tis": lambda r: torch.minimum(r, torch.tensor(2.0, dtype=r.dtype)),
        "mis": lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, torch.zeros_like(r)),
        "cispo": lambda r: torch.minimum(torch.maximum(r, r.new_tensor(0.8)), r.new_tensor(1.2)),
    }[name]


def loss_and_gradient(logits, q, sampled, advantages, *, mode, centering=True, head=None):
    """Loss of tokens `sampled` (all with the same prefix) and its gradient in the logits."""
    logits_TV = logits.expand(len(sampled), -1).clone().requires_grad_()
    ids = torch.tensor(sampled)
    vocab = logits.shape[-1]
    kept = list(range(vocab)) if head is None else head
    kept_ids = torch.tensor(kept).expand(len(sampled), -1)
    kept_logprobs = q.log()[kept].expand(len(sampled), -1)
    gather = replayed_logprobs if head is None else head_logprobs
    trainer, trainer_kept = gather(logits_TV, ids, kept_ids, torch.ones_like(kept_ids).bool())
    loss, _ = policy_loss(
        trainer,
        q.log()[ids],
        torch.as_tensor(advantages, dtype=logits.dtype),
        torch.ones(len(sampled), dtype=torch.bool),
        **(UNTRUNCATED if mode == "is" else MODES[mode]),
        denominator=1.0,
        centering=centering,
        support=Support(trainer_kept, kept_logprobs, head is None) if centering else None,
    )
    (gradient_TV,) = torch.autograd.grad(loss, logits_TV)
    return loss.item(), gradient_TV


def expected_push(logits, q, advantages, *, mode, centering, head=None):
    """E_q[-dloss/dlogits], summed exactly over the vocabulary."""
    _, gradient_TV = loss_and_gradient(
        logits, q, list(range(len(q))), advantages, mode=mode, centering=centering, head=head
    )
    return -(q[:, None] * gradient_TV).sum(dim=0)


@pytest.mark.parametrize(
    ("mode", "uncentred", "centred"),
    [
        ("none", (0.0756, -0.006, -0.05712, -0.01248), (0.1692, -0.006, -0.05088, -0.11232)),
        ("tis", (0.1344, -0.044, -0.07488, -0.01552), (0.1344, -0.044, -0.07488, -0.01552)),
        ("mis", (0.1344, -0.044, -0.07488, -0.01552), (0.126912, -0.04712, -0.0765024, -0.0032896)),
    ],
)
def test_expected_push_on_the_worked_prefix(mode, uncentred, centred):
    plain = expected_push(P.log(), Q, VALUE, mode=mode, centering=False)
    assert plain.tolist() == pytest.approx(uncentred, abs=1e-12)
    push = expected_push(P.log(), Q, VALUE, mode=mode, centering=True)
    assert push.tolist() == pytest.approx(centred, abs=1e-12)


@pytest.mark.parametrize(
    ("mode", "sampled", "advantage", "loss", "gradient"),
    [
        ("none", 0, 1.0, -1.014610, (-0.55, 0.25, 0.12, 0.18)),
        ("tis", 0, 1.0, -0.315437, (-0.533333, 0.333333, 0.173333, 0.026667)),
        ("mis", 0, 1.0, -0.237197, (-0.521333, 0.338333, 0.175933, 0.007067)),
        ("none", 3, -1.0, -2.386587, (-0.45, -0.25, -0.12, 0.82)),
        ("tis", 3, -1.0, 0.561869, (-0.066667, -0.027778, -0.014444, 0.108889)),
        ("mis", 3, -1.0, 0.918298, (-0.012, -0.005, -0.0026, 0.0196)),
    ],
)
def test_loss_and_gradient_of_one_sampled_token(mode, sampled, advantage, loss, gradient):
    ours, gradient_TV = loss_and_gradient(P.log(), Q, [sampled], [advantage], mode=mode)
    assert ours == pytest.approx(loss, abs=1e-6)
    assert gradient_TV[0].tolist() == pytest.approx(gradient, abs=1e-6)


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_expected_push_is_the_covariance_of_advantage_and_weighted_score(mode, seed):
    logits, q, advantages = random_policies(seed)
    p = logits.softmax(0)
    weights = weight_function(mode)(p / q)
    scores = torch.eye(len(q), dtype=torch.float64) - p
    weighted = weights[:, None] * scores
    mean_advantage = (q * advantages).sum()
    covariance = (q[:, None] * (advantages - mean_advantage)[:, None] * weighted).sum(0)
    push = expected_push(logits, q, advantages, mode=mode, centering=True)
    assert push.tolist() == pytest.approx(covariance.tolist(), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_a_constant_advantage_pushes_nowhere_only_when_centred(mode, seed):
    logits, q, advantages = random_policies(seed)
    constant = torch.full_like(advantages, 3.0)
    push = expected_push(logits, q, constant, mode=mode, centering=True)
    assert push.tolist() == pytest.approx([0.0] * len(q), abs=1e-12)
    uncentred = expected_push(logits, q, constant, mode=mode, centering=False)
    assert uncentred.abs().max() > 1e-3
    shifted = expected_push(logits, q, advantages + 3.0, mode=mode, centering=True)
    plain = expected_push(logits, q, advantages, mode=mode, centering=True)
    assert shifted.tolist() == pytest.approx(plain.tolist(), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(4))
def test_autograd_equals_the_closed_form_in_the_logits(mode, seed):
    logits, q, advantages = random_policies(seed)
    p = logits.softmax(0)
    weights = weight_function(mode)(p / q)
    mass = q * weights
    mean = mass - mass.sum() * p
    sampled = list(range(len(q)))
    _, gradient_TV = loss_and_gradient(logits, q, sampled, advantages, mode=mode)
    for token in sampled:
        one_hot = torch.nn.functional.one_hot(torch.tensor(token), len(q))
        closed = -advantages[token] * (weights[token] * (one_hot - p) - mean)
        assert gradient_TV[token].tolist() == pytest.approx(closed.tolist(), abs=1e-12)


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


@pytest.mark.parametrize("mode", MODES)
def test_equal_policies_give_the_plain_policy_gradient(mode):
    logits, _, advantages = random_policies(5)
    q = logits.softmax(0)
    _, gradient_TV = loss_and_gradient(logits, q, [2, 4], advantages[[2, 4]], mode=mode)
    for row, token in enumerate([2, 4]):
        one_hot = torch.nn.functional.one_hot(torch.tensor(token), len(q))
        reinforce = -advantages[token] * (one_hot - q)
        assert gradient_TV[row].tolist() == pytest.approx(reinforce.tolist(), abs=1e-12)


def test_untruncated_importance_sampling_needs_no_centering():
    logits, q, advantages = random_policies(1)
    q = 0.5 * q + 0.5 / len(q)
    centred = expected_push(logits, q, advantages, mode="is", centering=True)
    plain = expected_push(logits, q, advantages, mode="is", centering=False)
    assert centred.tolist() == pytest.approx(plain.tolist(), abs=1e-12)


def test_without_weights_centering_equals_the_straight_through_softmax():
    # the trainer's gradient through a softmax whose value is the sampler's
    logits, q, _ = random_policies(6)
    z = logits.clone().requires_grad_()
    oracle = -1.3 * (q.log() + z - z.detach()).log_softmax(0)[3]
    (expected,) = torch.autograd.grad(oracle, z)
    _, gradient_TV = loss_and_gradient(logits, q, [3], [1.3], mode="none")
    assert gradient_TV[0].tolist() == pytest.approx(expected.tolist(), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(6))
def test_head_form_equals_the_dense_form_with_the_modelled_tail_written_out(mode, seed):
    logits, q, advantages = random_policies(seed)
    p = logits.softmax(0)
    head = [0, 2, 5]
    outside = [1, 3, 4, 6]
    rho = q[outside].sum() / p[outside].sum()
    q_hat = q.clone()
    q_hat[outside] = rho * p[outside]
    assert q_hat.sum().item() == pytest.approx(1.0)
    weights = weight_function(mode)(p / q_hat)
    mass = q_hat * weights
    mean = mass - mass.sum() * p
    for token in (0, 4):  # one inside the head, one outside
        own_weight = weight_function(mode)(p / q)[token]
        one_hot = torch.nn.functional.one_hot(torch.tensor(token), len(q))
        dense = -advantages[token] * (own_weight * (one_hot - p) - mean)
        _, gradient_TV = loss_and_gradient(
            logits, q, [token], [advantages[token]], mode=mode, head=head
        )
        assert gradient_TV[0].tolist() == pytest.approx(dense.tolist(), abs=1e-12)


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


@pytest.mark.parametrize("importance", ["none", "tis", "mis", "cispo", "ppo", "gspo"])
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(importance):
    generator = torch.Generator().manual_seed(11)
    num_tokens, num_slots = 12, 5
    weights = torch.randn(3, num_slots, generator=generator, dtype=torch.float64)
    features = torch.randn(num_tokens, 3, generator=generator, dtype=torch.float64)
    q_TK = torch.randn(num_tokens, num_slots, generator=generator, dtype=torch.float64)
    q_TK = q_TK.log_softmax(1)
    ids = torch.randint(num_slots, (num_tokens,), generator=generator)
    advantages = torch.randn(num_tokens, generator=generator, dtype=torch.float64)
    mask = torch.ones(num_tokens, dtype=torch.bool)
    mask[[2, 9]] = False
    sequences = torch.tensor([0] * 4 + [1] * 4 + [2] * 4)
    centering = importance not in ("ppo", "gspo")

    def run(slices):
        w = weights.clone().requires_grad_()
        total = 0.0
        for part in slices:
            logprobs = (features[part] @ w).log_softmax(1)
            loss, _ = policy_loss(
                logprobs.gather(1, ids[part, None])[:, 0],
                q_TK[part].gather(1, ids[part, None])[:, 0],
                advantages[part],
                mask[part],
                importance=importance, low=0.7, high=1.6,
                denominator=float(mask.sum()), centering=centering,
                support=Support(logprobs, q_TK[part], True) if centering else None,
                sequences_T=sequences[part],
            )  # fmt: skip
            loss.backward()
            total += loss.item()
        return total, w.grad

    whole_loss, whole_gradient = run([slice(0, 12)])
    assert whole_gradient.abs().sum() > 0
    for slices in ([slice(0, 4), slice(4, 12)], [slice(0, 4), slice(4, 8), slice(8, 12)]):
        loss, gradient = run(slices)
        assert loss == pytest.approx(whole_loss, abs=1e-12)
        assert torch.allclose(gradient, whole_gradient, atol=1e-12, rtol=0)


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


def test_masked_positions_may_hold_anything():
    bad = math.nan
    trainer = torch.tensor([-1.0, bad, -math.inf, -0.5], requires_grad=True)
    sampler = torch.tensor([-1.2, -1.0, bad, -0.5])
    kept_trainer = torch.tensor([[-1.0, -0.5], [bad, bad], [-0.1, bad], [-0.5, -0.9]])
    kept_sampler = torch.tensor([[-1.2, -0.4], [bad, -0.1], [bad, bad], [-0.5, -0.9]])
    loss, metrics = policy_loss(
        trainer, sampler, torch.tensor([1.0, bad, 1.0, -1.0]),
        torch.tensor([True, False, False, True]), **MODES["mis"], denominator=2,
        centering=True, support=Support(kept_trainer, kept_sampler, True),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, trainer)
    assert torch.isfinite(loss)
    assert gradient[[1, 2]].tolist() == [0.0, 0.0]
    assert torch.isfinite(gradient).all()
    assert all(math.isfinite(value) for value in metrics.values())


def test_all_tokens_masked_give_a_loss_of_zero_with_a_gradient_of_zero():
    trainer = torch.tensor([-1.0, math.nan], requires_grad=True)
    loss, _ = policy_loss(
        trainer, torch.zeros(2), torch.ones(2), torch.zeros(2, dtype=torch.bool), **MODES["mis"],
        denominator=7, centering=True, support=Support(torch.zeros(2, 3), torch.zeros(2, 3), True),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, trainer)
    assert loss.item() == 0.0
    assert gradient.tolist() == [0.0, 0.0]


def test_a_kept_set_of_one_teaches_nothing():
    logits = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([2])
    trainer, kept = replayed_logprobs(logits, ids, ids[:, None], torch.ones(1, 1).bool())
    loss, _ = policy_loss(
        trainer, torch.zeros(1, dtype=torch.float64), torch.ones(1), torch.ones(1).bool(),
        **MODES["mis"], denominator=1, centering=True,
        support=Support(kept, torch.zeros(1, 1, dtype=torch.float64), True),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == pytest.approx(0.0, abs=1e-15)
    assert gradient.abs().max().item() == pytest.approx(0.0, abs=1e-15)


def test_a_token_the_trainer_gives_no_probability_keeps_everything_finite():
    logits = torch.tensor([[0.0, -math.inf, 1.0]], dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([1])
    kept_ids = torch.tensor([[0, 1, 2]])
    q = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64).log()
    for mode in MODES.values():
        trainer, kept = replayed_logprobs(logits, ids, kept_ids, torch.ones(1, 3).bool())
        loss, _ = policy_loss(
            trainer, q[:, 1], torch.ones(1), torch.ones(1).bool(), **mode, denominator=1,
            centering=True, support=Support(kept, q, True),
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


def test_padding_of_a_support_changes_nothing():
    logits, q, _ = random_policies(3)
    narrow_ids = torch.tensor([[1, 4, 6]])
    wide_ids = torch.tensor([[1, 4, 6, 0, 0]])
    narrow_q = (q[[1, 4, 6]] / q[[1, 4, 6]].sum()).log()[None]
    padding = torch.full((1, 2), -math.inf, dtype=torch.float64)
    wide_q = torch.cat([narrow_q, padding], dim=1)
    results = []
    for kept_ids, kept_q in ((narrow_ids, narrow_q), (wide_ids, wide_q)):
        z = logits[None].clone().requires_grad_()
        trainer, kept = replayed_logprobs(z, torch.tensor([4]), kept_ids, kept_mask(kept_q))
        loss, _ = policy_loss(
            trainer, kept_q[:, 1], torch.ones(1), torch.ones(1).bool(), **MODES["tis"],
            denominator=1, centering=True, support=Support(kept, kept_q, True),
        )  # fmt: skip
        results.append((loss.item(), torch.autograd.grad(loss, z)[0]))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-14)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-14, rtol=0)
    assert results[1][1][0, [0, 2, 3, 5]].tolist() == [0.0] * 4


def test_bfloat16_input_is_computed_in_float32():
    trainer = torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)
    loss, _ = policy_loss(
        trainer, torch.tensor([-1.25, -2.5], dtype=torch.bfloat16), torch.tensor([1.0, 1.0]),
        torch.ones(2).bool(), importance="mis", low=0.1, high=9.0, denominator=2, centering=False,
    )  # fmt: skip
    assert loss.dtype == torch.float32
    expected = (math.exp(0.25) * 1.0 + math.exp(0.5) * 2.0) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)


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
