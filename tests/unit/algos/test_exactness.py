"""Properties of the loss for any p and q in float64, written independently of the code under test.

Expectations under q are summed exactly over every token that the sampler could have drawn.
"""

# V vocabulary, K candidates (the kept set S or a head H)

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rlmix.algos.corrections import SEQUENCE_KINDS
from rlmix.algos.losses import policy_loss
from rlmix.algos.sequence_masks import SequenceRule
from rlmix.algos.support import Support, head_logprobs, replayed_logprobs

KINDS = {
    "none": (0.5, 5.0, lambda r: torch.ones_like(r)),
    "tis": (0.0, 2.0, lambda r: torch.minimum(r, torch.full_like(r, 2.0))),
    "mis": (0.5, 5.0, lambda r: torch.where((r >= 0.5) & (r <= 5.0), r, torch.zeros_like(r))),
    "cispo": (0.8, 1.2, lambda r: torch.minimum(torch.maximum(r, r * 0 + 0.8), r * 0 + 1.2)),
}
"""Kind -> low, high, and the textbook f(r)."""

TOLERANCE = {"atol": 1e-12, "rtol": 0}
QUICK = settings(max_examples=120, deadline=None, derandomize=True)


class Prefix:
    """One random position: trainer logits over V, a sampler on a subset S of them."""

    def __init__(self, seed, vocab, kept, spread):
        generator = torch.Generator().manual_seed(seed)

        def draw(count):
            return torch.randn(count, generator=generator, dtype=torch.float64)

        self.logits_V = spread * draw(vocab)
        self.ids_K = torch.randperm(vocab, generator=generator)[:kept]
        self.q_K = (spread * draw(kept)).softmax(0)
        self.p_K = self.logits_V[self.ids_K].softmax(0)
        self.advantages_K = draw(kept)
        # gradient of log p^S of each candidate in the logits: 0 outside S
        self.scores_KV = torch.zeros(kept, vocab, dtype=torch.float64)
        self.scores_KV[:, self.ids_K] = torch.eye(kept, dtype=torch.float64) - self.p_K

    def gradients(self, kind, advantages_K, *, centering=True, bounds=None):
        """dloss/dlogits [K, V] when each candidate in turn is the sampled one."""
        low, high = bounds or KINDS[kind][:2]
        count = len(self.ids_K)
        z_KV = self.logits_V.expand(count, -1).clone().requires_grad_()
        kept_ids_KK = self.ids_K.expand(count, -1)
        trainer_K, trainer_KK = replayed_logprobs(
            z_KV, self.ids_K, kept_ids_KK, torch.ones_like(kept_ids_KK, dtype=torch.bool)
        )
        support = Support(trainer_KK, self.q_K.log().expand(count, -1), True)
        loss, _ = policy_loss(
            trainer_K,
            self.q_K.log(),
            advantages_K,
            torch.ones(count, dtype=torch.bool),
            importance=kind,
            low=low,
            high=high,
            denominator=1,
            centering=centering,
            support=support if centering else None,
        )
        return torch.autograd.grad(loss, z_KV)[0]

    def push(self, kind, advantages_K, **changes):
        """E_q[-dloss/dlogits], summed over S."""
        return -(self.q_K[:, None] * self.gradients(kind, advantages_K, **changes)).sum(0)


@st.composite
def prefixes(draw, min_kept=2):
    vocab = draw(st.integers(min_kept, 9))
    return Prefix(
        seed=draw(st.integers(0, 2**31)),
        vocab=vocab,
        kept=draw(st.integers(min_kept, vocab)),
        spread=draw(st.sampled_from([0.1, 1.0, 2.0, 4.0])),
    )


@QUICK
@given(prefix=prefixes(), kind=st.sampled_from(sorted(KINDS)))
def test_expected_push_is_the_covariance_of_advantage_and_weighted_score(prefix, kind):
    q_K1, weights_K = prefix.q_K[:, None], KINDS[kind][2](prefix.p_K / prefix.q_K)
    weighted_KV = weights_K[:, None] * prefix.scores_KV
    mean_advantage = (prefix.q_K * prefix.advantages_K).sum()
    mean_score_V = (q_K1 * weighted_KV).sum(0)
    product_V = (q_K1 * prefix.advantages_K[:, None] * weighted_KV).sum(0)
    covariance_V = product_V - mean_advantage * mean_score_V
    push_V = prefix.push(kind, prefix.advantages_K)
    assert torch.allclose(push_V, covariance_V, **TOLERANCE)


