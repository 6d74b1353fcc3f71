"""Rules about whole sequences on the two of docs/algorithms.md: ratios 1.25 1 .5 and 1 3 1."""

import math

import pytest
import torch

from rlmix.algos.corrections import importance_weights
from rlmix.algos.losses import policy_loss
from rlmix.algos.sequence_masks import (
    SequenceRule,
    dropped_metrics,
    dropped_sequences,
    geometric_mask,
    k3_mask,
    off_policy_mask,
    product_mask,
    veto_mask,
)
from rlmix.algos.sequences import sequence_length, sequence_mean, sequence_min, sequence_sum
from rlmix.algos.support import Support
from tests.unit.algos.docs_page import four_tokens

TRAINER = torch.tensor([0.5, 0.25, 0.1, 0.3, 0.3, 0.3], dtype=torch.float64).log()
SAMPLER = torch.tensor([0.4, 0.25, 0.2, 0.3, 0.1, 0.3], dtype=torch.float64).log()
D = TRAINER - SAMPLER
SEQUENCES = torch.tensor([4, 4, 4, 9, 9, 9])
ADVANTAGES = torch.tensor([-1.0] * 6, dtype=torch.float64)
FIRST, SECOND, NEITHER = [True] * 3 + [False] * 3, [False] * 3 + [True] * 3, [False] * 6


def rule(mask="none", *, low=0.5, high=2.0, veto=0.0):
    return SequenceRule(mask=mask, low=low, high=high, veto=veto)


def loss_of(trainer, *, advantages=ADVANTAGES, importance="mis", denominator=6.0, **changes):
    settings = {"low": 0.1, "high": 9.0, "centering": False, "sequences_T": SEQUENCES} | changes
    return policy_loss(
        trainer,
        SAMPLER,
        advantages,
        torch.ones(6, dtype=torch.bool),
        importance=importance,
        denominator=denominator,
        **settings,
    )


def test_products_and_geometric_means_of_both_sequences():
    assert sequence_sum(D, SEQUENCES).exp().tolist() == pytest.approx([0.625] * 3 + [3.0] * 3)
    means = sequence_mean(D, SEQUENCES).exp().tolist()
    assert means == pytest.approx([0.854988] * 3 + [1.442250] * 3, abs=1e-6)
    assert sequence_min(D, SEQUENCES).exp().tolist() == pytest.approx([0.5] * 3 + [1.0] * 3)
    assert sequence_length(torch.tensor([7, 2, 7])).tolist() == [2, 1, 2]


def test_sums_do_not_depend_on_the_order_of_tokens_even_in_float32():
    values = torch.tensor([1e8, 1.0, -1e8, 1.0])
    sequences = torch.zeros(4, dtype=torch.int64)
    assert sequence_sum(values, sequences).tolist() == [2.0] * 4
    assert sequence_sum(values[[0, 2, 1, 3]], sequences).tolist() == [2.0] * 4
    assert sequence_sum(values, sequences).dtype == torch.float32


def test_product_mask_keeps_the_first_and_drops_the_second():
    assert product_mask(D, SEQUENCES, low=0.0, high=2.0).tolist() == SECOND
    assert product_mask(D, SEQUENCES, low=0.625, high=3.0).tolist() == NEITHER  # inclusive
    assert product_mask(D, SEQUENCES, low=0.63, high=3.0).tolist() == FIRST


def test_a_product_of_a_thousand_tokens_neither_overflows_nor_underflows():
    sequences = torch.arange(2).repeat_interleave(1000)
    d = torch.cat([torch.full((1000,), 5.0), torch.full((1000,), -5.0)])
    assert product_mask(d, sequences, low=0.5, high=2.0).all()
    weights, _ = importance_weights(
        d, torch.zeros(2000), kind="seq_tis", low=0.0, high=2.0, sequences_T=sequences
    )
    assert weights[:1000].tolist() == [2.0] * 1000
    assert weights[1000:].tolist() == pytest.approx([math.exp(-20)] * 1000, rel=1e-5)


def test_geometric_mask_acts_on_the_ratio_per_token():
    assert geometric_mask(D, SEQUENCES, low=0.8, high=1.4).tolist() == SECOND
    assert geometric_mask(D, SEQUENCES, low=0.9, high=1.5).tolist() == FIRST


