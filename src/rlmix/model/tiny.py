"""Shape of the tiny policy: a real Qwen3-MoE class, small enough for one CPU core."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

TINY_SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "router_aux_loss_coef": 0.01,
}
"""128 divides by NVFP4's 16-element and FP8's 128-element blocks."""


def tiny_config(*, vocab_size: int, pad_id: int, end_id: int) -> "Qwen3MoeConfig":
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=end_id,
        use_cache=True,
        **TINY_SHAPE,
    )


def new_tiny_model(
    *, vocab_size: int, pad_id: int, end_id: int, seed: int
) -> "Qwen3MoeForCausalLM":
    """Random float32 weights from `seed`."""
    import torch
    from transformers import Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(vocab_size=vocab_size, pad_id=pad_id, end_id=end_id)
    return Qwen3MoeForCausalLM(config).float()
