"""Sizes from config.json, held against published totals and models built on the meta device."""

from pathlib import Path
from typing import Any

import pytest

from rlmix.core.errors import PlanError
from rlmix.plan.model_facts import (
    REFERENCE,
    ModelFacts,
    bundled_facts,
    facts_from_config,
    facts_from_file,
)

QWEN = bundled_facts(REFERENCE)

DENSE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 50, "head_dim": 8,
}  # fmt: skip
MOE = {**DENSE, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID: dict[str, Any] = {
    **MOE, "num_hidden_layers": 4, "shared_expert_intermediate_size": 24,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def on_meta(config: Any, kind: Any) -> int:
    """Parameters of a model of this class, without memory for them."""
    import torch

    with torch.device("meta"):
        return sum(parameter.numel() for parameter in kind(config).parameters())


def test_reference_model_has_its_published_sizes() -> None:
    assert QWEN.params == pytest.approx(34.7e9, rel=0.01)
    assert QWEN.active_params == pytest.approx(2.95e9, rel=0.01)
    # The checkpoint's index: 71.9 GB of BF16, with vision tower and the prediction layer.
    assert QWEN.checkpoint_params * 2 == pytest.approx(71.9e9, rel=0.001)
    # Published quantised checkpoints are about 35 to 36 GB (FP8) and 23 GB (NVFP4, experts only);
    # they leave the prediction layer in other formats, the vision tower in BF16.
    assert QWEN.weight_bytes("fp8") == pytest.approx(36e9, rel=0.03)
    assert QWEN.weight_bytes("nvfp4:experts") == pytest.approx(23.5e9, rel=0.03)


def test_reference_model_counts_what_its_class_counts() -> None:
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    config = Qwen3_5MoeConfig()  # The class's defaults are those of this model.
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    counted = on_meta(config, Qwen3_5MoeForConditionalGeneration)
    assert QWEN.params + QWEN.vision == counted == 35_107_181_936


def test_caches_of_the_reference_model() -> None:
    # 10 attention layers x 2 KV heads x 256 x (key and value); 30 x 32 x 128 x 128 of state.
    assert QWEN.kv_bytes_per_token("bf16") == 20_480
    assert QWEN.kv_bytes_per_token("fp8") == 10_240
    assert QWEN.state_elements == 15_728_640
    assert QWEN.state_bytes("fp32") == 4 * 15_728_640 + 2 * 30 * 8192 * 3
    assert QWEN.attention_flops == 163_840


def test_nvfp4_may_leave_everything_but_the_experts() -> None:
    experts_only, whole = QWEN.weight_bytes("nvfp4:experts"), QWEN.weight_bytes("nvfp4")
    assert experts_only - whole == pytest.approx(QWEN.dense_linears * (2 - 0.5625))
    fp8_experts = QWEN.weight_bytes("fp8:experts") - QWEN.weight_bytes("fp8")
    assert fp8_experts == pytest.approx(QWEN.dense_linears * (2 - 1 - 4 / 128**2))


def test_tensor_parallel_sizes_stop_where_fp8_blocks_break() -> None:
    # An expert of width 512 splits into 128-wide slices four times.
    assert QWEN.tp_sizes("fp8") == [1, 2, 4]
    assert QWEN.tp_sizes("bf16") == [1, 2, 4, 8, 16]
    assert QWEN.tp_sizes("nvfp4") == [1, 2, 4, 8, 16]
    assert facts_from_config("moe", MOE).tp_sizes("bf16") == [1, 2, 4]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe", "qwen3_next", "qwen3_5_moe"])
def test_small_models_count_what_their_classes_count(kind: str) -> None:
    import transformers as hf

    layers = {"full_attention_interval": 4, "layer_types": None}
    made: dict[str, tuple[Any, Any]] = {
        "qwen3": (hf.Qwen3Config(**DENSE), hf.Qwen3ForCausalLM),
        "llama": (hf.LlamaConfig(**DENSE, tie_word_embeddings=True), hf.LlamaForCausalLM),
        "qwen3_moe": (
            hf.Qwen3MoeConfig(**MOE, decoder_sparse_step=2, mlp_only_layers=[]),
            hf.Qwen3MoeForCausalLM,
        ),
        "qwen3_next": (hf.Qwen3NextConfig(**HYBRID, **layers), hf.Qwen3NextForCausalLM),
        "qwen3_5_moe": (hf.Qwen3_5MoeTextConfig(**HYBRID), hf.Qwen3_5MoeForCausalLM),
    }
    config, model = made[kind]
    facts = facts_from_config(kind, config.to_dict())
    assert facts.params == on_meta(config, model)
    assert facts.is_moe == (kind not in ("qwen3", "llama"))
    assert facts.is_hybrid == (kind in ("qwen3_next", "qwen3_5_moe"))


def test_a_text_model_inside_another_is_found() -> None:
    nested = facts_from_config("vlm", {"model_type": "x", "text_config": MOE})
    assert nested.params == facts_from_config("text", MOE).params


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": 8}, "num_hidden_layers"),
        ({**DENSE, "kv_lora_rank": 8}, "multi-head latent attention"),
        ({**DENSE, "layer_types": ["mamba"] * 3}, "layer_types (got mamba)"),
        ({**DENSE, "hidden_size": "big"}, "hidden_size='big'; sizes are whole numbers"),
        ({**DENSE, "num_attention_heads": 0}, "num_attention_heads=0"),
        ({**DENSE, "max_position_embeddings": "x"}, "max_position_embeddings='x'"),
        ({"text_config": "qwen"}, "a str in place of an object"),
    ],
)
def test_a_model_of_unknown_shape_is_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(PlanError) as caught:
        facts_from_config("my/model", config)
    assert "model.path=my/model" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"hidden_size": 12,', "cannot be read as JSON"), ("[1, 2]", "holds a list")],
)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        facts_from_file("my/model", path)
    assert str(caught.value).startswith("model.path=my/model: ")
    assert said in str(caught.value)


def test_facts_are_plain_numbers() -> None:
    assert isinstance(QWEN, ModelFacts)
    assert all(
        value is None or isinstance(value, int | str)
        for value in (getattr(QWEN, name) for name in ModelFacts.__slots__)
    )
