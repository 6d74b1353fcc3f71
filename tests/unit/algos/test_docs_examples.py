"""Every table with numbers in docs/algorithms.md, recomputed by the code it describes."""

import math

import pytest
import torch

from rlmix.algos.advantages import group_advantages
from rlmix.algos.corrections import (
    applied_weights,
    centering_term,
    effective_sample_frac,
    importance_weights,
)
from rlmix.algos.losses import policy_loss
from rlmix.algos.sequence_masks import SequenceRule, dropped_sequences
from rlmix.algos.sequences import sequence_mean, sequence_sum
from rlmix.algos.support import Support, full_logprobs, head_logprobs, replayed_logprobs
from rlmix.engine.sampling import sample_truncated
from tests.unit.algos.docs_page import four_tokens, numbers, table, two_sequences

P, Q, VALUE = four_tokens()
BOUNDS = {"none": (0.5, 5.0), "tis": (0.0, 2.0), "mis": (0.5, 5.0)}
EXACT = {"abs": 5e-7}
"""The page shows six digits after the point."""
MU, ALPHA = "\N{GREEK SMALL LETTER MU}", "\N{GREEK SMALL LETTER ALPHA}"


def gradients(kind, sampled, advantages, *, centering=True, head=None):
    """Loss of each sampled token and its gradient in the logits, [N] and [N, 4]."""
    low, high = BOUNDS[kind]
    losses, grads = [], []
    for token, advantage in zip(sampled, advantages, strict=True):
        z = P.log()[None].clone().requires_grad_()
        ids = torch.tensor([token])
        kept_ids = torch.tensor([[0, 1, 2, 3] if head is None else head])
        gather = replayed_logprobs if head is None else head_logprobs
        trainer, kept = gather(z, ids, kept_ids, torch.ones_like(kept_ids, dtype=torch.bool))
        loss, _ = policy_loss(
            trainer,
            Q.log()[ids],
            torch.tensor([advantage], dtype=torch.float64),
            torch.ones(1, dtype=torch.bool),
            importance=kind,
            low=low,
            high=high,
            denominator=1,
            centering=centering,
            support=Support(kept, Q.log()[kept_ids], head is None) if centering else None,
        )
        losses.append(loss.item())
        grads.append(torch.autograd.grad(loss, z)[0][0])
    return losses, torch.stack(grads)


def push(kind, advantages, **settings):
    """Expected push on the logits, summed exactly over the four tokens."""
    _, grads = gradients(kind, range(4), advantages.tolist(), **settings)
    return -(Q[:, None] * grads).sum(0)


def test_ratios_and_divergences_of_the_example():
    rows = {row[0]: row[1:] for row in table("token", "A", "B", "C", "D")}
    assert (P / Q).tolist() == pytest.approx([float(cell) for cell in rows["r"]], **EXACT)
    assert float((Q * (Q / P).log()).sum()) == pytest.approx(0.256438, **EXACT)
    assert float((P * (P / Q).log()).sum()) == pytest.approx(0.139070, **EXACT)
    assert float((P**2 / Q).sum() - 1) == pytest.approx(0.193056, **EXACT)
    # the share of effective samples under q: each token as often as q has it, in hundredths
    copies = (P / Q).repeat_interleave((100 * Q).round().long())
    assert effective_sample_frac(copies) == pytest.approx(0.838184, **EXACT)


@pytest.mark.parametrize("row", table("sampled, A", "f"), ids=lambda row: " ".join(row[:2]))
def test_loss_and_gradient_of_one_sampled_token(row):
    token, advantage = row[0].split(", ")
    (loss,), grads = gradients(row[1], ["ABCD".index(token)], numbers(advantage))
    assert loss == pytest.approx(numbers(row[2])[0], **EXACT)
    assert grads[0].tolist() == pytest.approx(numbers(row[3]), **EXACT)


