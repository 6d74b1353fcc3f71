"""Heads of the whole vocabulary beside kept sets: the trainer's alarm about the tail."""

import dataclasses

import numpy as np
import pytest
import torch

from rlmix.batch.packing import pack_samples

SIZE = 128


@pytest.fixture
def rank(make_rank, model_dir):
    rank = make_rank()
    rank.load(model_dir)
    return rank


@torch.no_grad()
def own_logprobs(rank, sample):
    """float64 [T, V]: entry t is the trainer's distribution of token t."""
    policy, _ = rank._parts()
    hidden_TH = policy.hidden(torch.from_numpy(sample.ids)[None].long())[0]
    logits_TV = policy.logits(hidden_TH).double() / rank._spec.algo.temperature
    return torch.cat([torch.zeros(1, logits_TV.shape[1]), logits_TV.log_softmax(dim=1)[:-1]])


def with_heads(rank, sample, *, tail_times=1.0, tokens=None):
    """The sample with heads of a sampler whose tail is `tail_times` the trainer's."""
    logprobs_TV = own_logprobs(rank, sample)
    sizes = np.zeros(len(sample.ids), dtype=np.int64)
    ids, logprobs = [], []
    for t in np.flatnonzero(sample.mask)[:tokens]:
        values, order = logprobs_TV[t].topk(SIZE)
        mass = float(values.exp().sum())
        sizes[t] = SIZE
        ids.append(order.numpy())
        logprobs.append(values.numpy() + np.log((1 - tail_times * (1 - mass)) / mass))
    return dataclasses.replace(
        sample,
        head_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        head_ids=np.concatenate(ids).astype(np.int32),
        head_logprobs=np.concatenate(logprobs).astype(np.float32),
    )


def test_a_sampler_with_the_trainers_tail_has_ratio_one_and_no_push(rank, samples):
    watched = [with_heads(rank, samples[0]), *samples[1:]]
    metrics = rank.train_step(watched, step=1, version=2).metrics
    assert metrics["correction/head_tail_ratio"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["correction/head_coeff_l1"] < 1e-3
    assert metrics["correction/head_tokens"] == samples[0].mask.sum()
    assert 0.3 < metrics["correction/head_mass_trainer"] < 0.999  # There is a tail to speak of.
    assert metrics["correction/by_pool/b200/head_tokens"] == samples[0].mask.sum()
    assert "correction/by_pool/h100/head_tokens" not in metrics
    # The kept sets are exact all the same, and the loss is theirs.
    assert metrics["correction/sc_tail_ratio"] == 1.0


def test_a_tail_twice_the_trainers_is_seen_as_two(rank, samples):
    watched = [
        with_heads(rank, samples[0], tail_times=2.0, tokens=3),
        with_heads(rank, samples[1], tail_times=1.0, tokens=3),
        *samples[2:],
    ]
    metrics = rank.train_step(watched, step=1, version=2).metrics
    assert metrics["correction/by_pool/b200/head_tail_ratio"] == pytest.approx(2.0, rel=1e-3)
    assert metrics["correction/by_pool/h100/head_tail_ratio"] == pytest.approx(1.0, rel=1e-3)
    assert 1.0 < metrics["correction/head_tail_ratio"] < 2.0
    assert metrics["correction/head_tokens"] == 6
    # Every ratio is within MIS's bounds, so the weighted mass is the trainer's: no push at all.
    assert metrics["correction/head_coeff_l1"] < 1e-5


def test_the_push_of_an_unweighted_loss_is_the_mass_that_moved(make_rank, model_dir, samples):
    rank = make_rank(algo={"importance": "none"})
    rank.load(model_dir)
    watched = [with_heads(rank, samples[0], tail_times=2.0), *samples[1:]]
    metrics = rank.train_step(watched, step=1, version=2).metrics
    # |q - p| is 1 - P over the head, whose mass is 1 - 2 (1 - P), and as much over the tail.
    tail = 1 - metrics["correction/head_mass_trainer"]
    assert tail > 1e-3
    assert metrics["correction/head_coeff_l1"] == pytest.approx(2 * tail, rel=1e-3)


def test_heads_change_neither_loss_nor_gradient(make_rank, model_dir, samples):
    plain, watched = make_rank(), make_rank()
    for rank in (plain, watched):
        rank.load(model_dir)
    bare = plain.train_step(samples, step=1, version=2).metrics
    headed = [with_heads(watched, sample, tail_times=1.5) for sample in samples]
    assert all(batch.head_tokens_H is not None for batch in pack_samples(headed, max_tokens=256))
    seen = watched.train_step(headed, step=1, version=2).metrics
    for key in ("loss/policy", "loss/grad_norm", "mismatch/k3_kl", "correction/sc_coeff_l1"):
        assert seen[key] == bare[key]
    assert not [key for key in bare if "head_" in key]


def test_weights_that_are_no_function_of_the_ratio_still_show_the_tail(
    make_rank, model_dir, samples
):
    rank = make_rank(algo={"importance": "ppo", "centering": False, "low": 0.8, "high": 1.2})
    rank.load(model_dir)
    watched = [with_heads(rank, samples[0], tail_times=1.5), *samples[1:]]
    metrics = rank.train_step(watched, step=1, version=2).metrics
    assert metrics["correction/head_tail_ratio"] == pytest.approx(1.5, rel=1e-3)
