"""Damaged, degenerate and extreme input: nothing turns into nan, and nothing hides a nan either."""

import itertools
import math

import pytest
import torch

from rlmix.algos.corrections import IMPORTANCE_KINDS, SEQUENCE_KINDS, centering_term
from rlmix.algos.losses import policy_loss
from rlmix.algos.sequence_masks import SequenceRule
from rlmix.algos.support import Support, head_logprobs, kept_mask, replayed_logprobs

CENTERED = [kind for kind in IMPORTANCE_KINDS if kind not in ("ppo", *SEQUENCE_KINDS)]
NAN, INF = math.nan, math.inf


def call(trainer, sampler, advantages, mask, *, kind="mis", support=None, **changes):
    settings = {"low": 0.5, "high": 5.0, "denominator": max(1, int(mask.sum()))} | changes
    return policy_loss(
        trainer, sampler, advantages, mask, importance=kind, centering=support is not None,
        support=support, **settings,
    )  # fmt: skip


def assert_finite(loss, metrics, *inputs):
    """Gradients in `inputs`, after a look at every number."""
    gradients = torch.autograd.grad(loss, inputs)
    assert torch.isfinite(loss)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    return gradients


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", IMPORTANCE_KINDS)
def test_infinite_and_huge_log_ratios_give_finite_losses_and_gradients(kind, dtype):
    values = [0.0, -0.5, -95.0, -1e6, -INF]
    pairs = torch.tensor(list(itertools.product(values, values, [1.0, -1.0, 0.0])), dtype=dtype)
    trainer = pairs[:, 0].clone().requires_grad_()
    loss, metrics = call(
        trainer, pairs[:, 1], pairs[:, 2], torch.ones(len(pairs)).bool(), kind=kind,
        sequences_T=torch.arange(len(pairs)) // 4,
        sequence_rule=SequenceRule(mask="geometric", low=1e-9, high=1e9, veto=0.0),
    )  # fmt: skip
    assert_finite(loss, metrics, trainer)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("kind", CENTERED)
def test_candidates_from_certain_to_impossible_keep_centering_finite(kind, is_exact):
    rows = [
        ([-0.1, -2.4, -95.0], [-95.0, -0.1, -2.4]),  # opposite opinions
        ([0.0, -INF, -INF], [-INF, 0.0, -INF]),  # disjoint supports
        ([-1.1, -1.1, -1.1], [0.0, -1e6, -INF]),
        ([-INF, -INF, -INF], [-1.1, -1.1, -1.1]),  # nothing left on the trainer's side
        ([-1e4, -1e5, 0.0], [-0.7, -0.7, -40.0]),
        ([0.0, -3e38, -3e38], [-1.1, -1.1, -1.1]),  # masked with the lowest finite number
    ]
    trainer = torch.tensor([row[0] for row in rows], requires_grad=True)
    sampler = torch.tensor([row[1] for row in rows])
    own = torch.full((len(rows),), -1.0, requires_grad=True)
    loss, metrics = call(
        own, torch.full((len(rows),), -1.2), torch.ones(len(rows)), torch.ones(len(rows)).bool(),
        kind=kind, support=Support(trainer, sampler, is_exact),
    )  # fmt: skip
    assert_finite(loss, metrics, own, trainer)
    assert abs(loss.item()) < 1e5  # a loss of 1e38 would swallow all others of its batch


@pytest.mark.parametrize("kind", CENTERED)
def test_a_token_the_trainer_gives_no_probability_keeps_everything_finite(kind):
    logits = torch.tensor([[0.0, -INF, 1.0]], dtype=torch.float64, requires_grad=True)
    kept_ids = torch.tensor([[0, 1, 2]])
    q = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64).log()
    own, kept = replayed_logprobs(logits, torch.tensor([1]), kept_ids, torch.ones(1, 3).bool())
    loss, metrics = call(
        own, q[:, 1], torch.ones(1), torch.ones(1).bool(), kind=kind, support=Support(kept, q, True)
    )
    assert_finite(loss, metrics, logits)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("kind", CENTERED)