def test_weights_of_tis_and_mis():
    rows = [[float(cell) for cell in row] for row in table("r", "TIS, cap 2")]
    log_ratios = torch.tensor([row[0] for row in rows], dtype=torch.float64).log()
    for column, kind in ((1, "tis"), (2, "mis")):
        low, high = BOUNDS[kind]
        weights, metrics = importance_weights(
            log_ratios, torch.zeros_like(log_ratios), kind=kind, low=low, high=high
        )
        expected = [row[column] for row in rows]
        assert weights.tolist() == pytest.approx(expected, abs=1e-12)
        assert metrics["correction/masked_frac"] == pytest.approx(expected.count(0) / len(rows))


def test_ppo_weighs_a_ratio_of_1_3_by_the_sign_of_the_advantage():
    ratios = torch.tensor([1.3, 1.3], dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    weights = applied_weights(ratios.log(), kind="ppo", low=0.8, high=1.2, advantages_T=signs)
    assert weights.tolist() == pytest.approx([0.0, 1.3])


@pytest.mark.parametrize("row", table("f", "without", "with centering"), ids=lambda row: row[0])
def test_expected_push_without_and_with_centering(row):
    plain = push(row[0], VALUE, centering=False)
    assert plain.tolist() == pytest.approx(numbers(row[1]), abs=1e-12)
    assert push(row[0], VALUE).tolist() == pytest.approx(numbers(row[2]), abs=1e-12)


@pytest.mark.parametrize("row", table("f", "m", MU), ids=lambda row: row[0])
def test_what_centering_takes_away_is_what_a_constant_advantage_would_push(row):
    kind, (low, high) = row[0], BOUNDS[row[0]]
    mass, mu = torch.tensor(numbers(row[1]), dtype=torch.float64), numbers(row[2])
    z = P.log()[None].clone().requires_grad_()
    support = Support(z.log_softmax(1), Q.log()[None], True)
    term = centering_term(support, kind=kind, low=low, high=high)
    # the term's value is sum of m log p, its gradient mu, its size the L1 norm of mu
    assert term.sum_T.item() == pytest.approx(float((mass * P.log()).sum()), abs=1e-12)
    assert torch.autograd.grad(term.sum_T.sum(), z)[0][0].tolist() == pytest.approx(mu, abs=1e-12)
    assert term.coeff_l1_T.item() == pytest.approx(sum(map(abs, mu)), abs=1e-12)
    # adding 1 to every value moves the plain push by mu and the centered one not at all
    moved = push(kind, VALUE + 1, centering=False) - push(kind, VALUE, centering=False)
    assert moved.tolist() == pytest.approx(mu, abs=1e-12)
    assert torch.allclose(push(kind, VALUE + 1), push(kind, VALUE), atol=1e-12, rtol=0)


@pytest.mark.parametrize("row", table("f", ALPHA), ids=lambda row: row[0])
def test_a_head_of_two_models_the_tail_and_can_hide_a_masked_token(row):
    kind, (low, high) = row[0], BOUNDS[row[0]]
    alpha, coefficients = numbers(row[1])[0], numbers(row[2])
    z = P.log()[None].clone().requires_grad_()
    support = Support(z.log_softmax(1)[:, :2], Q.log()[None, :2], False)
    term = centering_term(support, kind=kind, low=low, high=high)
    assert term.tail_ratio_T.item() == pytest.approx(2.0)
    # c = q f(p/q) - alpha p on the head, with m = (.6, .25) for the truncated kinds
    mass = Q[:2] if kind == "none" else P[:2]
    assert (mass - alpha * P[:2]).tolist() == pytest.approx(coefficients, abs=1e-12)
    expected = sum(c * math.log(p) for c, p in zip(coefficients, P[:2].tolist(), strict=True))
    assert term.sum_T.item() == pytest.approx(expected, abs=1e-12)
    mu = torch.autograd.grad(term.sum_T.sum(), z)[0][0].tolist()
    assert mu == pytest.approx(numbers(row[3]), abs=1e-12)
    assert term.coeff_l1_T.item() == pytest.approx(sum(map(abs, mu)), abs=1e-12)


def test_replay_renormalises_both_sides_on_the_kept_set():
    rows = {row[0]: [float(c.replace("\N{MINUS SIGN}", "-")) for c in row[1:]]
            for row in table("S = {A, B}", "A", "B")}  # fmt: skip
    q_kept = (Q[:2] / Q[:2].sum()).log()[None]
    assert q_kept.exp()[0].tolist() == pytest.approx(rows["q^S"], **EXACT)
    z = P.log()[None].clone().requires_grad_()
    kept_ids = torch.tensor([[0, 1]])
    sampled, kept = replayed_logprobs(z, torch.tensor([0]), kept_ids, torch.ones(1, 2).bool())
    assert kept.exp()[0].tolist() == pytest.approx(rows["p^S"], **EXACT)
    assert (kept - q_kept).exp()[0].tolist() == pytest.approx(rows["r"], **EXACT)
    term = centering_term(Support(kept, q_kept, True), kind="none", low=0.5, high=5.0)
    mu = torch.autograd.grad(term.sum_T.sum(), z)[0][0]
    assert mu[:2].tolist() == pytest.approx(rows[f"{MU}, f = 1"], **EXACT)
    assert mu[2:].tolist() == [0.0, 0.0]
    # without replay: too small by the trainer's mass on S
    plain = full_logprobs(z, torch.tensor([0]))
    assert (plain - sampled).exp().item() == pytest.approx(0.85)


@pytest.mark.parametrize(("top_p", "kept"), [(0.7, [0, 1]), (0.9, [0, 1, 2, 3])])
def test_the_engine_keeps_the_smallest_set_that_holds_top_p(top_p, kept):
    logits_BV = Q.log()[None].float().numpy()
    _, sets = sample_truncated(
        logits_BV,
        logprobs_BV=logits_BV,
        temperatures_B=torch.ones(1, dtype=torch.float64).numpy(),
        top_ps_B=torch.tensor([top_p], dtype=torch.float64).numpy(),
        top_ks_B=torch.tensor([4]).numpy(),
        uniforms_B=torch.tensor([0.5], dtype=torch.float64).numpy(),
    )
    assert sorted(sets.ids_M.tolist()) == kept


def test_ratios_of_two_whole_sequences():
    log_ratios, ids = two_sequences()
    rows = [[numbers(cell)[0] for cell in row[2:]] for row in table("sequence", "r")]
    k3 = torch.expm1(log_ratios) - log_ratios
    first = [0, 3]
    columns = (
        sequence_sum(log_ratios, ids).exp(),
        sequence_mean(log_ratios, ids).exp(),
        sequence_mean(k3, ids),
        -sequence_mean(log_ratios, ids),
    )
    for column, values in enumerate(columns):
        assert values[first].tolist() == pytest.approx([row[column] for row in rows], **EXACT)


@pytest.mark.parametrize("row", table("mask", "drops a session when"), ids=lambda row: row[0])
def test_masks_drop_the_sequences_that_the_page_names(row):
    log_ratios, ids = two_sequences()
    *below, high = numbers(row[3])
    low = below[0] if below else 0.0
    rule = SequenceRule(mask=row[0], low=low, high=high, veto=0.0)
    dropped = dropped_sequences(log_ratios, -torch.ones(6), ids, rule=rule)
    named = {int(number) - 1 for number in numbers(row[4])}
    assert set(ids[dropped.masked_T].tolist()) == named
    assert not dropped.vetoed_T.any()


def test_the_veto_of_the_page():
    log_ratios, ids = two_sequences()
    for ratio, expected in ((0.6, {0}), (0.5, set())):
        rule = SequenceRule(mask="none", low=0.0, high=1.0, veto=ratio)
        dropped = dropped_sequences(log_ratios, torch.ones(6), ids, rule=rule)
        assert set(ids[dropped.any_T].tolist()) == expected


@pytest.mark.parametrize("row", table("rewards", "baseline, scale"), ids=lambda row: "-".join(row))
def test_advantages_of_a_group(row):
    baseline, scale = row[1].split(", ")
    rewards = torch.tensor(numbers(row[0]), dtype=torch.float64)
    advantages = group_advantages(rewards, scale=scale, baseline=baseline)
    assert advantages.tolist() == pytest.approx(numbers(row[2]), abs=5e-6)
