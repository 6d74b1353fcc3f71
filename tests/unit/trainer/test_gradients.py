"""The trainer's loss and every gradient through the whole model, against plain float64.

Three comparisons: packing, logprobs and loss on a model that is float64 throughout (1e-12); the
Transformers model in float64, whose norms and softmaxes stay float32 (2e-6); the model that trains,
in BF16 (each parameter's gradient: cosine above 0.998, norm within 3 %; loss within 2 %).
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from rlmix.batch.packing import pack_samples
from rlmix.trainer.policy import Policy
from rlmix.trainer.step import run_micro_batches, step_denominator
from tests.unit.trainer.conftest import ALGO
from tests.unit.trainer.dense_model import DenseModel, dense_loss, dense_session
from tests.unit.trainer.in_blocks import InBlocks


@pytest.fixture(scope="module")
def transformers_policy(model_dir):
    """The tiny policy in the float64 of Transformers."""
    loaded = Policy.load(model_dir, attention="eager", experts="eager")
    return Policy(copy.deepcopy(loaded.model).double())


@pytest.fixture
def dense(transformers_policy):
    """The same weights, written out in the test."""
    return DenseModel(transformers_policy.parameters())


@pytest.fixture(scope="module")
def chosen(samples):
    return [sample for sample in samples if sample.advantage][:6]


@torch.no_grad()
def as_head(sample, dense):
    """The trainer's eight likeliest tokens as heads of a sampler that is off by a factor of two.

    The sampled token is in its head only by chance.
    """
    generator = np.random.default_rng(len(sample.ids))
    logits_TV = dense.logits(torch.from_numpy(sample.ids.astype(np.int64))[None])[0]
    p_TV = (logits_TV / ALGO.temperature).softmax(1).numpy()
    head_ids, head_logprobs = [], []
    logprobs = np.zeros_like(sample.sampler_logprobs)
    for t in np.flatnonzero(sample.mask):
        p_V = p_TV[t - 1]
        q_V = p_V * np.exp(0.9 * generator.standard_normal(len(p_V)))
        q_V /= q_V.sum()
        head = np.argsort(-p_V)[:8]
        head_ids.append(head)
        head_logprobs.append(np.log(q_V[head]))
        logprobs[t] = np.log(q_V[sample.ids[t]])
    return dataclasses.replace(
        sample,
        sampler_logprobs=logprobs,
        kept_offsets=np.concatenate([[0], np.cumsum(8 * sample.mask)]).astype(np.int32),
        kept_ids=np.concatenate(head_ids).astype(np.int32),
        kept_logprobs=np.concatenate(head_logprobs).astype(np.float32),
        kept_exact=False,
    )


def run(policy, samples, algo, *, max_tokens=150):
    """Loss, gradients and shares of dropped sessions from the trainer's code, packed and padded."""
    batches = pack_samples(samples, max_tokens=max_tokens)
    for parameter in policy.parameters().values():
        parameter.grad = None
    result = run_micro_batches(
        policy,
        batches,
        algo,
        denominator=step_denominator(batches, algo),
        trainer_version=2,
    )
    assert result.failure == ""
    gradients = {n: p.grad.clone() for n, p in policy.parameters().items() if p.grad is not None}
    return result, gradients


def assert_equal_gradients(ours, theirs, *, tolerance):
    assert len(ours) == len(theirs) == 24  # every parameter of two layers
    for name, expected in theirs.items():
        scale = float(expected.abs().max())
        assert scale > 0, name
        gap = float((ours[name].double() - expected).abs().max())
        assert gap <= tolerance * scale, (name, gap / scale)


def dense_gradients(dense, samples, algo):
    for weight in dense.weights.values():
        weight.grad = None
    loss, num_dropped = dense_loss(dense, samples, algo)
    loss.backward()
    return loss.item(), {n: w.grad.clone() for n, w in dense.weights.items()}, num_dropped


@pytest.mark.parametrize("average", ["tokens", "sequences"])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("kind", [Policy, InBlocks])
def test_loss_and_every_gradient_equal_the_dense_ones(dense, chosen, kind, head, average):
    algo = dataclasses.replace(ALGO, average=average)
    samples = [as_head(sample, dense) for sample in chosen] if head else chosen
    loss, expected, _ = dense_gradients(dense, samples, algo)
    result, gradients = run(kind(dense), samples, algo)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert_equal_gradients(gradients, expected, tolerance=1e-12)
    assert result.facts.weights_T.count_nonzero() not in (0, result.facts.weights_T.numel())


