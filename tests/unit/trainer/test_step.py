"""One step over micro-batches: what packing must not change, and what costs nothing.

Loss and gradients against a dense float64 model are in `test_gradients.py`.
"""

import copy
import dataclasses

import pytest
import torch

from rlmix.batch.packing import pack_samples
from rlmix.trainer.policy import Policy
from rlmix.trainer.step import run_micro_batches, step_denominator
from tests.unit.trainer.conftest import ALGO
from tests.unit.trainer.in_blocks import InBlocks


@pytest.fixture(scope="module")
def policy(model_dir):
    """The tiny policy in float64."""
    loaded = Policy.load(model_dir, attention="eager", experts="eager")
    return Policy(copy.deepcopy(loaded.model).double())


def run(policy, samples, algo, *, max_tokens):
    policy.model.zero_grad()
    batches = pack_samples(samples, max_tokens=max_tokens)
    denominator = step_denominator(batches, algo)
    result = run_micro_batches(policy, batches, algo, denominator=denominator, trainer_version=2)
    assert result.failure == ""
    return result, {n: p.grad.clone() for n, p in policy.parameters().items() if p.grad is not None}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"importance": "gspo", "centering": False, "average": "sequences"},
        {"importance": "seq_tis", "centering": False, "sequence_mask": "geometric"},
        {"sequence_mask": "opsm", "sequence_high": 0.5, "veto": 0.07},
    ],
)
def test_any_packing_gives_the_same_loss_gradient_and_facts(policy, samples, changes):
    algo = dataclasses.replace(ALGO, **changes)
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
        assert split.sequence_metrics == pytest.approx(whole.sequence_metrics)


def test_samples_without_signal_cost_no_backward_but_are_measured(policy, samples):
    silent = [dataclasses.replace(sample, advantage=0.0) for sample in samples[:3]]
    result, gradients = run(policy, silent, ALGO, max_tokens=1000)
    assert gradients == {}
    assert result.loss == 0.0
    assert result.facts.log_ratios_T.numel() == sum(int(s.mask.sum()) for s in silent)


def test_a_loss_over_sequences_is_divided_by_their_number(samples):
    batches = pack_samples(samples, max_tokens=100)
    assert step_denominator(batches, ALGO) == sum(int(sample.mask.sum()) for sample in samples)
    over_sequences = dataclasses.replace(ALGO, average="sequences")
    assert step_denominator(batches, over_sequences) == len(samples) == 12


def test_blocks_of_the_head_give_the_loss_and_gradients_of_all_logits(policy, samples):
    whole, gradients = run(policy, samples, ALGO, max_tokens=100_000)
    in_blocks = InBlocks(policy.model)
    split, split_gradients = run(in_blocks, samples, ALGO, max_tokens=90)
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)  # Transformers' norms are float32
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        assert torch.allclose(split_gradients[name], gradient, rtol=0, atol=2e-6 * scale)
    assert torch.allclose(
        split.facts.entropy_T.sum(), whole.facts.entropy_T.sum(), rtol=1e-6, atol=0
    )


def test_sessions_that_share_a_micro_batch_do_not_see_each_other(policy, samples):
    mine, other = samples[:2]  # both with an advantage

    def alone(neighbour):
        (batch,) = pack_samples([mine, neighbour], max_tokens=1000)
        found = policy.token_logprobs(batch, temperature=1.0, replay=True).trainer_P
        row = batch.session_ids.index(mine.session_id)
        found = found[torch.from_numpy(batch.rows_P == row)]
        policy.model.zero_grad()
        found.sum().backward()
        return found.detach(), [p.grad.clone() for p in policy.parameters().values()]

    stranger = dataclasses.replace(other, ids=(other.ids + 17) % 512)
    before, gradients = alone(other)
    after, others_gradients = alone(stranger)
    assert torch.equal(before, after)
    assert all(torch.equal(a, b) for a, b in zip(gradients, others_gradients, strict=True))
