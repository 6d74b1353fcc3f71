"""The trainer rank on a tiny random policy: steps, faults, resume, publishing."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rlmix.core.errors import DataError, TrainerError, WeightSyncError
from rlmix.trainer.checkpoint import load_checkpoint
from rlmix.weights.store import verify_version


def on_policy(rank, samples, **changes):
    """The same samples as if the trainer itself had sampled them (kept sets of one id)."""
    result = []
    for sample in samples:
        sizes = sample.mask.astype(np.int64)
        result.append(
            dataclasses.replace(
                sample,
                kept_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
                kept_ids=sample.ids[sample.mask],
                kept_logprobs=np.zeros(int(sizes.sum()), dtype=np.float32),
                sampler_logprobs=np.zeros(len(sample.ids), dtype=np.float32),
                **changes,
            )
        )
    return result


def without_kept(sample, **changes):
    return dataclasses.replace(
        sample, kept_offsets=None, kept_ids=None, kept_logprobs=None, **changes
    )


def mean_logprob(rank, sample):
    return float(rank.score_samples([sample])[0][sample.mask].mean())


def test_a_step_reports_what_the_contract_names(make_rank, model_dir, samples):
    rank = make_rank()
    facts = rank.load(model_dir)
    assert facts["resumed"] is False
    assert facts["vocab_size"] == 512
    result = rank.train_step(samples, step=1, version=2)
    assert result.applied
    assert result.pools == ("b200", "h100")
    for key in (
        "loss/policy", "loss/grad_norm", "loss/entropy", "loss/skipped_steps",
        "mismatch/k3_kl", "mismatch/mean_abs", "mismatch/max_abs",
        "mismatch/by_pool/h100/k3_kl", "mismatch/by_pool/b200/mean_abs", "mismatch/by_lag/0/k3_kl",
        "correction/masked_frac", "correction/ess_frac", "correction/sc_coeff_l1",
        "staleness/mean_versions", "staleness/max_versions", "time/train_s",
        "trainer/tokens", "trainer/policy_tokens", "trainer/padding_frac",
    ):  # fmt: skip
        assert math.isfinite(result.metrics[key]), key
    assert result.metrics["correction/sc_tail_ratio"] == 1.0
    assert result.metrics["staleness/max_versions"] == 2
    assert result.metrics["trainer/policy_tokens"] == sum(int(s.mask.sum()) for s in samples)
    assert result.metrics["trainer/tokens"] == sum(len(s.ids) for s in samples)


def test_mismatch_is_trainer_minus_sampler_over_all_policy_tokens(make_rank, model_dir, samples):
    rank = make_rank()
    rank.load(model_dir)
    trainer = rank.score_samples(samples)
    d = np.concatenate(
        [t[s.mask] - s.sampler_logprobs[s.mask] for t, s in zip(trainer, samples, strict=True)]
    )
    metrics = rank.train_step(samples, step=1, version=2).metrics
    assert metrics["mismatch/mean_abs"] == pytest.approx(np.abs(d).mean(), rel=1e-3)
    assert metrics["mismatch/k3_kl"] == pytest.approx((np.expm1(d) - d).mean(), rel=1e-3)
    outside = (np.exp(d) < 0.5) | (np.exp(d) > 5.0)
    assert metrics["correction/masked_frac"] == pytest.approx(outside.mean())


def test_samples_of_the_trainers_own_policy_show_no_mismatch(make_rank, model_dir, samples):
    rank = make_rank(algo={"centering": False})
    rank.load(model_dir)
    bare = [without_kept(sample) for sample in samples]
    own = [
        dataclasses.replace(sample, sampler_logprobs=scores)
        for sample, scores in zip(bare, rank.score_samples(bare), strict=True)
    ]
    metrics = rank.train_step(own, step=1, version=2).metrics
    assert metrics["mismatch/max_abs"] < 0.05  # BF16 kernels differ with the batch's shape
    assert metrics["mismatch/k3_kl"] < 1e-4
    assert metrics["correction/masked_frac"] == 0.0
    assert metrics["correction/ess_frac"] > 0.999


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_good_tokens_become_likelier_and_bad_ones_rarer(make_rank, model_dir, samples, advantage):
    rank = make_rank(algo={"centering": False, "importance": "none"})
    rank.load(model_dir)
    sample = without_kept(samples[0], advantage=advantage)
    before = mean_logprob(rank, sample)
    for step in range(4):
        rank.train_step([sample], step=step, version=2)
    assert (mean_logprob(rank, sample) - before) * advantage > 0.05


def test_learning_rate_zero_changes_nothing(make_rank, model_dir, samples):
    rank = make_rank(optimizer={"lr": 0.0, "weight_decay": 0.0})
    rank.load(model_dir)
    rank.train_step(samples, step=1, version=2)
    state = load_file(Path(rank.publish(3).views[0].path) / "model.safetensors")
    start = load_file(model_dir / "model.safetensors")
    assert all(torch.equal(state[name], tensor) for name, tensor in start.items())


def test_two_steps_saved_and_loaded_continue_bit_for_bit(make_rank, model_dir, samples):
    straight = make_rank()
    straight.load(model_dir)
    for step in (1, 2, 3):
        expected = straight.train_step(samples, step=step, version=2)
    first = make_rank()
    first.load(model_dir)
    for step in (1, 2):
        first.train_step(samples, step=step, version=2)
    first.publish(2)
    path = first.save(2, {"cursor": 32})
    resumed = make_rank()
    facts = resumed.load(path)
    assert (facts["resumed"], facts["step"], facts["version"]) == (True, 2, 2)
    assert facts["extra"] == {"cursor": 32}
    result = resumed.train_step(samples, step=3, version=2)
    timeless = {k for k in result.metrics if not k.startswith("time/")}
    assert {k: result.metrics[k] for k in timeless} == {k: expected.metrics[k] for k in timeless}
    ours = load_checkpoint(Path(resumed.save(3, {}))).optimizer
    theirs = load_checkpoint(Path(straight.save(3, {}))).optimizer
    assert sorted(ours) == sorted(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_checkpoint_loads_as_a_plain_model(make_rank, model_dir, samples):
    from transformers import AutoModelForCausalLM

    rank = make_rank()
    rank.load(model_dir)
    rank.train_step(samples, step=1, version=2)
    path = rank.save(1, {})
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    ids = [3, 1, 4, 1, 5]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].float() / 0.8
    expected = logits.log_softmax(-1)[torch.arange(4), torch.tensor(ids[1:])]
    assert rank.score([ids])[0][1:].tolist() == pytest.approx(expected.tolist(), abs=0.05)


def test_old_checkpoints_are_deleted_and_publishing_still_works(make_rank, model_dir, samples):
    rank = make_rank()
    rank.load(model_dir)
    first = rank.save(1, {})
    resumed = make_rank()
    resumed.load(first)
    for step in (2, 3, 4):
        resumed.save(step, {})
    assert not Path(first).exists()
    verify_version(Path(resumed.publish(1).views[0].path))


def test_published_weights_are_the_trainers_own(make_rank, model_dir, samples):
    rank = make_rank()
    rank.load(model_dir)
    zero = rank.publish(0)
    rank.train_step(samples, step=1, version=2)
    one = rank.publish(1)
    before = load_file(Path(zero.views[0].path) / "model.safetensors")
    after = load_file(Path(one.views[0].path) / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    served = make_rank()
    served.load(one.views[0].path)
    ids = list(range(30))
    assert served.score([ids])[0].tolist() == rank.score([ids])[0].tolist()
    with pytest.raises(TrainerError, match="cannot publish version 0 after 1"):
        rank.publish(0)
    assert rank.publish(1).views[0].was_there
    rank.train_step(samples, step=2, version=2)
    with pytest.raises(WeightSyncError, match="with other bytes"):
        rank.publish(1)


def test_scores_do_not_depend_on_company_or_order(make_rank, model_dir):
    rank = make_rank()
    rank.load(model_dir)
    lists = [[7, 8, 9, 10], [1], list(range(60)), [5, 6]]
    together = rank.score(lists)
    assert [len(scores) for scores in together] == [4, 1, 60, 2]
    assert together[1].tolist() == [0.0]
    for ids, scores in zip(lists, together, strict=True):
        assert rank.score([ids])[0].tolist() == pytest.approx(scores.tolist(), abs=0.05)
    colder = rank.score([lists[0]], temperature=0.1)[0]
    assert colder.tolist() != together[0].tolist()


def test_a_step_without_signal_leaves_the_weights_alone(make_rank, model_dir, samples):
    rank = make_rank()
    rank.load(model_dir)
    before = rank.publish(0)
    result = rank.train_step(
        [dataclasses.replace(sample, advantage=0.0) for sample in samples], step=1, version=2
    )
    assert not result.applied
    assert not result.is_fault
    assert result.skip_reason.startswith("no signal")
    assert result.metrics["loss/grad_norm"] == 0.0
    assert result.metrics["mismatch/k3_kl"] > 0
    assert rank.publish(0).views[0].was_there
    assert before.version == 0


def test_tokens_without_signal_stay_in_the_denominator(make_rank, model_dir, samples):
    # Adding a sample of advantage 0 must shrink the loss by its share of tokens
    with_signal, silent = samples[0], dataclasses.replace(samples[1], advantage=0.0)
    losses = []
    for chosen in ([with_signal], [with_signal, silent]):
        rank = make_rank(optimizer={"lr": 0.0})
        rank.load(model_dir)
        losses.append(rank.train_step(chosen, step=1, version=2).metrics["loss/policy"])
    tokens = [int(s.mask.sum()) for s in (with_signal, silent)]
    assert losses[1] == pytest.approx(losses[0] * tokens[0] / sum(tokens), rel=1e-5)


def test_a_step_that_is_not_finite_keeps_the_weights_and_the_third_one_stops(
    make_rank, model_dir, samples
):
    rank = make_rank()
    rank.load(model_dir)
    rank.publish(0)
    poisoned = [dataclasses.replace(samples[0], advantage=math.nan), *samples[1:]]
    result = rank.train_step(poisoned, step=1, version=2)
    assert not result.applied
    assert result.is_fault
    assert "first in session s0" in result.skip_reason
    assert result.metrics["loss/skipped_steps"] == 1.0
    assert rank.publish(0).views[0].was_there  # the same bytes
    rank.train_step(poisoned, step=2, version=2)
    with pytest.raises(TrainerError, match="step 3: 3 steps in a row were not finite"):
        rank.train_step(poisoned, step=3, version=2)
    assert rank.publish(0).views[0].was_there


def test_a_good_step_between_bad_ones_resets_the_count(make_rank, model_dir, samples):
    rank = make_rank()
    rank.load(model_dir)
    poisoned = [dataclasses.replace(samples[0], advantage=math.inf), *samples[1:]]
    for step in range(5):
        result = rank.train_step(samples if step % 2 else poisoned, step=step, version=2)
        assert result.applied == bool(step % 2)
    assert result.metrics["loss/skipped_steps"] == 3.0


def test_a_token_from_a_newer_version_than_the_trainers_is_refused(make_rank, model_dir, samples):
    rank = make_rank()
    rank.load(model_dir)
    with pytest.raises(DataError, match="of version 2, but the trainer is at 1"):
        rank.train_step(samples, step=1, version=1)


def test_centering_without_recorded_candidates_is_refused(make_rank, model_dir, samples):
    rank = make_rank()
    rank.load(model_dir)
    with pytest.raises(DataError, match="recorded no candidates"):
        rank.train_step([without_kept(samples[0])], step=1, version=2)
    plain = make_rank(algo={"replay": False})
    plain.load(model_dir)
    with pytest.raises(DataError, match=r"with algo\.replay=true"):
        plain.train_step(samples, step=1, version=2)


def test_misuse_is_named(make_rank, model_dir, samples):
    rank = make_rank()
    with pytest.raises(TrainerError, match="call load first"):
        rank.train_step(samples, step=1)
    rank.load(model_dir)
    with pytest.raises(TrainerError, match="step 1 has no samples"):
        rank.train_step([], step=1)
    with pytest.raises(TrainerError, match=r"centering is not defined for algo\.importance=ppo"):
        make_rank(algo={"importance": "ppo"})
    with pytest.raises(TrainerError, match="temperature=0"):
        make_rank(algo={"temperature": 0})
    with pytest.raises(ValueError, match="importance='best'"):
        make_rank(algo={"importance": "best"})


@pytest.mark.parametrize("importance", ["none", "tis", "cispo", "ppo", "gspo"])
def test_every_importance_kind_trains(make_rank, model_dir, samples, importance):
    rank = make_rank(algo={"importance": importance, "centering": False, "low": 0.8, "high": 1.2})
    rank.load(model_dir)
    result = rank.train_step(samples, step=1, version=2)
    assert result.applied
    assert result.metrics["loss/grad_norm"] > 0
