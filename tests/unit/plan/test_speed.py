"""The decode roofline against numbers worked by hand and published reference figures."""

import pytest

from rlmix.config.schema.pools import AcceleratorConfig
from rlmix.plan.model_shape import QWEN36_35B_A3B, ModelShape, shape_from_config
from rlmix.plan.speed import (
    ModelledSpeed,
    decode_step_s,
    experts_read,
    is_weight_only,
    modelled_speed,
    peak_tflops,
    step_bytes,
)


def chip(
    memory_gb: float, bandwidth_tb_s: float, bf16: float, fp8: float | None, nvfp4: float | None
) -> AcceleratorConfig:
    return AcceleratorConfig(
        memory_gb=memory_gb,
        bandwidth_tb_s=bandwidth_tb_s,
        bf16_tflops=bf16,
        fp8_tflops=fp8,
        nvfp4_tflops=nvfp4,
        compute_capability="9.0",
        ray_label="X",
        usd_per_hour=3.6,
    )


B300 = chip(275, 8.0, 2250, 4500, 13125)
H200 = chip(141, 4.8, 989, 1979, None)
A100 = chip(80, 2.04, 312, None, None)
HAND = ModelShape(
    name="hand", embedding=10, head=100, linear=1000, other=0, expert=10, expert_layers=2,
    experts=4, experts_per_token=2, kv_elements=8, attention_flops=16,
)  # fmt: skip


def test_reference_model_has_its_published_parameter_counts() -> None:
    assert QWEN36_35B_A3B.params == pytest.approx(34.7e9, rel=0.01)
    assert QWEN36_35B_A3B.active_params == pytest.approx(2.95e9, rel=0.01)


@pytest.mark.parametrize(("batch", "touched"), [(1, 8), (16, 101), (64, 222), (128, 252)])
def test_expected_number_of_experts_read_grows_with_the_batch(batch: int, touched: int) -> None:
    assert experts_read(QWEN36_35B_A3B, batch) == pytest.approx(touched, abs=1.0)


def test_bytes_of_a_step_worked_by_hand() -> None:
    # Batch 1: head 100 x 2, linear 1000 x 1, experts 10 x 2 layers x 2 x 1, cache 8 x 5 tokens x 1.
    assert step_bytes(HAND, weights="fp8", kv="fp8", batch=1, context_tokens=5) == 1280
    # BF16 doubles everything that fp8 halves: 200 + 2000 + 80 + 80.
    assert step_bytes(HAND, weights="bf16", kv="bf16", batch=1, context_tokens=5) == 2360
    # Two tokens touch 4 - 4 x 0.5^2 = 3 of 4 experts.
    assert step_bytes(HAND, weights="fp8", kv="fp8", batch=2, context_tokens=5) == 1340


def test_the_slower_of_reading_and_multiplying_decides() -> None:
    reads = chip(1000, 1e-9, 1e9, 1e9, 1e9)  # 1000 bytes a second, endless arithmetic.
    step_s = decode_step_s(HAND, reads, weights="fp8", kv="fp8", tp=1, batch=1, context_tokens=5)
    assert step_s == pytest.approx(1280 / 600)
    multiplies = chip(1000, 1e9, 1e-9, 1e-9, None)  # 1000 operations a second.
    flops = 2 * (100 + 1000 + 10 * 2 * 2) + 16 * 5
    step_s = decode_step_s(
        HAND, multiplies, weights="bf16", kv="fp8", tp=1, batch=1, context_tokens=5
    )
    assert step_s == pytest.approx(flops / 400)


def test_b300_in_nvfp4_decodes_the_reference_at_about_twenty_thousand_tokens_a_second() -> None:
    speed = modelled(B300, weights="nvfp4", usd_per_hour=7.1)
    assert speed is not None
    assert speed.batch == 256
    assert speed.tokens_per_s == pytest.approx(20_400, rel=0.05)
    assert speed.usd_per_mtok == pytest.approx(0.097, rel=0.05)


def modelled(
    accelerator: AcceleratorConfig, *, weights: str, usd_per_hour: float, tp: int = 1
) -> ModelledSpeed | None:
    return modelled_speed(
        QWEN36_35B_A3B,
        accelerator,
        weights=weights,
        kv="fp8",
        tp=tp,
        context_tokens=8192,
        max_batch=256,
        usd_per_hour=usd_per_hour,
    )


def test_reference_in_bf16_needs_two_a100() -> None:
    assert modelled(A100, weights="bf16", usd_per_hour=1) is None
    pair = modelled(A100, weights="bf16", usd_per_hour=1, tp=2)
    assert pair is not None
    assert pair.batch > 100
    # The price of a token counts both accelerators.
    assert pair.usd_per_mtok == pytest.approx(1e6 * 2 / 3600 / pair.tokens_per_s)


def test_narrower_weights_are_never_slower() -> None:
    steps = [
        decode_step_s(
            QWEN36_35B_A3B, B300, weights=w, kv="fp8", tp=1, batch=64, context_tokens=8192
        )
        for w in ("nvfp4", "fp8", "bf16")
    ]
    assert steps == sorted(steps)


def test_formats_without_tensor_cores_are_multiplied_in_bf16() -> None:
    assert (peak_tflops(H200, "nvfp4"), is_weight_only(H200, "nvfp4")) == (989, True)
    assert (peak_tflops(H200, "fp8"), is_weight_only(H200, "fp8")) == (1979, False)
    assert (peak_tflops(A100, "fp8"), is_weight_only(A100, "fp8")) == (312, True)
    assert not is_weight_only(A100, "bf16")


def test_dense_models_have_their_mlp_among_the_linears() -> None:
    shape = shape_from_config(
        "dense",
        {
            "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 1, "vocab_size": 10, "intermediate_size": 16,
        },
    )  # fmt: skip
    # Head width 4: q and o 8 x 8 each, k and v 8 x 4 each; MLP 3 x 8 x 16.
    assert shape.linear == 2 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16)
    assert (shape.expert_layers, shape.experts) == (0, 0)
    assert experts_read(shape, 7) == 0.0
