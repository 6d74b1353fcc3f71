"""Loss and gradient through the whole model, against a dense computation in float64."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from rlmix.batch.packing import pack_samples
from rlmix.trainer.policy import Policy
from rlmix.trainer.spec import AlgoSpec
from rlmix.trainer.step import run_micro_batches

ALGO = AlgoSpec(importance="mis", low=0.5, high=5.0, centering=True, replay=True, temperature=0.8)


@pytest.fixture(scope="module")
def policy(model_dir):
    """The tiny policy in float64."""
    loaded = Policy.load(model_dir, attention="eager", experts="eager")
    return Policy(copy.deepcopy(loaded.model).double())


def run(policy, samples, algo, *, max_tokens):
    policy.model.zero_grad()
    batches = pack_samples(samples, max_tokens=max_tokens)
    denominator = float(sum(int(sample.mask.sum()) for sample in samples))
    result = run_micro_batches(policy, batches, algo, denominator=denominator, trainer_version=2)
    assert result.failure == ""
    return result, {n: p.grad.clone() for n, p in policy.parameters().items() if p.grad is not None}


def dense_loss(policy, samples, algo, *, head):
    """The textbook loss: one session and one token at a time, full q written out, no packing."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.from_numpy(sample.ids.astype(np.int64))[None]
        logits_TV = policy.model(input_ids=ids, use_cache=False).logits[0] / algo.temperature
        for t in np.flatnonzero(sample.mask):
            slots = slice(sample.kept_offsets[t], sample.kept_offsets[t + 1])
            kept = torch.from_numpy(sample.kept_ids[slots].astype(np.int64))
            q = torch.from_numpy(sample.kept_logprobs[slots]).double().exp()
            z = logits_TV[t - 1]
            sampled = int(sample.ids[t])
            if head:  # the tail of q is rho times the trainer's
                p = z.softmax(0).detach()
                outside = torch.ones_like(p, dtype=torch.bool)
                outside[kept] = False
                rho = (1 - q.sum()) / p[outside].sum()
                full_q = torch.where(outside, rho * p, torch.zeros_like(p))
                full_q[kept] = q
                candidates, q, logp = torch.arange(len(p)), full_q, z.log_softmax(0)
            else:
                candidates, logp = kept, z[kept].log_softmax(0)
            ratios = logp.detach().exp() / q
            weights = ratios * ((ratios >= algo.low) & (ratios <= algo.high))
            place = int((candidates == sampled).nonzero()[0, 0])
            own = float(logp[place].detach()) - float(sample.sampler_logprobs[t])
            own_weight = np.exp(own) if algo.low <= np.exp(own) <= algo.high else 0.0
            score = own_weight * logp[place] - (q * weights * logp).sum()
            total = total - sample.advantage * score
    return total / sum(int(sample.mask.sum()) for sample in samples)


@pytest.mark.parametrize("head", [False, True])
def test_loss_and_every_gradient_equal_the_dense_computation(policy, samples, head):
    chosen = [sample for sample in samples if sample.advantage][:4]
    if head:
        chosen = [as_head(sample) for sample in chosen]
    result, gradients = run(policy, chosen, ALGO, max_tokens=10_000)
    policy.model.zero_grad()
    loss = dense_loss(policy, chosen, ALGO, head=head)
    loss.backward()
    if not head:  # folding the tail into the head keeps the gradient and changes the value
        assert result.loss == pytest.approx(loss.item(), abs=1e-7)
    assert len(gradients) == len(policy.parameters())
    for name, parameter in policy.parameters().items():
        scale = float(parameter.grad.abs().max())
        assert torch.allclose(gradients[name], parameter.grad, rtol=0, atol=1e-6 * scale), name


def as_head(sample):
    """The kept sets as heads that hold 80 % of the sampler's mass."""
    return dataclasses.replace(
        sample,
        kept_logprobs=sample.kept_logprobs + np.float32(np.log(0.8)),
        sampler_logprobs=np.where(
            sample.mask, sample.sampler_logprobs + np.float32(np.log(0.8)), 0
        ).astype(np.float32),
        kept_exact=False,
    )


@pytest.mark.parametrize("importance", ["mis", "gspo"])
def test_any_packing_gives_the_same_loss_gradient_and_facts(policy, samples, importance):
    algo = dataclasses.replace(ALGO, importance=importance, centering=importance == "mis")
    whole, gradients = run(policy, samples, algo, max_tokens=100_000)
    for max_tokens, shuffled in ((41, samples), (90, samples[::-1])):
        split, split_gradients = run(policy, shuffled, algo, max_tokens=max_tokens)
        assert split.loss == pytest.approx(whole.loss, rel=1e-6)
        for name, gradient in gradients.items():
            scale = float(gradient.abs().max())
            assert torch.allclose(split_gradients[name], gradient, rtol=0, atol=2e-6 * scale)
        assert split.facts.weights_T.sum().item() == pytest.approx(
            whole.facts.weights_T.sum().item(), rel=1e-6
        )


def test_samples_without_signal_cost_no_backward_but_are_measured(policy, samples):
    silent = [dataclasses.replace(sample, advantage=0.0) for sample in samples[:3]]
    result, gradients = run(policy, silent, ALGO, max_tokens=1000)
    assert gradients == {}
    assert result.loss == 0.0
    assert result.facts.log_ratios_T.numel() == sum(int(s.mask.sum()) for s in silent)


def test_bfloat16_gradients_point_where_the_float64_ones_do(policy, model_dir, samples):
    chosen = [sample for sample in samples if sample.advantage]
    _, exact = run(policy, chosen, ALGO, max_tokens=10_000)
    _, rounded = run(Policy.load(model_dir), chosen, ALGO, max_tokens=10_000)
    ours = torch.cat([rounded[name].double().flatten() for name in exact])
    theirs = torch.cat([gradient.flatten() for gradient in exact.values()])
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0)
    assert cosine > 0.98
    assert float(ours.norm() / theirs.norm()) == pytest.approx(1.0, abs=0.1)
