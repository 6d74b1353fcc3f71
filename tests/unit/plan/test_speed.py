"""The decode roofline against numbers worked by hand and published reference figures."""

import pytest

from rlmix.config.schema.pools import AcceleratorConfig
from rlmix.plan.accelerators import architecture, multiplies, peak_tflops
from rlmix.plan.model_facts import REFERENCE, ModelFacts, bundled_facts, facts_from_config
from rlmix.plan.speed import (
    ModelledSpeed,
    Numbers,
    decode_step_s,
    experts_read,
    modelled_speed,
    step_bytes,
)

QWEN = bundled_facts(REFERENCE)


def chip(
    memory_gb: float,
    bandwidth_tb_s: float,
    bf16: float,
    fp8: float | None = None,
    nvfp4: float | None = None,
    capability: str | None = "9.0",
) -> AcceleratorConfig:
    return AcceleratorConfig(
        memory_gb=memory_gb,
        bandwidth_tb_s=bandwidth_tb_s,
        bf16_tflops=bf16,
        fp8_tflops=fp8,
        nvfp4_tflops=nvfp4,
        compute_capability=capability,
        link="NVLink",
        ray_label="X",
        usd_per_hour=3.6,
        price_source="a test",
    )


B300 = chip(275, 8.0, 2250, 4500, 13125, "10.3")
H200 = chip(141, 4.8, 989, 1979)
A100 = chip(80, 2.04, 312, capability="8.0")


def numbers(weights: str, kv: str = "fp8", activations: str = "bf16") -> Numbers:
    return Numbers(weights=weights, activations=activations, kv=kv, state="bf16")


def hand() -> ModelFacts:
    """A decoder of one layer with 4 experts, 2 for a token: attention 4 x 4 x 4, one expert 3 x 4 x
    2, router 16, norms 8 + 4, embedding and head 40 each."""
    return facts_from_config(
        "hand",
        {
            "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
            "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 10, "num_experts": 4,
            "num_experts_per_tok": 2, "moe_intermediate_size": 2,
        },
    )  # fmt: skip


@pytest.mark.parametrize(("batch", "touched"), [(1, 8), (16, 101), (64, 222), (128, 252)])
def test_expected_number_of_experts_read_grows_with_the_batch(batch: int, touched: int) -> None:
    assert experts_read(QWEN, batch) == pytest.approx(touched, abs=1.0)


def test_bytes_of_a_step_worked_by_hand() -> None:
    # Head 40, router 16 and norms 12 x 2; attention 64 x 2; two experts of 24 x 2; 5 tokens of
    # cache, 8 elements each x 2.
    bf16 = step_bytes(hand(), numbers("bf16", "bf16"), batch=1, context_tokens=5)
    assert bf16 == 2 * (40 + 16 + 12) + 2 * 64 + 2 * 2 * 24 + 2 * 5 * 8
    # NVFP4 for the experts only: half a byte and a sixteenth each.
    nvfp4 = step_bytes(hand(), numbers("nvfp4:experts", "bf16"), batch=1, context_tokens=5)
    assert bf16 - nvfp4 == 2 * 24 * (2 - 0.5625)
    # Two tokens touch 4 - 4 x 0.5^2 = 3 of 4 experts, and read two caches.
    two = step_bytes(hand(), numbers("bf16", "bf16"), batch=2, context_tokens=5)
    assert two - bf16 == 2 * 24 + 80


def test_the_slower_of_reading_and_multiplying_decides() -> None:
    reads = chip(1000, 1e-9, 1e9)  # 1000 bytes a second, endless arithmetic.
    step_s = decode_step_s(hand(), reads, numbers("bf16", "bf16"), tp=1, batch=1, context_tokens=5)
    assert step_s == pytest.approx(440 / 600)
    multiplies_slowly = chip(1000, 1e9, 1e-9)  # 1000 operations a second.
    flops = 2 * (40 + 16 + 12 + 64 + 2 * 24) + 4 * 4 * 5
    step_s = decode_step_s(
        hand(), multiplies_slowly, numbers("bf16", "bf16"), tp=1, batch=1, context_tokens=5
    )
    assert step_s == pytest.approx(flops / 400)


def test_recurrent_state_is_read_and_written_by_every_step() -> None:
    one = step_bytes(QWEN, numbers("nvfp4:experts"), batch=1, context_tokens=0)
    weights = QWEN.dense_bytes("nvfp4:experts") + 40 * 8 * QWEN.expert_bytes("nvfp4")
    # 30 layers x 32 heads x 128 x 128 in BF16, and 30 x 8192 x 3 of the convolution.
    state = 30 * 32 * 128 * 128 * 2 + 30 * 8192 * 3 * 2
    assert one - weights == pytest.approx(2 * state)


def test_b300_in_nvfp4_decodes_the_reference_at_about_twenty_thousand_tokens_a_second() -> None:
    # 20.4 k in the notes' own table, which was computed with the same assumptions.
    speed = modelled(B300, "nvfp4:experts", usd_per_hour=7.1)
    assert speed is not None
    assert speed.batch == 256
    assert speed.tokens_per_s == pytest.approx(20_400, rel=0.05)
    assert speed.usd_per_mtok == pytest.approx(0.097, rel=0.05)


def modelled(
    accelerator: AcceleratorConfig, weights: str, *, usd_per_hour: float | None, tp: int = 1
) -> ModelledSpeed | None:
    return modelled_speed(
        QWEN,
        accelerator,
        numbers(weights),
        tp=tp,
        memory_frac=0.88,
        context_tokens=8192,
        max_batch=256,
        usd_per_hour=usd_per_hour,
    )


def test_reference_in_bf16_needs_two_a100() -> None:
    assert modelled(A100, "bf16", usd_per_hour=1) is None
    pair = modelled(A100, "bf16", usd_per_hour=1, tp=2)
    assert pair is not None
    assert pair.batch > 100
    # The price of a token counts both accelerators.
    assert pair.usd_per_mtok == pytest.approx(1e6 * 2 / 3600 / pair.tokens_per_s)


def test_without_a_price_there_is_a_speed_and_no_cost() -> None:
    speed = modelled(B300, "nvfp4:experts", usd_per_hour=None)
    assert speed is not None
    assert speed.usd_per_mtok is None


def test_narrower_weights_are_never_slower() -> None:
    steps = [
        decode_step_s(QWEN, B300, numbers(w), tp=1, batch=64, context_tokens=8192)
        for w in ("nvfp4", "fp8", "bf16")
    ]
    assert steps == sorted(steps)


def test_products_run_at_the_rate_of_the_activations() -> None:
    assert peak_tflops(H200, "fp8") == 1979
    assert peak_tflops(H200, "bf16") == 989
    assert (multiplies(H200, "nvfp4"), multiplies(H200, "fp8"), multiplies(A100, "fp8")) == (
        False,
        True,
        False,
    )
    assert multiplies(A100, "bf16")


@pytest.mark.parametrize(
    ("capability", "expected"),
    [("10.3", "sm100"), ("10.0", "sm100"), ("9.0", "sm90"), ("8.0", "sm80"), ("12.0", "sm120"),
     (None, "npu")],
)  # fmt: skip
def test_kernels_follow_the_architecture(capability: str | None, expected: str) -> None:
    assert architecture(chip(80, 1, 1, capability=capability)) == expected
