import pytest
import torch
from safetensors.torch import load_file, save_file

from rlmix.core.errors import DataError
from rlmix.numerics import fp8, nvfp4, views
from rlmix.numerics.view_config import quantization_config, view_of_config
from rlmix.numerics.view_spec import VIEWS

LAYER = "model.layers.0."
EXPERT = LAYER + "mlp.experts.1."


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    return {
        "model.embed_tokens.weight": weight(24, 32),
        LAYER + "input_layernorm.weight": weight(32),
        LAYER + "self_attn.q_proj.weight": weight(64, 32),
        LAYER + "self_attn.k_proj.weight": weight(32, 32, scale=3.0),
        LAYER + "self_attn.v_proj.weight": weight(32, 32),
        LAYER + "self_attn.o_proj.weight": weight(32, 64),
        LAYER + "self_attn.q_norm.weight": weight(16),
        LAYER + "mlp.gate.weight": weight(2, 32),
        LAYER + "mlp.experts.gate_up_proj": weight(2, 96, 32),
        LAYER + "mlp.experts.down_proj": weight(2, 32, 48),
        "model.norm.weight": weight(32),
        "lm_head.weight": weight(24, 32),
    }


def test_fused_experts_become_one_matrix_per_expert_and_projection():
    fused = state()
    encoded = views.encode_view(fused, "bf16")
    gate_up = fused[LAYER + "mlp.experts.gate_up_proj"][1]
    assert torch.equal(encoded[EXPERT + "gate_proj.weight"], gate_up[:48])
    assert torch.equal(encoded[EXPERT + "up_proj.weight"], gate_up[48:])
    down = fused[LAYER + "mlp.experts.down_proj"][1]
    assert torch.equal(encoded[EXPERT + "down_proj.weight"], down)
    assert not any("gate_up_proj" in name for name in encoded)
    assert views.encode_view(encoded, "bf16").keys() == encoded.keys()


@pytest.mark.parametrize("view", ["fp8", "nvfp4"])
def test_router_norms_embeddings_and_head_keep_their_bits(view):
    original = state()
    encoded = views.encode_view(original, view)
    for name in (
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        LAYER + "mlp.gate.weight",
        LAYER + "input_layernorm.weight",
        LAYER + "self_attn.q_norm.weight",
    ):
        assert torch.equal(encoded[name], original[name])
        assert encoded[name].dtype == torch.bfloat16


def test_fp8_and_nvfp4_use_the_names_and_dtypes_of_the_checkpoints():
    fp8_view = views.encode_view(state(), "fp8")
    name = LAYER + "self_attn.q_proj.weight"
    assert fp8_view[name].dtype == torch.float8_e4m3fn
    assert fp8_view[name + "_scale_inv"].shape == (1, 1)
    nvfp4_view = views.encode_view(state(), "nvfp4")
    assert nvfp4_view[name].dtype == torch.uint8
    assert nvfp4_view[name].shape == (64, 16)
    assert nvfp4_view[name + "_scale"].dtype == torch.float8_e4m3fn
    assert nvfp4_view[name + "_scale"].shape == (64, 2)
    assert nvfp4_view[name + "_scale_2"].dtype == torch.float32


def test_projections_that_engines_fuse_share_one_tensor_scale():
    original = views.encode_view(state(), "bf16")
    encoded = views.encode_view(state(), "nvfp4")

    def scale(name):
        return encoded[f"{name}.weight_scale_2"].item()

    attention = LAYER + "self_attn."
    largest = max(original[f"{attention}{part}_proj.weight"].abs().max() for part in "qkv")
    expected = (largest.float() / 2688).item()
    assert [scale(f"{attention}{part}_proj") for part in "qkv"] == [expected] * 3
    assert scale(EXPERT + "gate_proj") == scale(EXPERT + "up_proj")
    assert scale(EXPERT + "gate_proj") != scale(LAYER + "mlp.experts.0.gate_proj")


def test_decoding_gives_what_the_format_holds_also_after_a_trip_through_a_file(tmp_path):
    original = views.encode_view(state(), "bf16")
    for view in VIEWS:
        path = tmp_path / f"{view}.safetensors"
        save_file(views.encode_view(state(), view), path)
        decoded = views.decode_view(load_file(path), view)
        assert decoded.keys() == original.keys()
        assert all(tensor.dtype == torch.float32 for tensor in decoded.values())
        down = original[EXPERT + "down_proj.weight"]
        expected = {
            "bf16": down.float(),
            "fp8": fp8.quantize_blocks(down).dequantize(),
            "nvfp4": nvfp4.quantize(down).dequantize(),
        }[view]
        assert torch.equal(decoded[EXPERT + "down_proj.weight"], expected)


def test_the_formats_are_ordered_by_error():
    original = views.decode_view(views.encode_view(state(), "bf16"), "bf16")
    name = LAYER + "self_attn.o_proj.weight"
    errors = {}
    for view in VIEWS:
        decoded = views.decode_view(views.encode_view(state(), view), view)
        errors[view] = (decoded[name] - original[name]).abs().mean().item()
    assert errors["bf16"] == 0
    assert 0 < errors["fp8"] < errors["nvfp4"] / 2


def test_config_sections_name_their_view():
    for view in VIEWS:
        section = quantization_config(view)
        config = {} if section is None else {"quantization_config": section}
        assert view_of_config(config) == view
    with pytest.raises(DataError, match="quant_method='awq'"):
        view_of_config({"quantization_config": {"quant_method": "awq"}})


def test_missing_scales_wrong_dtypes_and_unknown_views_say_what_is_wrong():
    encoded = views.encode_view(state(), "nvfp4")
    name = EXPERT + "up_proj.weight"
    del encoded[name + "_scale_2"]
    with pytest.raises(DataError, match=r"experts\.1\.up_proj\.weight_scale_2 is missing"):
        views.decode_view(encoded, "nvfp4")
    with pytest.raises(DataError, match="expected bf16"):
        views.decode_view(views.encode_view(state(), "nvfp4"), "bf16")
    with pytest.raises(DataError, match="views are bf16, fp8, nvfp4"):
        views.encode_view(state(), "int8")


@pytest.mark.parametrize("view", VIEWS)
def test_a_nan_anywhere_is_refused_by_name_in_every_view(view):
    broken = state()
    broken["model.norm.weight"][3] = float("nan")
    with pytest.raises(DataError, match=r"model\.norm\.weight"):
        views.encode_view(broken, view)


def test_a_width_that_nvfp4_cannot_block_is_refused():
    broken = {LAYER + "self_attn.q_proj.weight": torch.ones(8, 24).bfloat16()}
    with pytest.raises(DataError, match="multiple of 16"):
        views.encode_view(broken, "nvfp4")