def test_padding_on_either_side_or_both_changes_nothing(kind, is_exact):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    q = torch.randn(2, 7, generator=generator, dtype=torch.float64).log_softmax(1)
    ids = torch.tensor([[1, 4, 6], [0, 2, 3]])
    gather = replayed_logprobs if is_exact else head_logprobs
    q_kept = q.gather(1, ids)
    if is_exact:
        q_kept = q_kept.log_softmax(1)
    pad, garbage = torch.full((2, 2), -INF, dtype=torch.float64), torch.full((2, 2), -0.3)
    results = []
    for trainer_pad, sampler_pad in ((None, None), (pad, pad), (garbage, pad), (pad, garbage)):
        z = logits.clone().requires_grad_()
        own, trainer = gather(z, ids[:, 1], ids, torch.ones_like(ids).bool())
        sampler = q_kept
        if trainer_pad is not None:
            trainer = torch.cat([trainer, trainer_pad.double()], dim=1)
            sampler = torch.cat([sampler, sampler_pad.double()], dim=1)
        loss, metrics = call(
            own, q_kept[:, 1], torch.tensor([1.0, -0.5]), torch.ones(2).bool(), kind=kind,
            support=Support(trainer, sampler, is_exact),
        )  # fmt: skip
        results.append((loss.item(), torch.autograd.grad(loss, z)[0], metrics))
    for loss, gradient, metrics in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-15)
        assert torch.allclose(gradient, results[0][1], atol=1e-15, rtol=0)
        assert metrics == pytest.approx(results[0][2])


def test_a_slot_of_garbage_beside_padding_never_takes_part():
    trainer = torch.tensor([[-0.5, NAN]], requires_grad=True)
    sampler = torch.tensor([[-0.6, -INF]])
    term = centering_term(Support(trainer, sampler, True), kind="mis", low=0.5, high=5.0)
    assert torch.isfinite(term.sum_T).all()
    assert torch.autograd.grad(term.sum_T.sum(), trainer)[0][0, 1] == 0.0


def test_a_nan_in_a_real_slot_is_seen_and_not_hidden():
    term = centering_term(
        Support(torch.tensor([[-0.5, -1.0]]), torch.tensor([[-0.6, NAN]]), True),
        kind="mis", low=0.5, high=5.0,
    )  # fmt: skip
    assert torch.isnan(term.sum_T).all()


@pytest.mark.parametrize("kind", IMPORTANCE_KINDS)
def test_masked_positions_may_hold_anything(kind):
    trainer = torch.tensor([-1.0, NAN, -INF, -0.5], requires_grad=True)
    sampler = torch.tensor([-1.2, -1.0, NAN, -0.5])
    kept_trainer = torch.tensor([[-1.0, -0.5], [NAN, NAN], [-0.1, NAN], [-0.5, -0.9]])
    kept_sampler = torch.tensor([[-1.2, -0.4], [NAN, -0.1], [NAN, NAN], [-0.5, -0.9]])
    support = Support(kept_trainer, kept_sampler, True) if kind in CENTERED else None
    loss, metrics = call(
        trainer, sampler, torch.tensor([1.0, NAN, 1.0, -1.0]),
        torch.tensor([True, False, False, True]), kind=kind, support=support,
        sequences_T=torch.tensor([0, 0, 1, 1]),
    )  # fmt: skip
    (gradient,) = assert_finite(loss, metrics, trainer)
    assert gradient[[1, 2]].tolist() == [0.0, 0.0]
    assert gradient[0] != 0.0


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("kind", IMPORTANCE_KINDS)
def test_no_policy_token_gives_a_loss_of_zero_with_a_gradient_of_zero(kind, num_tokens):
    trainer = torch.full((num_tokens,), NAN, requires_grad=True)
    slots = torch.zeros(num_tokens, 3)
    loss, metrics = call(
        trainer, torch.zeros(num_tokens), torch.ones(num_tokens), torch.zeros(num_tokens).bool(),
        kind=kind, support=Support(slots, slots, True) if kind in CENTERED else None,
        sequences_T=torch.arange(num_tokens), average="sequences",
        sequence_rule=SequenceRule(mask="product", low=0.5, high=2.0, veto=0.1),
    )  # fmt: skip
    assert loss.item() == 0.0
    assert torch.autograd.grad(loss, trainer)[0].tolist() == [0.0] * num_tokens
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("kind", CENTERED)
def test_a_support_without_slots_centers_nothing(kind):
    own = torch.tensor([-1.0], requires_grad=True)
    nothing = torch.zeros(1, 0)
    losses = [
        call(own, torch.tensor([-1.2]), torch.ones(1), torch.ones(1).bool(), kind=kind, support=s)
        for s in (Support(nothing, nothing, True), None)
    ]
    assert losses[0][0].item() == losses[1][0].item()


