"""Layers that are computed again for their gradients give the gradients of layers that are not."""

import copy

import pytest
import torch

from rlmix.batch.packing import pack_samples
from rlmix.trainer.policy import Policy
from rlmix.trainer.step import run_micro_batches, step_denominator
from tests.unit.trainer.conftest import ALGO
from tests.unit.trainer.model_classes import CONFIGS, save_model
from tests.unit.trainer.test_routing import forced


def step(policy, samples):
    policy.model.zero_grad()
    batches = pack_samples(samples, max_tokens=200)
    result = run_micro_batches(
        policy, batches, ALGO, denominator=step_denominator(batches, ALGO), trainer_version=2
    )
    return result, {n: p.grad.clone() for n, p in policy.parameters().items() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_the_same_bits_and_parameters_keep_their_names(
    name, samples, tmp_path_factory
):
    folder = tmp_path_factory.mktemp("model")
    save_model(name, folder)
    kept = Policy.load(folder)
    again = Policy(copy.deepcopy(kept.model))
    again.recompute()
    assert again.state().keys() == kept.state().keys()
    result, gradients = step(kept, samples)
    found, again_gradients = step(again, samples)
    assert found.loss == result.loss
    assert again_gradients.keys() == gradients.keys()
    assert all(torch.equal(again_gradients[name], gradients[name]) for name in gradients)


def test_layers_keep_their_input_only(model_dir, samples):
    policy = Policy.load(model_dir)
    batches = pack_samples(samples, max_tokens=10_000)
    (batch,) = [batch for batch in batches if batch.needs_gradient]

    def kept_bytes():
        kept = 0

        def pack(tensor):
            nonlocal kept
            kept += tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy.hidden(torch.from_numpy(batch.ids_BT))
        return kept

    everything = kept_bytes()
    policy.recompute()
    assert kept_bytes() < everything / 5


def test_replayed_experts_are_replayed_in_the_second_forward_and_counted_once(model_dir, samples):
    chosen = forced(samples[:6])
    kept = Policy.load(model_dir, replays_routing=True)
    again = Policy(copy.deepcopy(kept.model), replays_routing=True)
    again.recompute()
    result, gradients = step(kept, chosen)
    found, again_gradients = step(again, chosen)
    own, _ = step(kept, samples[:6])
    assert own.loss != result.loss
    assert found.loss == result.loss
    assert all(torch.equal(again_gradients[name], gradients[name]) for name in gradients)
    for mine, theirs in zip(result.routing, found.routing, strict=True):
        assert torch.equal(mine.replayed_BT, theirs.replayed_BT)
        assert torch.equal(mine.agreed_BT, theirs.agreed_BT)
