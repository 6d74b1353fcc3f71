"""Blocks of tokens by ids against the whole [tokens, vocabulary] tensor in float64.

Bounds: float64 1e-10 of the largest entry; BF16 parameters in float32 arithmetic 1e-5 for loss and
entropy, and one rounding to BF16 (2^-8) for gradients.
"""

import copy
import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmix.algos.chunked_head import head_scores
from rlmix.algos.losses import token_terms
from rlmix.algos.support import (
    Support,
    entropy,
    full_logprobs,
    head_logprobs,
    kept_mask,
    on_kept_set,
    on_vocabulary,
    replayed_logprobs,
)

TEMPERATURE = 0.8
KINDS = ("none", "tis", "mis", "cispo", "ppo", "gspo", "seq_tis")
CENTERED = ("none", "tis", "mis", "cispo")
SUPPORTS = ("kept", "head", "absent")


class Case:
    """Hidden states, a head with bias, and what a sampler recorded near that policy."""

    def __init__(self, *, seed, tokens, vocab, slots, support):
        make = torch.Generator().manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=make, dtype=torch.float64)

        self.support = support
        self.leaves = {"hidden": normal(tokens, 6), "head": normal(vocab, 6), "bias": normal(vocab)}
        self.sampled_P = torch.randint(0, vocab, (tokens,), generator=make)
        slots = min(slots, vocab)
        self.ids_PK = torch.stack(
            [torch.randperm(vocab, generator=make)[:slots] for _ in range(tokens)]
        )
        if support == "kept":  # the sampled token belongs to its kept set
            is_there_P = (self.ids_PK == self.sampled_P[:, None]).any(1)
            self.ids_PK[~is_there_P, 0] = self.sampled_P[~is_there_P]
        real_PK = torch.rand(tokens, slots, generator=make) < 0.7
        real_PK |= self.ids_PK == self.sampled_P[:, None]
        real_PK[:, 0] = True
        noise_PK = 0.7 * normal(tokens, slots)
        with torch.no_grad():
            logits_PV = self.dense_logits(self.leaves)
            if support == "kept":
                scores_PK = logits_PV.gather(1, self.ids_PK) + noise_PK
                q_PK = scores_PK.masked_fill(~real_PK, -1e30).log_softmax(1)
            else:
                q_PK = head_logprobs(logits_PV, self.sampled_P, self.ids_PK, real_PK)[1]
                q_PK = q_PK + 0.2 * noise_PK - 0.3
            full_P = full_logprobs(logits_PV, self.sampled_P)
        self.sampler_PK = q_PK.masked_fill(~real_PK, float("-inf"))
        self.sampler_P = full_P + 0.7 * normal(tokens)
        self.advantages_P = normal(tokens)
        self.sequences_P = torch.arange(tokens) * 4 // tokens

    def dense_logits(self, leaves):
        return F.linear(leaves["hidden"], leaves["head"], leaves["bias"]) / TEMPERATURE

    def dense(self, leaves):
        """(trainer logprobs, their candidates', entropy), all from one tensor of logits."""
        logits_PV = self.dense_logits(leaves)
        kept_PK = kept_mask(self.sampler_PK)
        if self.support == "kept":
            found = replayed_logprobs(logits_PV, self.sampled_P, self.ids_PK, kept_PK)
        else:
            found = head_logprobs(logits_PV, self.sampled_P, self.ids_PK, kept_PK)
        return *found, entropy(logits_PV)

    def chunked(self, leaves, **chunks):
        kept_PK = kept_mask(self.sampler_PK)
        slots_PK = torch.cat((torch.ones_like(kept_PK[:, :1]), kept_PK), 1)
        found = head_scores(
            leaves["hidden"],
            leaves["head"],
            torch.cat((self.sampled_P[:, None], self.ids_PK), 1),
            temperature=TEMPERATURE,
            bias_V=leaves["bias"],
            is_slot_PK=slots_PK,
            whole_scores=0,
            **chunks,
        )
        sampled_P, scores_PK = found.scores_PK[:, 0], found.scores_PK[:, 1:]
        if self.support == "kept":
            pair = on_kept_set(sampled_P, scores_PK, kept_PK)
        else:
            pair = on_vocabulary(sampled_P, scores_PK, kept_PK, found.normaliser_P)
        return *pair, found.entropy_P

    def part(self, rows):
        """A micro-batch of some of the tokens."""
        found = copy.copy(self)
        found.leaves = self.leaves | {"hidden": self.leaves["hidden"][rows]}
        for name in ("sampled_P", "ids_PK", "sampler_PK", "sampler_P", "advantages_P"):
            setattr(found, name, getattr(self, name)[rows])
        found.sequences_P = self.sequences_P[rows]
        return found

    def run(self, forward, *, kind, entropy_weight=0.0, dtype=torch.float64, denominator=10.0):
        """Loss, entropy and every gradient."""
        leaves = {n: t.to(dtype).detach().requires_grad_() for n, t in self.leaves.items()}
        trainer_P, trainer_PK, entropy_P = forward(leaves)
        support = Support(trainer_PK, self.sampler_PK, is_exact=self.support == "kept")
        terms = token_terms(
            trainer_P,
            self.sampler_P,
            self.advantages_P,
            importance=kind,
            low=0.5,
            high=2.0,
            centering=self.support != "absent" and kind in CENTERED,
            support=None if self.support == "absent" else support,
            sequences_T=self.sequences_P,
        )
        loss_P = terms.loss_T + entropy_weight * entropy_P
        loss = loss_P.sum() / denominator
        loss.backward()
        grads = {name: leaf.grad for name, leaf in leaves.items()}
        return loss.detach(), entropy_P.detach(), grads