@QUICK
@given(prefix=prefixes(), kind=st.sampled_from(sorted(KINDS)))
def test_a_constant_advantage_pushes_nowhere_and_moves_no_other_push(prefix, kind):
    constant = torch.full_like(prefix.advantages_K, 3.0)
    assert prefix.push(kind, constant).abs().max() <= 1e-12
    moved = prefix.push(kind, prefix.advantages_K + 3.0)
    assert torch.allclose(moved, prefix.push(kind, prefix.advantages_K), **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_without_centering_a_constant_advantage_does_push(kind):
    prefix = Prefix(seed=1, vocab=7, kept=7, spread=1.5)
    constant = torch.full_like(prefix.advantages_K, 3.0)
    assert prefix.push(kind, constant, centering=False).abs().max() > 1e-2


@QUICK
@given(prefix=prefixes(min_kept=1), kind=st.sampled_from(sorted(KINDS)))
def test_autograd_equals_the_closed_form_in_the_logits(prefix, kind):
    # -A (w_a s_a - sum_v q_v w_v s_v), and exactly 0 outside the kept set
    weights_K1 = KINDS[kind][2](prefix.p_K / prefix.q_K)[:, None]
    mean_V = (prefix.q_K[:, None] * weights_K1 * prefix.scores_KV).sum(0)
    closed_KV = -prefix.advantages_K[:, None] * (weights_K1 * prefix.scores_KV - mean_V)
    ours_KV = prefix.gradients(kind, prefix.advantages_K)
    assert torch.allclose(ours_KV, closed_KV, **TOLERANCE)
    outside = torch.ones_like(prefix.logits_V, dtype=torch.bool)
    outside[prefix.ids_K] = False
    assert ours_KV[:, outside].count_nonzero() == 0


@QUICK
@given(prefix=prefixes(), kind=st.sampled_from(sorted(KINDS)), centering=st.booleans())
def test_equal_policies_give_the_plain_policy_gradient(prefix, kind, centering):
    prefix.q_K = prefix.p_K
    reinforce_KV = -prefix.advantages_K[:, None] * prefix.scores_KV
    ours_KV = prefix.gradients(kind, prefix.advantages_K, centering=centering)
    assert torch.allclose(ours_KV, reinforce_KV, **TOLERANCE)


@QUICK
@given(prefix=prefixes())
def test_untruncated_weights_need_no_centering(prefix):
    everything = (0.0, math.inf)
    centred = prefix.push("tis", prefix.advantages_K, bounds=everything)
    plain = prefix.push("tis", prefix.advantages_K, centering=False, bounds=everything)
    assert torch.allclose(centred, plain, atol=1e-10, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_set_of_one_teaches_nothing(kind):
    prefix = Prefix(seed=3, vocab=5, kept=1, spread=2.0)
    assert prefix.gradients(kind, torch.ones(1)).abs().max() <= 1e-15


@QUICK
@given(prefix=prefixes(min_kept=4), kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_head_form_equals_the_dense_form_with_the_modelled_tail_written_out(prefix, kind, data):
    vocab = len(prefix.logits_V)
    p_V = prefix.logits_V.softmax(0)
    generator = torch.Generator().manual_seed(vocab)
    noise_V = torch.randn(vocab, generator=generator, dtype=torch.float64)
    q_V = (prefix.logits_V + noise_V).softmax(0)
    head = prefix.ids_K[: data.draw(st.integers(1, min(len(prefix.ids_K), vocab - 1)))]
    outside = torch.ones(vocab, dtype=torch.bool)
    outside[head] = False
    # smaller tails meet the floor
    assume(min(q_V[outside].sum(), p_V[outside].sum()) > 1e-5)
    rho = q_V[outside].sum() / p_V[outside].sum()
    q_hat_V = torch.where(outside, rho * p_V, q_V)
    assert q_hat_V.sum().item() == pytest.approx(1.0)
    weight = KINDS[kind][2]
    scores_VV = torch.eye(vocab, dtype=torch.float64) - p_V
    mean_V = ((q_hat_V * weight(p_V / q_hat_V))[:, None] * scores_VV).sum(0)
    # every token in turn, inside the head and outside: its own weight is of its true ratio
    own_V = weight(p_V / q_V)
    dense_VV = -1.7 * (own_V[:, None] * scores_VV - mean_V)
    z_VV = prefix.logits_V.expand(vocab, -1).clone().requires_grad_()
    head_ids = head.expand(vocab, -1)
    trainer_V, trainer_VK = head_logprobs(
        z_VV, torch.arange(vocab), head_ids, torch.ones_like(head_ids, dtype=torch.bool)
    )
    low, high = KINDS[kind][:2]
    loss, metrics = policy_loss(
        trainer_V, q_V.log(), torch.full((vocab,), 1.7, dtype=torch.float64),
        torch.ones(vocab, dtype=torch.bool), importance=kind, low=low, high=high, denominator=1,
        centering=True, support=Support(trainer_VK, q_V.log()[head].expand(vocab, -1), False),
    )  # fmt: skip
    assert metrics["correction/sc_tail_ratio"] == pytest.approx(rho.item(), rel=1e-9)
    assert torch.allclose(torch.autograd.grad(loss, z_VV)[0], dense_VV, atol=1e-11, rtol=0)


class Batch:
    """Whole sequences of random tokens, with a linear softmax policy of six parameters."""

    def __init__(self, seed, lengths, kind, mask, average, veto):
        generator = torch.Generator().manual_seed(seed)
        count, slots = sum(lengths), 5

        def draw(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.parameters = draw(3, slots)
        self.features_TF = draw(count, 3)
        self.q_TK = draw(count, slots).log_softmax(1)
        self.ids_T = torch.randint(slots, (count,), generator=generator)
        self.sequences_T = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        self.advantages_T = draw(len(lengths))[self.sequences_T]
        self.mask_T = torch.rand(count, generator=generator) < 0.8
        self.mask_T |= self.sequences_T != self.sequences_T.roll(1)  # one policy token at least
        self.mask_T[0] = True
        self.average = average
        self.settings = {
            "importance": kind,
            "low": 0.7,
            "high": 1.6,
            "centering": kind not in ("ppo", *SEQUENCE_KINDS),
            "average": average,
            "sequence_rule": SequenceRule(mask=mask, low=0.6, high=1.2, veto=veto),
            "denominator": float(len(lengths) if average == "sequences" else self.mask_T.sum()),
        }

    def run(self, parts):
        """Loss and gradient, summed over micro-batches of whole sequences."""
        weights = self.parameters.clone().requires_grad_()
        total = torch.zeros((), dtype=torch.float64)
        for part in parts:
            chosen = torch.isin(self.sequences_T, torch.tensor(part))
            logprobs = (self.features_TF[chosen] @ weights).log_softmax(1)
            ids = self.ids_T[chosen, None]
            loss, _ = policy_loss(
                logprobs.gather(1, ids)[:, 0],
                self.q_TK[chosen].gather(1, ids)[:, 0],
                self.advantages_T[chosen],
                self.mask_T[chosen],
                support=Support(logprobs, self.q_TK[chosen], True),
                sequences_T=self.sequences_T[chosen],
                **self.settings,
            )
            total = total + loss
        return total.item(), torch.autograd.grad(total, weights)[0]


@QUICK
@given(
    seed=st.integers(0, 2**31),
    lengths=st.lists(st.integers(1, 6), min_size=2, max_size=7),
    kind=st.sampled_from(["none", "tis", "mis", "cispo", "ppo", "gspo", "seq_tis"]),
    mask=st.sampled_from(["none", "product", "geometric", "k3", "opsm"]),
    average=st.sampled_from(["tokens", "sequences"]),
    veto=st.sampled_from([0.0, 0.3]),
    data=st.data(),
)
def test_any_split_of_a_batch_gives_the_same_loss_and_gradient(
    seed, lengths, kind, mask, average, veto, data
):
    batch = Batch(seed, lengths, kind, mask, average, veto)
    whole_loss, whole_gradient = batch.run([list(range(len(lengths)))])
    places = data.draw(
        st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)), label="places"
    )
    parts = [[i for i, place in enumerate(places) if place == name] for name in set(places)]
    loss, gradient = batch.run(parts)
    assert loss == pytest.approx(whole_loss, abs=1e-12)
    assert torch.allclose(gradient, whole_gradient, **TOLERANCE)
