"""One checkpoint gives other numbers on other chips: the bundled model on fixed sessions, scored by
the engine's own forward."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlmix.core.errors import ConfigError
from rlmix.engine.embedded.profile import KERNELS, Profile
from rlmix.engine.embedded.shape import read_shape
from rlmix.engine.embedded.weights import load_weights, read_config
from rlmix.model.bundle import resolve_model
from rlmix.numerics import fp8, nvfp4

SCRIPT = Path(__file__).parents[3] / "scripts" / "mismatch_table.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("mismatch_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture(scope="module")
def score(script, tmp_path_factory):
    """A profile's logprobs of 4 sessions' sampled tokens; equal profiles are computed anew."""
    torch.set_num_threads(1)
    model = resolve_model("bundled:tiny")
    folders = script.write_views(model, tmp_path_factory.mktemp("views"))
    sessions = script.sample_sessions(model, folders, num_sessions=4)

    def logprobs(accelerator, weights="bf16", activations="bf16", kv="bf16", attention="triton"):
        profile = Profile(
            accelerator=accelerator,
            weights=weights,
            activations=activations,
            kv=kv,
            attention=attention,
        )
        return script.logprobs(folders, profile, sessions)

    logprobs.folders = folders
    return logprobs


@pytest.fixture(scope="module")
def trainer(score):
    return score("cpu", activations="fp32", kv="fp32")


def gap(first, second):
    return (first - second).abs().mean().item()


def test_one_checkpoint_gives_each_kind_of_chip_its_own_logprobs_and_one_chip_the_same_bits(score):
    kinds = ("b300", "b200", "h200", "h100", "a100", "rtx_pro_6000")
    found = {kind: score(kind) for kind in kinds}
    for index, kind in enumerate(kinds):
        for other in kinds[:index]:
            assert 1e-4 < gap(found[kind], found[other]) < 2e-2, (kind, other)
    assert torch.equal(score("b200"), found["b200"])


def test_coarser_weights_are_farther_from_the_trainer(score, trainer):
    gaps = [gap(score("b200", view, kv="bf16"), trainer) for view in ("bf16", "fp8", "nvfp4")]
    assert 1e-3 < gaps[0] < gaps[1] / 2 < gaps[2] / 3, gaps


def test_quantised_activations_and_an_fp8_cache_each_add_to_the_distance(score, trainer):
    for chip, view, low, high in (("h100", "fp8", 1.1, 3), ("b200", "nvfp4", 1.1, 3)):
        with_bf16 = gap(score(chip, view, "bf16"), trainer)
        with_own = gap(score(chip, view, view), trainer)
        assert low < with_own / with_bf16 < high, (chip, with_bf16, with_own)
    bf16_cache, fp8_cache = (gap(score("a100", kv=kv), trainer) for kv in ("bf16", "fp8"))
    assert fp8_cache > 3 * bf16_cache


def first_layer(score, accelerator, moe="triton", weights="fp8", activations="fp8"):
    profile = Profile(
        accelerator=accelerator,
        weights=weights,
        activations=activations,
        kv="bf16",
        attention="triton",
        moe=moe,
    )
    folder = score.folders[weights]
    shape = read_shape(read_config(folder))
    return load_weights(folder, shape=shape, profile=profile).layers[0], profile


def test_fp8_weights_get_power_of_two_scales_where_deep_gemm_on_sm100_multiplies_them(score):
    on_disk, _ = first_layer(score, "cpu")
    in_powers = fp8.quantize_blocks(on_disk.out.t().bfloat16(), scales="ue8m0").dequantize()
    assert not torch.equal(in_powers, on_disk.out.t())
    for accelerator, expected in (("b200", in_powers), ("h100", on_disk.out.t())):
        layer, profile = first_layer(score, accelerator, moe="deep_gemm")
        assert torch.equal(layer.out.t(), expected[profile.channel_order(128)])
    triton, profile = first_layer(score, "b200")
    deep_gemm, _ = first_layer(score, "b200", moe="deep_gemm")
    assert torch.equal(triton.out, deep_gemm.out)
    assert not torch.equal(triton.down, deep_gemm.down)
    order = profile.channel_order(128)
    assert torch.equal(triton.down, on_disk.down[:, order][:, :, order])


def test_fp8_weights_beside_bf16_inputs_are_rounded_as_marlin_rounds_them(score):
    raw = load_file(score.folders["fp8"] / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    scale = raw[f"{name}_scale_inv"].item()  # 128 x 128: one block
    # BF16 has 8 significant bits and E4M3 has 4, so that products of scales and codes need 12.
    in_bf16 = torch.tensor(scale).bfloat16().double()
    assert in_bf16.item() != scale
    expected = (raw[name].double() * in_bf16).bfloat16().float()
    layer, profile = first_layer(score, "a100", activations="bf16")
    assert torch.equal(layer.out.t(), expected[profile.channel_order(128)])
    exact, _ = first_layer(score, "a100")
    shift = (layer.out - exact.out).abs() / exact.out.abs().clamp(min=1e-12)
    assert 2**-10 < shift.max() < 2**-7


def test_nvfp4_beside_bf16_inputs_has_its_tensor_scale_in_bf16_where_marlin_runs(score):
    raw = load_file(score.folders["nvfp4"] / "model.safetensors")
    scale = raw["model.layers.0.self_attn.o_proj.weight_scale_2"]
    ratio = (scale.bfloat16().double() / scale.double()).item()
    assert 0 < abs(ratio - 1) <= 2**-8
    exact, cutedsl = first_layer(score, "b200", weights="nvfp4", activations="bf16")
    for accelerator in ("h100", "a100", "rtx_pro_6000"):
        layer, profile = first_layer(score, accelerator, weights="nvfp4", activations="bf16")
        assert profile.is_marlin
        found = layer.out[:, profile.channel_order(128).argsort()]
        before = exact.out[:, cutedsl.channel_order(128).argsort()]
        torch.testing.assert_close(found, before * ratio, rtol=3e-7, atol=0)
    _, in_fp4 = first_layer(score, "rtx_pro_6000", weights="nvfp4", activations="nvfp4")
    assert not in_fp4.is_marlin


@pytest.mark.parametrize("accelerator", sorted(KERNELS))
@pytest.mark.parametrize("num_channels", [128, 192, 1024, 48])
def test_the_order_of_channels_keeps_those_that_share_a_scale_together(accelerator, num_channels):
    order = Profile(
        accelerator=accelerator, weights="bf16", activations="bf16", kv="bf16", attention="triton"
    ).channel_order(num_channels)
    if accelerator == "cpu":
        assert order is None
        return
    values = torch.randn(3, num_channels, generator=torch.Generator().manual_seed(1))
    assert sorted(order.tolist()) == list(range(num_channels))
    for quantise in (fp8.fake_quantize_activations, nvfp4.fake_quantize_activations):
        assert torch.equal(quantise(values[:, order]), quantise(values)[:, order])


@pytest.mark.parametrize("accelerator", sorted(KERNELS))
def test_a_prompt_is_the_same_wherever_its_chunk_ends(script, score, accelerator):
    profile = Profile(
        accelerator=accelerator, weights="bf16", activations="bf16", kv="bf16", attention="triton"
    )
    ids = torch.randint(7, 593, (380,), generator=torch.Generator().manual_seed(2)).tolist()

    def kept(num_tokens):
        scorer = script.Scorer(score.folders, profile, num_sessions=1)
        scorer.prompt(0, ids[:num_tokens])
        return scorer.cache.read(0, 0, 200, dtype=torch.float32)

    assert torch.equal(kept(200), kept(300))
    assert torch.equal(kept(200), kept(380))


def test_activations_that_no_kernel_multiplies_the_weights_with_are_refused():
    with pytest.raises(ConfigError, match=r"activations=fp8 with weights=bf16.*activations=bf16"):
        Profile(accelerator="h100", weights="bf16", activations="fp8", kv="bf16", attention="fa3")
