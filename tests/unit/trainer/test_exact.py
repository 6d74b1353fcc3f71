"""What an exact engine reported for a token is what the trainer computes, to the bit."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from rlmix.batch.packing import pack_samples
from rlmix.core.errors import ConfigError, TrainerError
from rlmix.engine.embedded.exact import ExactForward
from rlmix.numerics.consistent.contract import CPU_TILING, Tiling
from rlmix.numerics.consistent.shard import Layout
from rlmix.trainer import exact
from rlmix.trainer.exact import ExactPolicy
from rlmix.trainer.policy import Policy
from tests.unit.trainer.exactness import (
    CONTEXT,
    VOCAB,
    Ask,
    differences,
    exact_profile,
    new_scheduler,
    prompt,
    sample_of,
    serve,
    write_policy,
)

FP32 = partial(ExactPolicy, round_to=None)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("exact")
    return {name: write_policy(root / name, is_moe=name == "moe") for name in ("moe", "dense")}


def mixed(top_p=0.9):
    """Prompts of one token to beyond the 512 tokens of a step, siblings, a prefix of another."""
    long = prompt(1, 560)
    return [
        Ask(prompt=prompt(2, 1), tokens=50),
        Ask(prompt=long, tokens=12),
        Ask(prompt=prompt(3, 60), top_p=top_p),
        Ask(prompt=prompt(3, 60), top_p=top_p),
        Ask(prompt=long[:300], top_p=top_p),
        Ask(prompt=prompt(4, 250), tokens=30),  # across the edge of a tile of 256 keys
        Ask(prompt=prompt(5, 2), top_p=0.5, tokens=70),
    ]


@pytest.mark.parametrize("is_fp32", [False, True], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["moe", "dense"])
def test_no_number_of_any_token_differs(name, is_fp32, folders):
    torch.set_num_threads(1)
    scheduler = new_scheduler(folders[name], exact_profile(is_fp32=is_fp32))
    requests = serve(scheduler, mixed(), at_once=2)
    # The next turn of a session finds its own context; chunks and batches are other ones.
    turns = [Ask(prompt=tuple(r.ids(0, r.length)) + prompt(9, 5), top_p=0.8) for r in requests[2:5]]
    requests += serve(scheduler, turns)
    assert all(r.num_cached > 60 for r in requests[-3:])
    policy = Policy.load(folders[name], make=FP32 if is_fp32 else ExactPolicy)
    differ, total, largest = differences(policy, [sample_of(request) for request in requests])
    assert (differ, largest) == (0, 0.0)
    assert total > 2000


def test_a_batch_of_one_and_a_full_batch_report_the_same(folders):
    torch.set_num_threads(1)
    asks = mixed()
    together = serve(new_scheduler(folders["moe"], exact_profile()), asks)
    for number, ask in enumerate(asks):
        apart = serve(new_scheduler(folders["moe"], exact_profile()), [replace(ask, seed=number)])
        assert apart[0].output_ids == together[number].output_ids
        assert apart[0].logprobs == together[number].logprobs
        assert apart[0].sampling_logprobs == together[number].sampling_logprobs


def test_the_native_policy_does_differ(folders):
    """Or the test above would show nothing."""
    torch.set_num_threads(1)
    requests = serve(new_scheduler(folders["moe"], exact_profile()), mixed())
    samples = [sample_of(request) for request in requests]
    differ, total, largest = differences(Policy.load(folders["moe"]), samples)
    assert differ > total / 2
    assert largest > 1e-3


@pytest.mark.parametrize(
    "change",
    [{"kv_tile": 128, "trims": (64,)}, {"probs": torch.bfloat16}],
    ids=["tiles of 128 keys", "probabilities in bf16"],
)
def test_another_tile_or_cast_in_the_trainer_is_seen(change, folders, monkeypatch):
    torch.set_num_threads(1)
    requests = serve(new_scheduler(folders["moe"], exact_profile()), mixed())
    samples = [sample_of(request) for request in requests]
    other: Tiling = replace(CPU_TILING, **change)
    monkeypatch.setattr(exact, "CPU_TILING", other)
    differ, total, _ = differences(Policy.load(folders["moe"], make=ExactPolicy), samples)
    assert 0 < differ < total


def test_two_threads_in_the_trainer_change_nothing(folders):
    torch.set_num_threads(1)
    requests = serve(new_scheduler(folders["moe"], exact_profile()), mixed()[:4])
    torch.set_num_threads(2)
    try:
        policy = Policy.load(folders["moe"], make=ExactPolicy)
        differ, _, _ = differences(policy, [sample_of(request) for request in requests])
    finally:
        torch.set_num_threads(1)
    assert differ == 0


def test_recorded_routes_are_taken_and_are_the_trainers_own(folders):
    torch.set_num_threads(1)
    scheduler = new_scheduler(folders["moe"], exact_profile(), records_routes=True)
    samples = [sample_of(request) for request in serve(scheduler, mixed())]
    policy = Policy.load(folders["moe"], make=ExactPolicy, replays_routing=True)
    assert differences(policy, samples)[0] == 0
    # A route that is not the router's choice is taken all the same, and counted.
    experts = samples[0].experts.copy()
    experts[0, 0] = sorted({0, 1, 2, 3, 4, 5} - set(experts[0, 0].tolist()))[:2]
    changed = [replace(samples[0], experts=experts)]
    assert differences(policy, changed)[0] > 0


@pytest.mark.parametrize("layout", [Layout(tensor=2, experts=2), Layout(tensor=1, experts=2)])
def test_several_processes_report_what_one_does(layout, folders):
    torch.set_num_threads(1)
    scheduler = new_scheduler(folders["moe"], exact_profile(), layout=layout)
    try:
        requests = serve(scheduler, mixed()[1:5])
    finally:
        scheduler.close()
    policy = Policy.load(folders["moe"], make=ExactPolicy)
    assert differences(policy, [sample_of(request) for request in requests])[0] == 0


def test_a_step_reports_a_mismatch_of_exactly_zero_and_learns(folders, make_rank):
    torch.set_num_threads(1)
    scheduler = new_scheduler(folders["moe"], exact_profile())
    samples = [sample_of(request) for request in serve(scheduler, mixed(top_p=0.8)[2:5] * 2)]
    algo = {"temperature": 0.7}
    rank = make_rank(numerics="exact", micro_batch_tokens=1500, algo=algo)
    rank.load(folders["moe"])
    before = rank.score([samples[0].ids.tolist()])[0]
    result = rank.train_step(samples, step=1, version=0)
    for key in ("mean_abs", "max_abs", "by_pool/b200/mean_abs", "noise_floor_max_abs"):
        assert result.metrics[f"mismatch/{key}"] == 0.0
    assert result.metrics["mismatch/by_lag/0/mean_abs"] == 0.0
    assert result.applied
    assert result.metrics["loss/grad_norm"] > 0
    after = rank.score([samples[0].ids.tolist()])[0]
    assert (before[1:] != after[1:]).any()


def test_gradients_are_those_of_the_native_policy(folders):
    """In float32, where two ways to compute the same function agree closely."""
    torch.set_num_threads(1)
    requests = serve(new_scheduler(folders["moe"], exact_profile()), mixed()[2:4])
    samples = [sample_of(request) for request in requests]
    (batch,) = pack_samples(samples, max_tokens=1500)
    gradients = []
    for make in (FP32, None):
        policy = Policy.load(folders["moe"], make=make)
        policy.model.float()
        found = policy.token_logprobs(batch, temperature=0.7, replay=True)
        found.trainer_P.sum().backward()
        gradients.append({name: p.grad for name, p in policy.parameters().items()})
    for name, ours in gradients[0].items():
        error = float((ours - gradients[1][name]).norm() / ours.norm())
        assert error < 1e-4, name


def test_a_model_that_the_operators_do_not_compute_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=32, attention_bias=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(TrainerError, match=r"attention_bias=true.*numerics\.consistency=native"):
        Policy.load(tmp_path, make=ExactPolicy)


def test_channels_that_the_tree_cannot_cut_are_refused_by_both_sides(tmp_path):
    """4 runs of 70 channels are no whole channels."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=70, max_position_embeddings=CONTEXT,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    with pytest.raises(TrainerError, match=r"70 channels.*4 equal runs; set numerics\.consist"):
        Policy.load(tmp_path, make=ExactPolicy)
    with pytest.raises(ConfigError, match=r"70 channels.*4 equal runs; use consistency=native"):
        new_scheduler(tmp_path, exact_profile())


def test_the_engine_reads_its_cache_in_place(folders):
    """Capacity is that of whole tiles; otherwise every step would copy the cache."""
    scheduler = new_scheduler(folders["moe"], exact_profile())
    assert isinstance(scheduler.exact, ExactForward)
    assert scheduler.cache.capacity == CPU_TILING.padded(640) == 640
