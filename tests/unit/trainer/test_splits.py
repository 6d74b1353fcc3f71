"""However a step is split into micro-batches and over ranks, it is the same step.

In float64 throughout, to 1e-10; ranks are gone through one after the other and their gradients
added, which is what the exchange of real ones computes (`test_several_ranks.py` has real ones).
"""

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlmix.batch.packing import pack_samples
from rlmix.batch.sharing import share_batches
from rlmix.numerics.consistent.reduction import GradientTree, flat_of, share_out
from rlmix.trainer.policy import Policy
from rlmix.trainer.step import join_passes, run_micro_batch, step_denominator
from rlmix.trainer.world import by_leaf
from tests.unit.trainer.conftest import ALGO
from tests.unit.trainer.dense_model import DenseModel

WHOLE = 100_000
ALGOS = (
    {},
    {"average": "sequences", "importance": "tis"},
    {"importance": "gspo", "centering": False, "average": "sequences"},
    {"importance": "seq_tis", "centering": False, "sequence_mask": "geometric"},
    {"sequence_mask": "opsm", "sequence_high": 0.5, "veto": 0.07},
)


@pytest.fixture(scope="module")
def policy(model_dir):
    loaded = Policy.load(model_dir, attention="eager", experts="eager")
    return Policy(DenseModel(loaded.parameters()))


def step(policy, samples, algo, *, max_tokens, num_ranks):
    """(what the step gave, gradients by name) of so many ranks, one after the other."""
    batches = pack_samples(samples, max_tokens=max_tokens, num_ranks=num_ranks)
    passes, totals = [], {name: torch.zeros_like(p) for name, p in policy.parameters().items()}
    for turns in share_batches(batches, num_ranks=num_ranks):
        for parameter in policy.parameters().values():
            parameter.grad = None
        passes.append(
            {
                turn.leaf: run_micro_batch(
                    policy,
                    batches[turn.leaf],
                    algo,
                    denominator=step_denominator(batches, algo),
                    trainer_version=2,
                )
                for turn in turns
                if turn.leaf is not None
            }
        )
        for name, parameter in policy.parameters().items():
            if parameter.grad is not None:
                totals[name] += parameter.grad
    return join_passes(batches, by_leaf(passes)), totals


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_split_over_micro_batches_and_ranks_is_the_same_step(policy, samples, data):
    algo = dataclasses.replace(ALGO, **data.draw(st.sampled_from(ALGOS)))
    shuffled = data.draw(st.permutations(samples))
    max_tokens = data.draw(st.integers(40, 300))
    num_ranks = data.draw(st.integers(1, 5))
    whole, expected = step(policy, samples, algo, max_tokens=WHOLE, num_ranks=1)
    split, gradients = step(policy, shuffled, algo, max_tokens=max_tokens, num_ranks=num_ranks)
    assert split.loss == pytest.approx(whole.loss, rel=1e-10)
    assert split.sequence_metrics == pytest.approx(whole.sequence_metrics, rel=1e-10)
    assert len(split.facts.weights_T) == len(whole.facts.weights_T)
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        assert scale > 0, name
        assert float((gradients[name] - gradient).abs().max()) <= 1e-10 * scale, name


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_means_half_the_loss_to_nobody(policy, samples, num_ranks):
    """One rank's share is divided by the whole step's tokens, not by its own."""
    whole, _ = step(policy, samples, ALGO, max_tokens=WHOLE, num_ranks=1)
    split, _ = step(policy, samples, ALGO, max_tokens=40, num_ranks=num_ranks)
    per_token = whole.loss * sum(int(sample.mask.sum()) for sample in samples)
    halves = [
        step(policy, part, ALGO, max_tokens=40, num_ranks=1)[0].loss
        * sum(int(sample.mask.sum()) for sample in part)
        for part in (samples[:5], samples[5:])
    ]
    assert sum(halves) == pytest.approx(per_token, rel=1e-10)
    assert split.loss == pytest.approx(whole.loss, rel=1e-10)


@pytest.mark.parametrize("num_leaves", [1, 5, 8])
def test_the_tree_adds_each_leaf_once_whoever_owns_it(num_leaves):
    make = torch.Generator().manual_seed(num_leaves)
    leaves = [torch.randn(7, generator=make) for _ in range(num_leaves)]
    tree = GradientTree(share_out([1.0] * num_leaves, num_ranks=1), rank=0, group=None)
    for leaf in tree.leaves:
        tree.add(leaf, flat_of({"only": leaves[leaf]}))
    total = tree.total()
    assert total is not None
    torch.testing.assert_close(total.double(), torch.stack(leaves).double().sum(0))
