"""Small models with random weights, dense and mixture of experts, for the tests."""

import torch
from torch import Tensor

from rlmix.numerics.consistent.model import ModelSpec, ModelTensors, tensors_of
from rlmix.numerics.consistent.pointwise import rope_table

VOCAB, HIDDEN, INNER, EXPERTS, MAX_LENGTH = 97, 64, 96, 6, 768


def new_spec(
    *, is_moe: bool, round_to: torch.dtype | None, heads: int = 4, kv_heads: int = 2
) -> ModelSpec:
    return ModelSpec(
        num_layers=2,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=16,
        rms_eps=1e-6,
        top_k=2 if is_moe else 0,
        norm_topk_prob=True,
        round_to=round_to,
    )


def new_state(spec: ModelSpec, *, seed: int) -> dict[str, Tensor]:
    """BF16 numbers under Hugging Face names."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        return values.bfloat16().to(torch.float32 if spec.round_to is None else torch.bfloat16)

    def norm(size: int) -> Tensor:
        return (1.0 + 0.2 * torch.randn(size, generator=generator)).bfloat16()

    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    state = {
        "model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 8,
        "lm_head.weight": matrix(VOCAB, HIDDEN) * 3,
        "model.norm.weight": norm(HIDDEN),
    }
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        state |= {
            f"{prefix}input_layernorm.weight": norm(HIDDEN),
            f"{prefix}post_attention_layernorm.weight": norm(HIDDEN),
            f"{prefix}self_attn.q_proj.weight": matrix(queries, HIDDEN),
            f"{prefix}self_attn.k_proj.weight": matrix(keys, HIDDEN),
            f"{prefix}self_attn.v_proj.weight": matrix(keys, HIDDEN),
            f"{prefix}self_attn.o_proj.weight": matrix(HIDDEN, queries),
            f"{prefix}self_attn.q_norm.weight": norm(spec.head_dim),
            f"{prefix}self_attn.k_norm.weight": norm(spec.head_dim),
        }
        if spec.top_k:
            state[f"{prefix}mlp.gate.weight"] = matrix(EXPERTS, HIDDEN) * 4
            state[f"{prefix}mlp.experts.gate_up_proj"] = matrix(EXPERTS, 2 * INNER, HIDDEN)
            state[f"{prefix}mlp.experts.down_proj"] = matrix(EXPERTS, HIDDEN, INNER)
        else:
            state[f"{prefix}mlp.gate_proj.weight"] = matrix(INNER, HIDDEN)
            state[f"{prefix}mlp.up_proj.weight"] = matrix(INNER, HIDDEN)
            state[f"{prefix}mlp.down_proj.weight"] = matrix(HIDDEN, INNER)
    return state


def new_model(
    *, is_moe: bool, round_to: torch.dtype | None, seed: int = 0
) -> tuple[ModelTensors, ModelSpec, Tensor]:
    spec = new_spec(is_moe=is_moe, round_to=round_to)
    table = rope_table(MAX_LENGTH, head_dim=spec.head_dim, theta=10000.0)
    return tensors_of(new_state(spec, seed=seed), spec), spec, table
