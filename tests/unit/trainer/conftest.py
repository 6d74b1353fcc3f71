"""A tiny mixture-of-experts policy with random weights, and samples drawn near it."""

import dataclasses
import os

import numpy as np
import pytest
import torch

from rlmix.core.sample import TrainSample
from rlmix.trainer.rank import TrainerRank
from rlmix.trainer.spec import AlgoSpec, OptimizerSpec, TrainerSpec

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCAB = 512

ALGO = AlgoSpec(
    importance="mis",
    low=0.5,
    high=5.0,
    centering=True,
    sequence_mask="none",
    sequence_low=0.5,
    sequence_high=2.0,
    veto=0.0,
    average="tokens",
    replay=True,
    routing_replay=False,
    temperature=0.8,
)
OPTIMIZER = OptimizerSpec(
    name="adamw", lr=2e-3, beta1=0.9, beta2=0.98, weight_decay=0.1, grad_clip=1.0, warmup_steps=2
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,  # wide enough that logits are not all alike
    )
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture
def make_rank(tmp_path):
    """Build a rank that is not loaded yet; `algo`, `optimizer`, and spec fields can be changed."""

    def build(*, algo=None, optimizer=None, **changes):
        spec = TrainerSpec(
            algo=dataclasses.replace(ALGO, **(algo or {})),
            optimizer=dataclasses.replace(OPTIMIZER, **(optimizer or {})),
            micro_batch_tokens=256,
            threads=1,
            seed=5,
            checkpoints_dir=str(tmp_path / "checkpoints"),
            keep_checkpoints=2,
            weights_store=str(tmp_path / "weights"),
            views=("bf16",),
        )
        return TrainerRank(dataclasses.replace(spec, **changes))

    return build


@pytest.fixture(scope="session")
def samples():
    """Twelve samples of 20 to 40 tokens, a third of them policy tokens, kept sets of 1 to 12."""
    generator = np.random.default_rng(7)
    return [_sample(generator, index) for index in range(12)]


def _sample(generator, index):
    length = int(generator.integers(20, 41))
    ids = generator.integers(0, VOCAB, length).astype(np.int32)
    mask = generator.random(length) < 0.35
    mask[0], mask[-1] = False, True
    logprobs = np.zeros(length, dtype=np.float32)
    sizes, kept_ids, kept_logprobs = np.zeros(length, dtype=np.int64), [], []
    for t in np.flatnonzero(mask):
        others = np.setdiff1d(generator.permutation(VOCAB)[: generator.integers(1, 12)], ids[t])
        kept = np.concatenate([[ids[t]], others])
        q = np.log(generator.dirichlet(np.full(len(kept), 3.0))).astype(np.float32)
        sizes[t], logprobs[t] = len(kept), q[0]
        kept_ids.append(kept)
        kept_logprobs.append(q)
    return TrainSample(
        session_id=f"s{index}",
        ids=ids,
        mask=mask,
        sampler_logprobs=logprobs,
        advantage=[0.5, -0.5, 0.25, 0.0][index % 4],
        versions=np.where(mask, index % 3, -1).astype(np.int32),
        pools=np.where(mask, 0, -1).astype(np.int16),
        pool_names=("h100",) if index % 2 else ("b200",),
        kept_offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32),
        kept_ids=np.concatenate(kept_ids).astype(np.int32),
        kept_logprobs=np.concatenate(kept_logprobs).astype(np.float32),
        reward=float(index % 2),
    )
