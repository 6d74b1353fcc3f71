"""A small random policy served by an exact engine, and what its trainer says about the tokens."""

from dataclasses import dataclass

import numpy as np
import torch

from rlmix.batch.packing import pack_samples
from rlmix.core.sample import TrainSample
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import parse_request
from rlmix.engine.embedded.scheduler import Scheduler
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.numerics.consistent.shard import Layout

VOCAB, CONTEXT = 311, 640
TEMPERATURE = 0.7


def exact_profile(*, is_fp32: bool = False) -> Profile:
    held = "fp32" if is_fp32 else "bf16"
    return Profile(
        accelerator="b200",
        weights="bf16",
        activations=held,
        kv=held,
        attention="triton",
        consistency="exact",
    )


def write_policy(folder, *, is_moe: bool, seed: int = 0):
    """A random BF16 policy, neither flat nor certain."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": not is_moe,
        "initializer_range": 0.12,
        "pad_token_id": None,
        "eos_token_id": None,
        "bos_token_id": None,
    }
    if is_moe:
        config = Qwen3MoeConfig(
            **sizes, moe_intermediate_size=48, num_experts=6, num_experts_per_tok=2,
            norm_topk_prob=True,
        )  # fmt: skip
    else:
        config = Qwen3Config(**sizes, intermediate_size=96)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def new_scheduler(
    folder, profile: Profile, *, records_routes: bool = False, layout: Layout | None = None
) -> Scheduler:
    shape = read_shape(read_config(folder))
    more = {} if layout is None else {"layout": layout}
    return Scheduler(
        shape,
        profile,
        load_weights(folder, shape=shape, profile=profile),
        version=0,
        max_running=5,
        context_length=CONTEXT,
        max_total_tokens=20 * CONTEXT,
        mask_cap=4096,
        records_routes=records_routes,
        **more,
    )


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of a test."""

    prompt: tuple[int, ...]
    tokens: int = 24
    temperature: float = TEMPERATURE
    top_p: float = 1.0
    seed: int = 0


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def serve(scheduler: Scheduler, asks: list[Ask], *, at_once: int | None = None) -> list:
    """Finished requests; `at_once` are there at the start, a further one comes each step."""
    requests = [request_of(ask, number) for number, ask in enumerate(asks)]
    waiting = list(requests)
    for _ in range(len(waiting) if at_once is None else at_once):
        scheduler.submit(waiting.pop(0))
    while scheduler.has_work or waiting:
        if waiting:
            scheduler.submit(waiting.pop(0))
        scheduler.step()
    return requests


def request_of(ask: Ask, number: int):
    body = {
        "input_ids": list(ask.prompt),
        "sampling_params": {
            "max_new_tokens": ask.tokens,
            "sampling_seed": ask.seed + number,
            "temperature": ask.temperature,
            "top_p": ask.top_p,
        },
        "return_logprob": True,
        "return_routed_experts": True,
        "top_logprobs_num": 6,
    }
    if ask.top_p < 1:
        body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "support"}
    return parse_request(
        body,
        rid=str(number),
        default_seed=0,
        vocab_size=VOCAB,
        context_length=CONTEXT,
        max_total_tokens=20 * CONTEXT,
        eos_ids=(),
    )


def sample_of(request) -> TrainSample:
    """As `batch.samples` makes them, with a head where no kept set is."""
    answer = request.answer(weight_version=0)
    length = request.length
    mask = np.arange(length) >= len(request.prompt)
    has_sets = answer.kept is not None
    chosen = answer.sampling_logprobs if has_sets else answer.logprobs
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[mask] = chosen
    kept = answer.kept if has_sets else answer.head
    fields = {}
    if has_sets:
        fields = {
            "head_offsets": _offsets(answer.head, mask),
            "head_ids": answer.head.ids,
            "head_logprobs": answer.head.logprobs,
        }
    if answer.experts is not None:
        experts = np.full((length, *answer.experts.shape[1:]), -1, dtype=np.int16)
        experts[:-1] = answer.experts
        fields["experts"] = experts
    return TrainSample(
        session_id=f"s{request.rid}",
        ids=request.ids(0, length).astype(np.int32),
        mask=mask,
        sampler_logprobs=logprobs,
        advantage=1.0 if int(request.rid) % 2 else -1.0,
        versions=np.where(mask, 0, -1).astype(np.int32),
        pools=np.where(mask, 0, -1).astype(np.int16),
        pool_names=("b200",),
        kept_offsets=_offsets(kept, mask),
        kept_ids=kept.ids,
        kept_logprobs=kept.logprobs,
        kept_exact=has_sets,
        **fields,
    )


def _offsets(candidates, mask: np.ndarray) -> np.ndarray:
    sizes = np.zeros(len(mask), dtype=np.int64)
    sizes[mask] = candidates.sizes
    return np.concatenate(([0], sizes.cumsum())).astype(np.int32)


@torch.no_grad()
def differences(policy, samples, *, temperature: float = TEMPERATURE) -> tuple[int, int, float]:
    """Numbers that differ in any bit, numbers compared, largest difference: sampled tokens, their
    kept sets, and heads."""
    differ = total = 0
    largest = 0.0
    for batch in pack_samples(samples, max_tokens=1500):
        found = policy.token_logprobs(batch, temperature=temperature, replay=True)
        pairs = [(found.trainer_P, torch.from_numpy(batch.sampler_logprobs_P))]
        for support in (found.support, found.head):
            if support is not None:
                is_slot = ~torch.isneginf(support.sampler_logprobs_TK)
                pairs.append(
                    (support.trainer_logprobs_TK[is_slot], support.sampler_logprobs_TK[is_slot])
                )
        for trainer, sampler in pairs:
            differ += int((trainer != sampler).sum())
            total += trainer.numel()
            largest = max(largest, float((trainer - sampler).abs().max()))
    return differ, total, largest