def gap(ours, theirs):
    scale = float(theirs.abs().max())
    return float((ours.double() - theirs.double()).abs().max()) / max(scale, 1e-300)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 40),
    vocab=st.integers(3, 90),
    slots=st.integers(1, 12),
    token_chunk=st.integers(1, 45),
    vocab_chunk=st.integers(1, 95),
    kind=st.sampled_from(KINDS),
    support=st.sampled_from(SUPPORTS),
    entropy_weight=st.sampled_from([0.0, 0.3]),
    kept_scores=st.sampled_from([0, 500, 10_000]),
)
def test_loss_entropy_and_every_gradient_equal_the_dense_ones(
    seed, tokens, vocab, slots, token_chunk, vocab_chunk, kind, support, entropy_weight, kept_scores
):
    case = Case(seed=seed, tokens=tokens, vocab=vocab, slots=slots, support=support)
    settings_ = {"kind": kind, "entropy_weight": entropy_weight}
    loss, entropy_P, grads = case.run(case.dense, **settings_)
    ours, our_entropy_P, our_grads = case.run(
        lambda leaves: case.chunked(
            leaves, token_chunk=token_chunk, vocab_chunk=vocab_chunk, kept_scores=kept_scores
        ),
        **settings_,
    )
    assert abs(float(ours - loss)) <= 1e-10 * max(1.0, abs(float(loss)))
    assert gap(our_entropy_P, entropy_P) <= 1e-10
    largest = max(float(grad.abs().max()) for grad in grads.values())
    for name, grad in grads.items():
        assert float((our_grads[name] - grad).abs().max()) <= 1e-10 * max(largest, 1e-3), name


@pytest.mark.parametrize("support", SUPPORTS)
def test_bfloat16_parameters_differ_from_float64_by_one_rounding(support):
    case = Case(seed=3, tokens=70, vocab=200, slots=9, support=support)
    case.leaves = {name: leaf.bfloat16().double() for name, leaf in case.leaves.items()}
    loss, entropy_P, grads = case.run(case.dense, kind="tis")
    ours, our_entropy_P, our_grads = case.run(
        lambda leaves: case.chunked(leaves, token_chunk=16, vocab_chunk=32),
        kind="tis",
        dtype=torch.bfloat16,
    )
    assert float(ours) == pytest.approx(float(loss), rel=1e-5, abs=1e-6)
    assert gap(our_entropy_P, entropy_P) <= 1e-5
    for name, grad in grads.items():
        assert our_grads[name].dtype == torch.bfloat16
        slack = grad.abs() * 2**-8 + 1e-5 * grad.abs().max()
        assert bool(((our_grads[name].double() - grad).abs() <= slack).all()), name


@pytest.mark.parametrize("support", SUPPORTS)
def test_micro_batches_of_any_split_add_up_to_the_whole(support):
    case = Case(seed=5, tokens=30, vocab=64, slots=6, support=support)

    def run(rows):
        part = case.part(rows)
        return part.run(
            lambda leaves: part.chunked(leaves, token_chunk=7, vocab_chunk=10), kind="mis"
        )

    loss, _, whole = run(slice(0, 30))
    for cuts in ((0, 1, 30), (0, 8, 15, 22, 30), tuple(range(31))):
        parts = [run(slice(first, last)) for first, last in itertools.pairwise(cuts)]
        assert sum(float(part[0]) for part in parts) == pytest.approx(float(loss), rel=1e-12)
        for name in ("head", "bias"):
            assert gap(sum(part[2][name] for part in parts), whole[name]) <= 1e-12, name
        hidden = torch.cat([part[2]["hidden"] for part in parts])
        assert gap(hidden, whole["hidden"]) <= 1e-12