def test_k3_mask_adds_up_deviations_of_both_signs():
    # mean(r - 1 - log r): (.026856 + 0 + .193147) / 3 = .073335 and .901388 / 3 = .300463
    assert k3_mask(D, SEQUENCES, high=0.1).tolist() == SECOND
    assert k3_mask(D, SEQUENCES, high=0.0733).tolist() == [True] * 6
    assert k3_mask(D, SEQUENCES, high=0.301).tolist() == NEITHER
    # ratios 4 and 1/4 cancel in the geometric mean, not here
    opposite, one = torch.tensor([4.0, 0.25]).log(), torch.zeros(2, dtype=torch.int64)
    assert not geometric_mask(opposite, one, low=0.999, high=1.001).any()
    assert k3_mask(opposite, one, high=0.1).all()


def test_off_policy_mask_drops_bad_sequences_that_the_trainer_finds_unlikely():
    # mean of -d: .156668 and -.366204
    drop = off_policy_mask(D, SEQUENCES, advantages_T=ADVANTAGES, high=0.1)
    assert drop.tolist() == FIRST
    assert off_policy_mask(D, SEQUENCES, advantages_T=ADVANTAGES, high=0.16).tolist() == NEITHER
    assert not off_policy_mask(D, SEQUENCES, advantages_T=-ADVANTAGES, high=0.1).any()
    assert not off_policy_mask(D, SEQUENCES, advantages_T=0 * ADVANTAGES, high=0.1).any()


def test_one_impossible_token_vetoes_its_whole_sequence():
    assert veto_mask(D, SEQUENCES, ratio=0.6).tolist() == FIRST
    assert veto_mask(D, SEQUENCES, ratio=0.5).tolist() == NEITHER  # not below
    assert veto_mask(torch.full((6,), -math.inf), SEQUENCES, ratio=0.0).tolist() == NEITHER
    hostile = torch.tensor([0.0, -math.inf, 0.0, 0.0, 0.0, 0.0])
    assert veto_mask(hostile, SEQUENCES, ratio=1e-4).tolist() == FIRST


def test_sequence_mis_weighs_the_first_with_its_product_and_drops_the_second():
    trainer = TRAINER.clone().requires_grad_()
    loss, metrics = loss_of(
        trainer, importance="seq_tis", low=0.0, high=2.0, sequence_rule=rule("product", low=0.0)
    )
    # weight .625 on each of the first three scores, A = -1, six tokens
    assert loss.item() == pytest.approx(0.625 * TRAINER[:3].sum().item() / 6)
    (gradient,) = torch.autograd.grad(loss, trainer)
    assert gradient.tolist() == pytest.approx([0.625 / 6] * 3 + [0.0] * 3)
    assert metrics["correction/sequence_masked_frac"] == pytest.approx(0.5)
    assert metrics["correction/veto_frac"] == 0.0
    assert metrics["correction/masked_frac"] == 0.5


def test_sequence_tis_caps_the_product():
    weights, metrics = importance_weights(
        TRAINER, SAMPLER, kind="seq_tis", low=9.0, high=2.0, sequences_T=SEQUENCES
    )
    assert weights.tolist() == pytest.approx([0.625] * 3 + [2.0] * 3)
    assert metrics["correction/outside_frac"] == 0.5
    assert metrics["correction/ratio_mean"] == pytest.approx(7.75 / 6)


def test_a_dropped_sequence_loses_its_centering_term_and_keeps_its_tokens_in_the_denominator():
    logits = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q = torch.full((6, 4), 0.25, dtype=torch.float64).log()

    def gradient(**changes):
        z = logits.clone().requires_grad_()
        logprobs = z.log_softmax(1)
        loss, metrics = loss_of(
            logprobs[:, 0], centering=True, support=Support(logprobs, q, True), **changes
        )
        return torch.autograd.grad(loss, z)[0], metrics

    whole, _ = gradient()
    # the trainer's own d decides: veto the first sequence through its least likely token
    d = logits.log_softmax(1)[:, 0] - SAMPLER
    least = [d[:3].min().exp().item(), d[3:].min().exp().item()]
    dropped, metrics = gradient(sequence_rule=rule(veto=min(0.99, sum(least) / 2)))
    gone, stays = (slice(0, 3), slice(3, 6)) if least[0] < least[1] else (slice(3, 6), slice(0, 3))
    assert dropped[gone].abs().max() == 0.0
    assert whole[gone].abs().max() > 0
    assert torch.equal(dropped[stays], whole[stays])
    assert metrics["correction/veto_frac"] == pytest.approx(0.5)


