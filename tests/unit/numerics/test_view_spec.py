import pytest

from rlmix.core.errors import DataError
from rlmix.numerics.view_config import quantization_config, spec_of_config, view_of_config
from rlmix.numerics.view_spec import VIEWS, parse_view

TEXTS = [
    "bf16",
    "fp8",
    "fp8:experts",
    "fp8:channels",
    "fp8:experts:channels",
    "nvfp4",
    "nvfp4:experts",
    "nvfp4:compressed-tensors",
    "nvfp4:experts:compressed-tensors",
]
EXPERT = "model.layers.0.mlp.experts.3.up_proj.weight"
ATTENTION = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("text", [*TEXTS, "nvfp4:experts:4over6"])
def test_a_spec_is_its_text_and_says_what_it_is(text):
    spec = parse_view(text)
    assert str(spec) == text
    assert parse_view(str(spec)) == spec
    assert parse_view(spec) is spec
    assert spec.view == text.split(":")[0]


def test_options_may_come_in_any_order_and_what_is_usual_may_be_said():
    assert parse_view("nvfp4:4over6:experts") == parse_view("nvfp4:experts:4over6")
    assert parse_view("nvfp4:all:modelopt") == parse_view("nvfp4")
    assert str(parse_view("fp8:all:blocks")) == "fp8"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int8", "views are bf16, fp8, nvfp4"),
        ("bf16:experts", "bf16 takes no options"),
        ("bf16:plain", "bf16 takes no options"),
        ("fp8:4over6", "at most one each of all, experts, blocks, channels, each after a colon"),
        ("fp8:modelopt", "at most one each of all, experts, blocks, channels"),
        ("nvfp4:experts:all", "at most one each"),
        ("nvfp4:", "at most one each"),
    ],
)
def test_an_option_that_a_view_lacks_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        parse_view(text)


def test_the_scope_decides_about_attention_and_nothing_decides_about_the_router():
    assert parse_view("nvfp4").quantises(ATTENTION)
    assert not parse_view("nvfp4:experts").quantises(ATTENTION)
    for text in ("nvfp4:experts", "fp8:experts", "nvfp4", "fp8"):
        assert parse_view(text).quantises(EXPERT)
        assert not parse_view(text).quantises("model.layers.0.mlp.gate.weight")
    assert not parse_view("bf16").quantises(EXPERT)


@pytest.mark.parametrize("text", TEXTS)
def test_config_json_tells_the_spec_again(text):
    section = quantization_config(text)
    config = {} if section is None else {"quantization_config": section}
    assert str(spec_of_config(config)) == text
    assert view_of_config(config) in VIEWS


def test_four_over_six_tensors_are_ordinary_nvfp4():
    assert quantization_config("nvfp4:4over6") == quantization_config("nvfp4")


def test_the_sections_are_those_that_loaders_parse():
    # Values as ModelOpt 0.47 and compressed-tensors 0.20.1 write them; keys as SGLang 0.5.23 reads.
    modelopt = quantization_config("nvfp4")
    group = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert (modelopt["quant_method"], modelopt["quant_algo"]) == ("modelopt", "NVFP4")
    assert modelopt["config_groups"]["group_0"] == {
        "input_activations": group,
        "weights": group,
        "targets": ["Linear"],
    }
    fp8 = quantization_config("fp8")
    assert (fp8["quant_method"], fp8["activation_scheme"]) == ("fp8", "dynamic")
    assert fp8["weight_block_size"] == [128, 128]
    compressed = quantization_config("nvfp4:compressed-tensors")
    assert compressed["format"] == "nvfp4-pack-quantized"
    only_weights = compressed["config_groups"]["group_0"]
    assert only_weights["input_activations"] is None
    assert only_weights["weights"]["strategy"] == "tensor_group"
    channels = quantization_config("fp8:channels")["config_groups"]["group_0"]
    assert channels["weights"]["strategy"] == "channel"
    assert (
        channels["input_activations"] | {"strategy": "token", "dynamic": True}
        == (channels["input_activations"])
    )


def test_foreign_sections_are_refused_with_what_they_are():
    for section, message in (
        ({"quant_method": "awq"}, "quant_method='awq'"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, r"weight_block_size=\[1, 32\]"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "pack-quantized"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo='FP8'"),
    ):
        with pytest.raises(DataError, match=message):
            spec_of_config({"quantization_config": section})