def test_a_worked_distribution():
    # Scores log 1, log 2, log 5 of one token: normaliser log 8, p = 1/8, 2/8, 5/8.
    head = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64).log()
    found = head_scores(
        torch.ones(1, 1, dtype=torch.float64),
        head,
        torch.tensor([[2, 0, 1]]),
        temperature=1.0,
        is_slot_PK=torch.tensor([[True, True, False]]),
        token_chunk=1,
        vocab_chunk=2,
        whole_scores=0,
    )
    assert found.scores_PK[0].exp().tolist() == pytest.approx([5.0, 1.0, 1.0])  # exp(0) in the last
    assert found.normaliser_P.exp().item() == pytest.approx(8.0)
    p_V = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64) / 8
    assert found.entropy_P.item() == pytest.approx(float(-(p_V * p_V.log()).sum()))


def test_scores_far_from_zero_neither_overflow_nor_lose_the_entropy():
    # Two equal scores at +600 and two at -600: exp overflows, p = 1/2, 1/2, 0, 0, entropy log 2.
    head = torch.tensor([[-600.0], [600.0], [-600.0], [600.0]])
    found = head_scores(
        torch.ones(3, 1), head, torch.tensor([[1]] * 3), temperature=1.0,
        token_chunk=2, vocab_chunk=1, whole_scores=0,
    )  # fmt: skip
    logprobs = (found.scores_PK[:, 0] - found.normaliser_P).tolist()
    assert logprobs == pytest.approx([-0.6931472] * 3, abs=1e-4)
    assert found.entropy_P.tolist() == pytest.approx([0.6931472] * 3, rel=1e-5)


def test_a_nan_in_one_token_reaches_that_token_alone():
    hidden = torch.ones(3, 2)
    hidden[1, 0] = float("nan")
    found = head_scores(
        hidden, torch.ones(5, 2), torch.zeros(3, 1, dtype=torch.int64), temperature=1.0,
        token_chunk=2, vocab_chunk=2, whole_scores=0,
    )  # fmt: skip
    assert found.normaliser_P.isnan().tolist() == [False, True, False]
    assert found.scores_PK[:, 0].isnan().tolist() == [False, True, False]


def test_the_same_call_gives_the_same_bits():
    case = Case(seed=9, tokens=40, vocab=70, slots=8, support="kept")

    def once():
        return case.run(
            lambda leaves: case.chunked(leaves, token_chunk=16, vocab_chunk=32),
            kind="mis",
            dtype=torch.float32,
        )

    first, second = once(), once()
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


@pytest.mark.parametrize("kept_scores", [600, 10_000])
def test_scores_that_are_kept_change_no_bit_and_a_second_backward_pass_neither(kept_scores):
    make = torch.Generator().manual_seed(4)
    leaves = [torch.randn(size, 6, generator=make).requires_grad_() for size in (40, 70)]
    ids_PK = torch.randint(0, 70, (40, 2), generator=make)

    def gradients(kept_scores):
        found = head_scores(
            *leaves, ids_PK, temperature=TEMPERATURE, token_chunk=16, vocab_chunk=32,
            whole_scores=0, kept_scores=kept_scores,
        )  # fmt: skip
        loss = (found.scores_PK.sum(1) - found.normaliser_P + found.entropy_P).square().sum()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        return [*first, *torch.autograd.grad(loss, leaves)]

    again = gradients(0)
    kept = gradients(kept_scores)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, again, strict=True))
    assert torch.equal(kept[0], kept[2])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ids_PK": torch.tensor([[7]])}, "id 7 is outside the vocabulary of 7"),
        ({"ids_PK": torch.tensor([[-1]])}, "id -1 is outside"),
        ({"temperature": 0.0}, "must be above 0"),
        ({"token_chunk": 0}, "must be at least 1"),
    ],
)
def test_impossible_requests_are_named(changes, message):
    request = {"ids_PK": torch.tensor([[0]]), "temperature": 1.0} | changes
    with pytest.raises(ValueError, match=message):
        head_scores(torch.ones(1, 2), torch.ones(7, 2), **request)


MEMORY = """
import resource, torch
from rlmix.algos.chunked_head import head_scores
torch.set_num_threads(1)
def step(tokens, vocab):
    hidden, head = torch.randn(tokens, 8).requires_grad_(), torch.randn(vocab, 8).requires_grad_()
    ids = torch.randint(0, vocab, (tokens, 1))
    found = head_scores(hidden, head, ids, temperature=1.0)
    (found.scores_PK[:, 0] - found.normaliser_P).sum().backward()
step(2048, 16384)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(8192, 32768)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_eight_times_the_scores_take_no_more_memory_than_their_inputs():
    # All scores would be 1 GiB, 128 MiB of which are kept, as of the smaller call; hidden states,
    # head and their gradients are 3 MiB.
    found = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    assert float(found.stdout) < 64