def test_dropping_by_the_sampled_token_gives_up_the_exact_expectation():
    # sequences of one token; the veto drops D (ratio .11), so a constant A = 1 pushes by
    # -q_D (s_D - mu) with s_D = e_D - p and mu = q - p, which is -q_D (e_D - q)
    p, q, _ = four_tokens()
    z = p.log().expand(4, -1).clone().requires_grad_()
    logprobs = z.log_softmax(1)
    loss, _ = policy_loss(
        logprobs.diagonal(), q.log(), torch.ones(4), torch.ones(4).bool(), importance="none",
        low=0.5, high=5.0, denominator=1, centering=True,
        support=Support(logprobs, q.log().expand(4, -1), True), sequences_T=torch.arange(4),
        sequence_rule=rule(veto=0.2),
    )  # fmt: skip
    push = -(q[:, None] * torch.autograd.grad(loss, z)[0]).sum(0)
    e_d = torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert push.tolist() == pytest.approx((-q[3] * (e_d - q)).tolist(), abs=1e-12)


def test_mean_over_sequences_counts_a_long_and_a_short_one_the_same():
    sequences = torch.tensor([0, 1, 1, 1, 1, 1])
    trainer = torch.zeros(6, dtype=torch.float64, requires_grad=True)
    loss, _ = loss_of(
        trainer, importance="none", average="sequences", denominator=2.0, sequences_T=sequences
    )
    (gradient,) = torch.autograd.grad(loss, trainer)
    # A = -1: the first sequence's token has 1/2, the others' 1/2 * 1/5 each
    assert gradient.tolist() == pytest.approx([0.5] + [0.1] * 5)


def test_gspo_over_sequences_is_the_papers_objective():
    advantages = torch.tensor([1.0] * 3 + [-1.0] * 3, dtype=torch.float64)
    trainer = TRAINER.clone().requires_grad_()
    loss, _ = loss_of(
        trainer, advantages=advantages, importance="gspo", low=0.8, high=1.3,
        average="sequences", denominator=2.0,
    )  # fmt: skip
    theirs = TRAINER.clone().requires_grad_()
    ratios = torch.stack([(theirs - SAMPLER)[:3].mean().exp(), (theirs - SAMPLER)[3:].mean().exp()])
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64)
    paper = -torch.minimum(ratios * signs, ratios.clamp(0.8, 1.3) * signs).mean()
    assert loss.item() == pytest.approx(paper.item(), abs=1e-12)
    ours = torch.autograd.grad(loss, trainer)[0]
    assert torch.allclose(ours, torch.autograd.grad(paper, theirs)[0], atol=1e-12, rtol=0)


def test_shares_are_of_sequences_not_of_tokens():
    sequences = torch.tensor([0, 1, 1, 1])
    d = torch.tensor([3.0, 0.0, 0.0, 0.0])
    dropped = dropped_sequences(d, torch.ones(4), sequences, rule=rule("product"))
    assert dropped_metrics(dropped, sequences)["correction/sequence_masked_frac"] == 0.5
    nothing = torch.zeros(0, dtype=torch.int64)
    empty = dropped_sequences(torch.zeros(0), torch.zeros(0), nothing, rule=rule("k3", veto=0.1))
    assert set(dropped_metrics(empty, nothing).values()) == {0.0}


def test_wrong_rules_are_refused_with_what_is_allowed():
    with pytest.raises(ValueError, match="mask='geo' is unknown; use one of none, product"):
        rule("geo")
    with pytest.raises(ValueError, match="0 <= low <= high"):
        rule("geometric", low=3.0)
    with pytest.raises(ValueError, match="0 <= veto < 1"):
        rule(veto=1.0)
    with pytest.raises(ValueError, match="got no sequences_T"):
        loss_of(TRAINER, sequences_T=None, sequence_rule=rule("product"))
    with pytest.raises(ValueError, match="got no sequences_T"):
        loss_of(TRAINER, sequences_T=None, average="sequences")
    with pytest.raises(ValueError, match="average='prompts' is unknown; use one of tokens"):
        loss_of(TRAINER, average="prompts")
    loss_of(TRAINER, sequences_T=None, sequence_rule=rule())  # off: needs nothing
