"""Routes from an engine in a sampler's number format into the BF16 trainer, bundled policy."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmix.batch.packing import pack_samples
from rlmix.core.sample import TrainSample
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import parse_request
from rlmix.engine.embedded.scheduler import Scheduler
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.model.bundle import resolve_model
from rlmix.numerics import views
from rlmix.numerics.view_config import quantization_config
from rlmix.trainer.policy import Policy

PROFILES = {
    "nvfp4": Profile(
        accelerator="b200", weights="nvfp4", activations="bf16", kv="fp8", attention="trtllm_mha"
    ),
    "fp8": Profile(
        accelerator="h100", weights="fp8", activations="bf16", kv="fp8", attention="fa3"
    ),
}
REQUESTS, PROMPT_TOKENS, NEW_TOKENS = 12, 60, 60


def sampled_by(profile, folder):
    """Samples of an engine that serves the bundled policy in `profile`'s formats."""
    source = resolve_model("bundled:tiny")
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization_config(profile.weights)
    (folder / "config.json").write_text(json.dumps(config))
    state = load_file(source / "model.safetensors")
    save_file(views.encode_view(state, profile.weights), folder / "model.safetensors")
    shape = read_shape(read_config(folder))
    scheduler = Scheduler(
        shape,
        profile,
        load_weights(folder, shape=shape, profile=profile),
        version=0,
        max_running=4,
        context_length=256,
        max_total_tokens=4096,
        mask_cap=4096,
        records_routes=True,
    )
    requests = []
    for number in range(REQUESTS):
        prompt = np.random.default_rng(number).integers(7, shape.vocab_size, PROMPT_TOKENS)
        body = {
            "input_ids": prompt.tolist(),
            "sampling_params": {"max_new_tokens": NEW_TOKENS, "sampling_seed": number},
            "return_logprob": True,
            "return_routed_experts": True,
        }
        requests.append(
            parse_request(
                body,
                rid=str(number),
                default_seed=0,
                vocab_size=shape.vocab_size,
                context_length=256,
                max_total_tokens=4096,
                eos_ids=(),
            )
        )
        scheduler.submit(requests[-1])
    while scheduler.has_work:
        scheduler.step()
    return [sample_of(request) for request in requests]


def sample_of(request):
    answer = request.answer(weight_version=0)
    length = request.length
    mask = np.arange(length) >= PROMPT_TOKENS
    experts = np.full((length, *answer.experts.shape[1:]), -1, dtype=np.int16)
    experts[:-1] = answer.experts
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[mask] = answer.logprobs
    return TrainSample(
        session_id=f"s{request.rid}",
        ids=request.ids(0, length).astype(np.int32),
        mask=mask,
        sampler_logprobs=logprobs,
        advantage=1.0,
        versions=np.where(mask, 0, -1).astype(np.int32),
        pools=np.where(mask, 0, -1).astype(np.int16),
        pool_names=("pool",),
        experts=experts,
    )


@torch.no_grad()
def measured(policy, samples):
    """Mean |trainer - sampler| in nats, and the share of token-layers whose experts agree with the
    record: those that the experts were given, and those that the router itself wanted."""
    gaps, same, agreed, total = [], 0, 0, 0
    for batch in pack_samples(samples, max_tokens=1024):
        given: list[torch.Tensor] = []

        def note(_, args, given=given):
            given.append(args[1])

        layers = policy.model.model.layers
        hooks = [layer.mlp.experts.register_forward_pre_hook(note) for layer in layers]
        found = policy.token_logprobs(batch, temperature=1.0, replay=False)
        for hook in hooks:
            hook.remove()
        given_BTLK = torch.stack(given, 1).view(*batch.ids_BT.shape, len(given), -1).numpy()
        is_real = batch.experts_BTLK[..., 0] >= 0
        pairs = (np.sort(given_BTLK, -1) == np.sort(batch.experts_BTLK, -1)).all(-1)
        same += int(pairs[is_real].sum())
        total += int(is_real.sum())
        agreed += int(found.routing.agreed_BT.sum()) if found.routing is not None else 0
        gaps.append(np.abs(found.trainer_P.numpy() - batch.sampler_logprobs_P))
    return float(np.concatenate(gaps).mean()), same / total, agreed / total


@pytest.mark.parametrize("view", PROFILES)
def test_with_replay_all_routes_agree_and_the_mismatch_does_not_grow(view, tmp_path):
    samples = sampled_by(PROFILES[view], tmp_path / view)
    folder = resolve_model("bundled:tiny")
    gap, same, _ = measured(Policy.load(folder), samples)
    replayed_gap, replayed_same, own = measured(Policy.load(folder, replays_routing=True), samples)
    assert same < 0.995  # The formats do move choices, or this would show nothing.
    assert own < 0.995
    assert replayed_same == 1.0
    assert replayed_gap <= gap