@pytest.mark.parametrize("mask", ["product", "geometric", "k3", "opsm", "veto"])
def test_rules_about_sequences_drop_the_sessions_of_the_dense_computation(dense, chosen, mask):
    # bounds in the middle of what the sessions have, so that some stay and some go
    with torch.no_grad():
        d = [dense_session(dense, sample, ALGO)[0] for sample in chosen]
    bad = [i for i, sample in enumerate(chosen) if sample.advantage < 0]
    k3 = [np.mean(np.exp(x) - 1 - x) for x in d]
    changes = {
        "product": {"sequence_low": 0.0, "sequence_high": np.exp(middle([x.sum() for x in d]))},
        "geometric": {"sequence_low": np.exp(middle([x.mean() for x in d])), "sequence_high": 99.0},
        "k3": {"sequence_high": middle(k3)},
        "opsm": {"sequence_high": middle([-d[i].mean() for i in bad])},
        "veto": {"veto": np.exp(middle([x.min() for x in d]))},
    }[mask]
    kind = {} if mask == "veto" else {"sequence_mask": mask}
    algo = dataclasses.replace(ALGO, **kind, **{k: float(v) for k, v in changes.items()})
    loss, expected, num_dropped = dense_gradients(dense, chosen, algo)
    assert 0 < num_dropped < len(chosen)
    result, gradients = run(Policy(dense), chosen, algo)
    assert result.loss == pytest.approx(loss, rel=1e-12)
    assert_equal_gradients(gradients, expected, tolerance=1e-12)
    key = "correction/veto_frac" if mask == "veto" else "correction/sequence_masked_frac"
    assert result.sequence_metrics[key] == pytest.approx(num_dropped / len(chosen))


def middle(values):
    ordered = sorted(values)
    half = len(ordered) // 2
    return (ordered[half - 1] + ordered[half]) / 2


def test_gradients_equal_finite_differences_with_the_weights_held_fixed(dense, chosen):
    policy = Policy(dense)
    (batch,) = pack_samples(chosen, max_tokens=10_000)
    q_PK = torch.from_numpy(batch.kept_logprobs_PK).double().exp()
    advantages = torch.from_numpy(batch.advantages_P).double()

    @torch.no_grad()
    def scores():
        found = policy.token_logprobs(batch, temperature=ALGO.temperature, replay=True)
        slots = found.support.trainer_logprobs_TK.masked_fill(q_PK == 0, 0.0)
        return found.trainer_P, slots

    def trusted(ratios):
        return ratios * ((ratios >= ALGO.low) & (ratios <= ALGO.high))

    own_P, slots_PK = scores()
    own_weight = trusted((own_P - torch.from_numpy(batch.sampler_logprobs_P)).exp())
    mass_PK = torch.where(q_PK > 0, q_PK * trusted(slots_PK.exp() / q_PK.clamp(min=1e-30)), 0.0)

    def frozen_loss():
        own_P, slots_PK = scores()
        score_P = own_weight * own_P - (mass_PK * slots_PK).sum(1)
        return float(-(advantages * score_P).mean())

    _, gradients = run(policy, chosen, ALGO)
    step = 1e-5
    for part in ("embed_tokens", "1.self_attn.k_proj", "0.mlp.experts.gate_up", "0.mlp.gate",
                 "1.input_layernorm", "0.self_attn.q_norm"):  # fmt: skip
        name = next(n for n in gradients if part in n)
        weight = dense.weights[name].data.view(-1)
        index = int(gradients[name].abs().flatten().argmax())
        before = weight[index].item()
        weight[index] = before + step
        above = frozen_loss()
        weight[index] = before - step
        below = frozen_loss()
        weight[index] = before
        slope = (above - below) / (2 * step)
        assert gradients[name].flatten()[index].item() == pytest.approx(slope, rel=1e-5), name


@pytest.mark.parametrize("head", [False, True])
def test_the_transformers_model_computes_what_the_dense_one_does(
    transformers_policy, dense, chosen, head
):
    samples = [as_head(sample, dense) for sample in chosen] if head else chosen
    loss, expected, _ = dense_gradients(dense, samples, ALGO)
    result, gradients = run(transformers_policy, samples, ALGO)
    assert result.loss == pytest.approx(loss, rel=2e-6)
    assert_equal_gradients(gradients, expected, tolerance=2e-6)


@pytest.mark.parametrize("kind", [Policy, InBlocks])
def test_bfloat16_gradients_point_where_the_float64_ones_do(dense, model_dir, chosen, kind):
    loss, exact, _ = dense_gradients(dense, chosen, ALGO)
    result, rounded = run(kind.load(model_dir), chosen, ALGO)
    assert result.loss == pytest.approx(loss, rel=0.02)
    for name, expected in exact.items():
        ours, theirs = rounded[name].double().flatten(), expected.flatten()
        cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0)
        assert cosine > 0.998, name
        assert float(ours.norm() / theirs.norm()) == pytest.approx(1.0, abs=0.03), name
