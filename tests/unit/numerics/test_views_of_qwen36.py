"""Views of the Qwen3.6-35B-A3B architecture: which of its tensors are quantised, and whether the
engine's loader agrees. Names come from Transformers' own class; those of multi-token prediction,
which it leaves out, from the published checkpoint."""

import re

import pytest
import torch

from rlmix.core.errors import DataError
from rlmix.numerics.view_config import quantization_config
from rlmix.numerics.view_spec import parse_view
from rlmix.numerics.views import decode_view, encode_view, split_names

MTP = {
    "mtp.fc.weight": (64, 128),
    "mtp.norm.weight": (64,),
    "mtp.layers.0.self_attn.q_proj.weight": (256, 64),
    "mtp.layers.0.mlp.gate.weight": (4, 64),
    "mtp.layers.0.mlp.experts.gate_up_proj": (4, 64, 64),
    "mtp.layers.0.mlp.experts.down_proj": (4, 64, 32),
    "mtp.layers.0.mlp.shared_expert.gate_proj.weight": (32, 64),
}
SPECS = ["fp8", "fp8:experts", "fp8:channels", "nvfp4", "nvfp4:experts"]
SPECS += ["nvfp4:compressed-tensors", "nvfp4:experts:compressed-tensors"]
LAYER = "model.language_model.layers."


@pytest.fixture(scope="module")
def state():
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    text = {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 64, "head_dim": 32}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    text |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text |= {"shared_expert_intermediate_size": 32}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
    config = Qwen3_5MoeConfig(text_config=text, vision_config={**vision, "out_hidden_size": 64})
    with torch.device("meta"):
        model = Qwen3_5MoeForConditionalGeneration(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} | MTP
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()
    }


def quantised_kinds(state, text):
    """Quantised names with numbers taken out."""
    spec = parse_view(text)
    return {re.sub(r"\d+", "N", name) for name in split_names(state) if spec.quantises(name)}


EXPERTS = {f"{LAYER}N.mlp.experts.N.{part}_proj.weight" for part in ("gate", "up", "down")}


def test_experts_are_quantised_in_both_scopes_and_the_other_large_matrices_in_one(state):
    assert quantised_kinds(state, "nvfp4:experts") == EXPERTS
    others = [f"self_attn.{part}_proj" for part in "qkvo"]
    others += [f"linear_attn.{part}" for part in ("in_proj_qkv", "in_proj_z", "out_proj")]
    others += [f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")]
    expected = EXPERTS | {f"{LAYER}N.{name}.weight" for name in others}
    assert quantised_kinds(state, "nvfp4") == expected
    assert quantised_kinds(state, "fp8") == expected


@pytest.mark.parametrize("text", SPECS)
def test_vision_tower_mtp_and_small_projections_pass_through_with_their_bits(state, text):
    encoded = encode_view(state, text)
    for name, tensor in state.items():
        untouched = name.startswith(("mtp.", "model.visual.", "lm_head"))
        small = ("embed_tokens", "norm", "mlp.gate.", "shared_expert_gate", "conv1d", "A_log")
        small = (*small, "dt_bias", "in_proj_a", "in_proj_b")
        if untouched or any(part in name for part in small):
            assert torch.equal(encoded[name], tensor), name
    # Every expert of the text model is split, those of MTP are not.
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in encoded
    assert f"{LAYER}0.mlp.experts.gate_up_proj" not in encoded
    assert decode_view(encoded, text).keys() == set(split_names(state))


def test_projections_that_engines_fuse_share_a_tensor_scale(state):
    encoded = encode_view(state, "nvfp4")
    for group in (
        [f"{LAYER}0.linear_attn.in_proj_{part}" for part in ("qkv", "z")],
        [f"{LAYER}3.self_attn.{part}_proj" for part in "qkv"],
        [f"{LAYER}1.mlp.shared_expert.{part}_proj" for part in ("gate", "up")],
        [f"{LAYER}2.mlp.experts.1.{part}_proj" for part in ("gate", "up")],
    ):
        assert len({encoded[f"{name}.weight_scale_2"].item() for name in group}) == 1
    assert len({encoded[f"{LAYER}3.self_attn.{p}_proj.weight_scale_2"].item() for p in "qo"}) == 2


def sglang_skips(section, module):
    """Whether SGLang 0.5.23 leaves a module unquantised, by its rules for the three methods: parts
    of paths cut at dots, and for compressed-tensors `re:` patterns from the start."""
    ignored = section.get("modules_to_not_convert") or section["ignore"]
    if section["quant_method"] == "compressed-tensors":
        return any(re.match(pattern.removeprefix("re:"), module) for pattern in ignored)
    return any(f".{part}." in f".{module}." for part in ignored)


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_the_loader_takes_for_quantised_exactly_what_is(state, text, prefix):
    section, spec = quantization_config(text), parse_view(text)
    for name in split_names(state):
        is_matrix = name.endswith(".weight") and "norm" not in name and "patch_embed" not in name
        if is_matrix:
            module = name.removesuffix(".weight").replace("model.language_model.", prefix)
            assert sglang_skips(section, module) != spec.quantises(name), name
    # The loader asks about the experts of a layer as one module.
    assert not sglang_skips(section, f"{prefix}layers.0.mlp.experts")
    assert sglang_skips(section, "mtp.layers.0.mlp.experts")


def test_fp8_decodes_a_checkpoint_of_channels_to_what_it_holds(state):
    name = f"{LAYER}3.self_attn.o_proj.weight"
    encoded = encode_view(state, "fp8:channels")
    assert encoded[f"{name}_scale"].shape == (64, 1)
    error = decode_view(encoded, "fp8:channels")[name] - state[name].float()
    assert 0 < error.abs().max() <= state[name].abs().max() / 16


def test_a_model_without_experts_has_no_view_of_experts_only():
    dense = {"model.layers.0.mlp.up_proj.weight": torch.ones(16, 16).bfloat16()}
    with pytest.raises(DataError, match=r"no expert matrices .*; use nvfp4 without `experts`"):
        encode_view(dense, "nvfp4:experts")


def test_a_bf16_matrix_where_the_view_has_a_quantised_one_is_refused_and_the_other_way(state):
    with pytest.raises(DataError, match=r"out_proj\.weight_scale is missing"):
        decode_view(encode_view(state, "nvfp4:experts"), "nvfp4")
    with pytest.raises(DataError, match="expected bf16"):
        decode_view(encode_view(state, "nvfp4"), "nvfp4:experts")


def test_compressed_tensors_reads_its_sections():
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for text in ("nvfp4:compressed-tensors", "fp8:experts:channels"):
        section = dict(quantization_config(text))
        assert quantization.QuantizationConfig.model_validate(section).ignore == section["ignore"]
