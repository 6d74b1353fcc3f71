"""The same weights, the same tokens, another order of sums."""

import math

import pytest


def test_a_step_measures_its_own_noise_and_it_is_rounding(make_rank, model_dir, samples):
    rank = make_rank()
    rank.load(model_dir)
    metrics = rank.train_step(samples, step=1, version=2).metrics
    # One of the twelve samples, a third of whose 20 to 40 tokens are sampled.
    assert 4 <= metrics["mismatch/noise_floor_tokens"] <= 20
    assert 0 < metrics["mismatch/noise_floor_mean_abs"] < 0.05  # BF16 has 8 bits of mantissa.
    assert metrics["mismatch/noise_floor_max_abs"] >= metrics["mismatch/noise_floor_mean_abs"]
    assert 0 < metrics["mismatch/noise_floor_k3"] < 1e-2
    # These samplers were drawn at random: they are far from the trainer, the trainer is not.
    assert metrics["mismatch/mean_abs"] > 10 * metrics["mismatch/noise_floor_mean_abs"]


def test_it_compares_a_sample_with_itself(make_rank, model_dir, samples):
    """In float32 the order of sums hardly shows; another sample's tokens would."""
    rank = make_rank()
    rank.load(model_dir)
    policy, _ = rank._parts()
    policy.model.float()
    metrics = rank.train_step(samples, step=1, version=2).metrics
    assert metrics["mismatch/noise_floor_max_abs"] < 1e-4
    assert policy.model.config._attn_implementation == "eager"  # As it was before.


def test_each_step_takes_another_micro_batch(make_rank, model_dir, samples):
    rank = make_rank(optimizer={"lr": 1e-12})
    rank.load(model_dir)
    steps = [rank.train_step(samples, step=step, version=2).metrics for step in range(1, 4)]
    assert len({m["mismatch/noise_floor_mean_abs"] for m in steps}) == 3


def test_without_a_second_sample_in_any_micro_batch_there_is_no_measurement(
    make_rank, model_dir, samples
):
    rank = make_rank(micro_batch_tokens=40)
    rank.load(model_dir)
    metrics = rank.train_step(samples[:3], step=1, version=2).metrics
    assert metrics["trainer/micro_batches"] == 3
    assert not [key for key in metrics if key.startswith("mismatch/noise_floor")]


def test_metrics_are_split_by_the_view_of_the_pool(make_rank, model_dir, samples):
    rank = make_rank(pool_views={"h100": "fp8", "b200": "nvfp4"})
    rank.load(model_dir)
    metrics = rank.train_step(samples, step=1, version=2).metrics
    for view, pool in (("fp8", "h100"), ("nvfp4", "b200")):
        assert metrics[f"mismatch/by_view/{view}/k3_kl"] == pytest.approx(
            metrics[f"mismatch/by_pool/{pool}/k3_kl"]
        )
    assert metrics["mismatch/by_position/0-63/tokens"] == metrics["mismatch/tokens"]
    assert metrics["loss/is_non_finite"] == 0.0
    assert all(math.isfinite(value) for value in metrics.values())
