"""Tiny random models of the classes that a trainer must hold, by what is special about each."""

from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB = 512
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

CONFIGS = {
    "dense, tied head": lambda: Qwen3Config(
        **SIZES, intermediate_size=96, tie_word_embeddings=True
    ),
    "dense, head of its own": lambda: LlamaConfig(
        **SIZES, intermediate_size=96, tie_word_embeddings=False
    ),
    "experts, tied head": lambda: Qwen3MoeConfig(
        **SIZES, **EXPERTS, norm_topk_prob=True, tie_word_embeddings=True
    ),
    "hybrid": lambda: Qwen3_5TextConfig(
        **SIZES, **HYBRID, intermediate_size=96, tie_word_embeddings=True
    ),
    "hybrid with experts, head of its own": lambda: Qwen3_5MoeTextConfig(
        **SIZES,
        **HYBRID,
        **EXPERTS,
        shared_expert_intermediate_size=32,
        tie_word_embeddings=False,
    ),
}


def save_model(name, folder):
    import torch

    torch.manual_seed(0)
    config = CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return type(model).__name__