@pytest.mark.parametrize("kind", ["none", "tis", "mis", "cispo"])
def test_tails_of_one_in_a_million_and_less_stay_finite(kind):
    # a head that holds everything but e-14: both tails are rounding noise and meet at the floor
    logits = torch.tensor([[0.0, -1.0, -33.0, -95.0]], requires_grad=True)
    own, head = head_logprobs(
        logits, torch.tensor([3]), torch.tensor([[0, 1]]), torch.ones(1, 2).bool()
    )
    sampler = torch.tensor([[-0.4, -1.11]])
    loss, metrics = call(
        own, torch.tensor([-95.0]), torch.ones(1), torch.ones(1).bool(), kind=kind,
        support=Support(head, sampler, False),
    )  # fmt: skip
    assert_finite(loss, metrics, logits)


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("kind", IMPORTANCE_KINDS)
def test_bfloat16_input_gives_the_numbers_of_the_same_values_in_float32(kind, is_exact):
    generator = torch.Generator().manual_seed(0)
    narrow = [
        torch.randn(8, 5, generator=generator).log_softmax(1).bfloat16() for _ in range(2)
    ]  # fmt: skip
    advantages = torch.randn(8, generator=generator).bfloat16()
    results = []
    for cast in (lambda t: t, lambda t: t.float()):
        trainer, sampler = cast(narrow[0]).clone().requires_grad_(), cast(narrow[1])
        loss, metrics = call(
            trainer[:, 0], sampler[:, 0], cast(advantages), torch.ones(8).bool(), kind=kind,
            support=Support(trainer, sampler, is_exact) if kind in CENTERED else None,
            sequences_T=torch.arange(8) // 2,
        )  # fmt: skip
        assert loss.dtype == torch.float32
        results.append((loss.item(), torch.autograd.grad(loss, trainer)[0].float(), metrics))
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    # the gradient is rounded once, into the input's dtype
    assert torch.allclose(results[0][1], results[1][1], rtol=2**-8, atol=1e-6)


def test_float32_is_as_good_as_its_last_digits():
    generator = torch.Generator().manual_seed(4)
    logits = [2 * torch.randn(64, 9, generator=generator, dtype=torch.float64) for _ in range(2)]
    results = []
    for dtype in (torch.float32, torch.float64):
        trainer = logits[0].to(dtype).log_softmax(1).requires_grad_()
        sampler = logits[1].to(dtype).log_softmax(1)
        loss, _ = call(
            trainer[:, 0], sampler[:, 0], torch.ones(64), torch.ones(64).bool(), kind="tis",
            support=Support(trainer, sampler, True),
        )  # fmt: skip
        results.append((loss.item(), torch.autograd.grad(loss, trainer)[0].double()))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    assert torch.allclose(results[0][1], results[1][1], atol=1e-7)


def test_kept_slots_are_found_beside_infinite_and_damaged_values():
    assert kept_mask(torch.tensor([[NAN, -INF, -1e30, 0.0]])).tolist() == [
        [True, False, True, True]
    ]
