"""Documents packed into one row against documents alone: logprobs, gradients, states."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from rlmix.batch.packing import pack_samples
from rlmix.core.errors import TrainerError
from rlmix.trainer.documents import check_no_leak, documents_attention
from rlmix.trainer.policy import Policy
from rlmix.trainer.step import run_micro_batches, step_denominator
from tests.unit.trainer.conftest import ALGO
from tests.unit.trainer.model_classes import CONFIGS, save_model


@pytest.fixture(scope="module", params=CONFIGS)
def policy(request, tmp_path_factory):
    """In float64, so that only a leak can be seen and no rounding."""
    folder = tmp_path_factory.mktemp("model")
    save_model(request.param, folder)
    loaded = Policy.load(folder, attention="eager", experts="eager")
    made = Policy(copy.deepcopy(loaded.model).double())
    made.take_documents()
    return made


def step(policy, samples, *, layout, max_tokens):
    policy.model.zero_grad()
    batches = pack_samples(samples, max_tokens=max_tokens, layout=layout)
    result = run_micro_batches(
        policy, batches, ALGO, denominator=step_denominator(batches, ALGO), trainer_version=2
    )
    gradients = {n: p.grad.clone() for n, p in policy.parameters().items() if p.grad is not None}
    return result, gradients, batches


def test_packed_documents_give_the_logprobs_and_gradients_of_documents_alone(policy, samples):
    alone, gradients, _ = step(policy, samples, layout="rows", max_tokens=40)
    packed, packed_gradients, batches = step(policy, samples, layout="documents", max_tokens=200)
    assert len(batches) < len(samples)
    assert any(batch.starts is not None and len(batch.starts) > 3 for batch in batches)
    assert all(batch.ids_BT.shape == (1, batch.num_tokens) for batch in batches)

    def by_token(result):
        facts = result.facts
        order = np.lexsort((facts.positions_T.numpy(), facts.sequences_T.numpy()))
        return facts.log_ratios_T.double().numpy()[order]

    np.testing.assert_allclose(by_token(packed), by_token(alone), rtol=0, atol=2e-6)
    assert packed.loss == pytest.approx(alone.loss, rel=1e-6)
    assert packed_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        assert torch.allclose(packed_gradients[name], gradient, rtol=0, atol=5e-6 * scale), name


def test_a_neighbour_changes_nothing_and_its_own_tokens_do(policy, samples):
    def logprobs(neighbour):
        mine = dataclasses.replace(samples[0], advantage=1.0)
        other = dataclasses.replace(neighbour, advantage=1.0)
        (batch,) = pack_samples([mine, other], max_tokens=1000, layout="documents")
        found = policy.token_logprobs(batch, temperature=1.0, replay=True).trainer_P
        return found[torch.from_numpy(batch.sequences_P == 0)]

    changed = dataclasses.replace(samples[1], ids=samples[1].ids[::-1].copy())
    with torch.no_grad():
        torch.testing.assert_close(logprobs(samples[1]), logprobs(changed), rtol=0, atol=2e-6)


def test_a_class_that_lets_documents_see_each_other_is_refused(policy):
    """The same model, told of documents only by positions: its layers then see across."""

    def hidden(ids_BT, starts=None):
        return Policy.hidden(policy, ids_BT, None)

    with pytest.raises(TrainerError, match=r"see each other .* set trainer.packing=rows"):
        check_no_leak(policy.model, hidden)


def test_a_sliding_window_is_refused_in_one_sentence():
    query = torch.zeros(1, 2, 4, 8)
    with pytest.raises(TrainerError, match=r"sliding window .* set trainer.packing=rows"):
        documents_attention(torch.nn.Identity(), query, query, query, None, sliding_window=2)


def test_heads_that_share_keys_attend_inside_their_document_only():
    make = torch.Generator().manual_seed(1)
    query = torch.randn(1, 4, 5, 8, generator=make)
    key, value = torch.randn(2, 1, 2, 5, 8, generator=make)
    starts = torch.tensor([0, 2, 5], dtype=torch.int32)
    found, _ = documents_attention(
        torch.nn.Identity(), query, key, value, None, scaling=0.5, cu_seq_lens_q=starts
    )
    scores = query @ key.repeat_interleave(2, dim=1).transpose(-1, -2) * 0.5
    is_seen = torch.tensor(
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]],
        dtype=torch.bool,
    )
    shares = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    expected = (shares @ value.repeat_interleave(2, dim=1)).transpose(1, 2)
    torch.testing.assert_close(found, expected)
