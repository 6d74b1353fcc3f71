"""Golden bytes worked by hand for each format; the derivation stands beside each number.

E4M3 byte: sign, 4 exponent bits with bias 7, 3 mantissa bits. 1.0 is exponent 7: 0x38. 448 is
1.75 * 2^8: exponent 15, mantissa 110: 0x7E. E2M1 code: sign, index into 0 .5 1 1.5 2 3 4 6.
"""

import numpy as np
import pytest
import torch

from rlmix.core.errors import DataError
from rlmix.numerics import bf16, fp8, nvfp4


def as_bytes(values):
    return values.contiguous().view(torch.uint8).flatten().tolist()


def test_bf16_rounds_ties_to_even_and_refuses_what_overflows():
    values = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -0.0, 1.0 + 2.0**-8 + 2.0**-20])
    # 1 + 2^-8 lies between 0x3F80 and 0x3F81, 1 + 3 * 2^-8 between 0x3F81 and 0x3F82: even wins.
    expected = [0x3F80, 0x3F82, 0x8000, 0x3F81]
    assert [code & 0xFFFF for code in bf16.cast(values).view(torch.int16).tolist()] == expected
    with pytest.raises(DataError, match=r"bf16: norm of shape \(1,\) holds 1 NaN or Inf"):
        bf16.cast(torch.tensor([3.4e38]), name="norm")


def test_fp8_blocks_of_float32_scales():
    # Two blocks of 1 x 2 per row. amax 448 gives scale 1; amax 896 gives 2; zeros give 1.
    weight = torch.tensor([[448.0, 1.0, -3.0, 896.0], [0.0, -0.0, -100.0, 448.0]])
    made = fp8.quantize_blocks(weight, (1, 2))
    assert made.scale_inv_f32.tolist() == [[1.0, 2.0], [1.0, 1.0]]
    # 448 = 0x7E, 1 = 0x38; -3 / 2 = -1.5: exponent 7, mantissa 100, sign: 0xBC; 896 / 2 = 0x7E.
    # -100 is the tie of 96 (1.5 * 2^6: exponent 13, mantissa 100 = 0x6C) and 104: even is 0x6C.
    assert as_bytes(made.data_e4m3) == [0x7E, 0x38, 0xBC, 0x7E, 0x00, 0x80, 0xEC, 0x7E]


def test_fp8_blocks_of_power_of_two_scales_round_up():
    # 300 / 448 = 0.67 becomes 1: 300 lies between 288 (1.125 * 2^8: 0x79) and 320: 288 is nearer.
    # 449 / 448 becomes 2: 224.5 is nearest to 224 (1.75 * 2^7: exponent 14, mantissa 110: 0x76).
    # 448 / 448 stays 1. A block of zeros counts as 1e-4: 1e-4 / 448 = 2^-22.1 becomes 2^-22.
    weight = torch.tensor([[300.0], [449.0], [448.0], [0.0]])
    made = fp8.quantize_blocks(weight, (1, 1), scales="ue8m0")
    assert made.scale_inv_f32.flatten().tolist() == [1.0, 2.0, 1.0, 2.0**-22]
    assert as_bytes(made.data_e4m3) == [0x79, 0x76, 0x7E, 0x00]


def test_fp8_channels_and_tensors():
    weight = torch.tensor([[896.0, 2.0], [0.0, 0.0], [1.0, -448.0]])
    channels = fp8.quantize_channels(weight)
    assert channels.scale_inv_f32.tolist() == [[2.0], [2.0**-23], [1.0]]
    assert as_bytes(channels.data_e4m3) == [0x7E, 0x38, 0x00, 0x00, 0x38, 0xFE]
    tensor = fp8.quantize_tensor(weight)
    # One scale of 2: 2 / 2 = 1, 1 / 2 = 0x30, -448 / 2 = -224 = 0xF6.
    assert tensor.scale_inv_f32.tolist() == [[2.0]]
    assert as_bytes(tensor.data_e4m3) == [0x7E, 0x38, 0x00, 0x00, 0x30, 0xF6]
    narrow = fp8.quantize_tensor(weight, amax=torch.tensor(448.0))
    assert as_bytes(narrow.data_e4m3)[0] == 0x7E  # 896 saturates


def rows_for_nvfp4():
    weight = torch.zeros(1, 48)
    weight[0, :5] = torch.tensor([6.0, -5.0, 2.4, 0.3, -0.2])
    weight[0, 16:19] = torch.tensor([0.75, 0.3, -0.1])
    return weight


def test_nvfp4_in_modelopts_convention():
    made = nvfp4.quantize(rows_for_nvfp4())
    # amax 6: tensor scale 6 / 2688. Block scales 6 / (6 * 6 / 2688) = 448 (0x7E) and 0.75 * 448 / 6
    # = 56 = 1.75 * 2^5 (exponent 12, mantissa 110: 0x66); a block of zeros has 1 (0x38).
    assert made.tensor_scale_f32.item() == np.float32(6) / np.float32(2688)
    assert as_bytes(made.block_scale_e4m3) == [0x7E, 0x66, 0x38]
    # Block 0 divides by 1: codes 7, -4 is 14, 4, 1, -0 is 8. Block 1 by 0.125: 6, 2.4, -0.8.
    assert as_bytes(made.packed_uint8) == [0xE7, 0x14, 8, *[0] * 5, 0x47, 0x0A, *[0] * 14]


def test_nvfp4_in_compressed_tensors_convention():
    made = nvfp4.quantize(rows_for_nvfp4(), convention="compressed-tensors")
    # The stored scale is the inverse, 2688 / 6 = 448, and a block of zeros has 0.125 (0x20).
    assert made.tensor_scale_f32.item() == 448.0
    assert as_bytes(made.block_scale_e4m3) == [0x7E, 0x66, 0x20]
    assert as_bytes(made.packed_uint8) == [0xE7, 0x14, 8, *[0] * 5, 0x47, 0x0A, *[0] * 14]
    torch.testing.assert_close(made.dequantize(), nvfp4.quantize(rows_for_nvfp4()).dequantize())


def test_a_block_too_small_for_any_scale_depends_on_the_convention():
    weight = torch.zeros(1, 32)
    weight[0, 0], weight[0, 16] = 1.0, 1e-7  # the second block wants 1e-7 * 448 = 4.5e-5
    modelopt = nvfp4.quantize(weight)
    other = nvfp4.quantize(weight, convention="compressed-tensors")
    assert as_bytes(modelopt.block_scale_e4m3) == [0x7E, 0x01]  # the smallest number, 2^-9
    assert as_bytes(other.block_scale_e4m3) == [0x7E, 0x20]  # rounds to 0, so 0.125


@pytest.mark.parametrize("convention", nvfp4.CONVENTIONS)
def test_four_over_six_takes_the_better_of_two_scales_per_block(convention):
    weight = torch.zeros(1, 48)
    weight[0, 0] = 1536.0  # 6 * 256: the tensor scale is 1
    weight[0, 16:21] = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.5])
    weight[0, 32:34] = torch.tensor([6.0, 1.5])
    made = nvfp4.quantize(weight, convention=convention, four_over_six=True)
    # Block 0 fits either way (256, or 384 with code 4), so it keeps 256: 2^8, 0x78. Block 1 would
    # want 4 / 6 and round everything; with scale 1 (0x38) it is exact. Block 2 is exact with 1.
    assert made.tensor_scale_f32.item() == 1.0
    assert as_bytes(made.block_scale_e4m3) == [0x78, 0x38, 0x38]
    expected = [0x07, *[0] * 7, 0x56, 0x24, 0x01, *[0] * 5, 0x37, *[0] * 7]
    assert as_bytes(made.packed_uint8) == expected
    assert torch.equal(made.dequantize(), weight)


def test_four_over_six_is_never_worse_in_a_block_and_better_overall():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16().float()

    def errors(tensor):
        return (tensor.dequantize() - weight).square().unflatten(1, (-1, 16)).sum(-1)

    both = errors(nvfp4.quantize(weight, four_over_six=True))
    # Six only, with the same tensor scale: 6 * 256 instead of 6 * 448.
    six = errors(nvfp4.quantize(weight, amax=weight.abs().amax() * 448 / 256))
    assert (both <= six * 1.0001).all()
    assert both.sum() < 0.9 * six.sum()


def test_extremes_stay_finite_in_every_format():
    largest = torch.finfo(torch.bfloat16).max
    weight = torch.tensor([[largest, -largest, 1e-30, 2.0**-133] * 4, [2.0**-133, 0.0] * 8])
    made = [nvfp4.quantize(weight, convention=name) for name in nvfp4.CONVENTIONS]
    made += [nvfp4.quantize(weight, four_over_six=True), nvfp4.quantize(weight[1:])]
    made += [
        fp8.quantize_blocks(weight),
        fp8.quantize_channels(weight),
        fp8.quantize_tensor(weight),
    ]
    # With scale 2^120 the largest number would round up to 256 * 2^120, which is Inf.
    made += [fp8.quantize_blocks(weight / 2, scales="ue8m0")]
    for tensor in made:
        assert torch.isfinite(tensor.dequantize()).all()
        assert (tensor.dequantize().abs() <= weight.abs().amax() * 1.1).all()
    tiny = torch.full((1, 16), 2.0**-149)
    assert torch.equal(nvfp4.quantize(torch.zeros(1, 16)).packed_uint8, torch.zeros(1, 8).byte())
    assert torch.isfinite(nvfp4.quantize(tiny).dequantize()).all()


def test_kv_values_with_a_calibrated_scale():
    # amax 896 gives scale 2. 300 / 2 = 150 lies between 144 and 160: 144, so 288. 1000 saturates.
    scale = fp8.kv_scale(torch.tensor(896.0)).item()
    assert scale == 2.0
    values = torch.tensor([300.0, -896.0, 1000.0, 0.0]).bfloat16()
    assert fp8.fake_quantize_kv(values, scale).tolist() == [288.0, -896.0, 896.0, 0.0]
    assert fp8.fake_quantize_kv(values).tolist() == [288.0, -448.0, 448.0, 0.0]
    assert fp8.kv_scale(torch.tensor(0.0)).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_quantiser_changes_what_it_is_given_and_every_dtype_gives_the_same_bytes(dtype):
    exact = torch.tensor([[6.0, -5.0, 2.5, 0.25] * 4, [0.0, -0.0, 1.0, 3.0] * 4])
    for quantise in (
        lambda weight: nvfp4.quantize(weight).packed_uint8,
        lambda weight: nvfp4.quantize(weight, four_over_six=True).packed_uint8,
        lambda weight: nvfp4.pack(weight.float()),
        lambda weight: fp8.quantize_blocks(weight).data_e4m3,
        lambda weight: fp8.quantize_channels(weight).data_e4m3,
        lambda weight: fp8.quantize_tensor(weight).data_e4m3,
        fp8.fake_quantize_activations,
        nvfp4.fake_quantize_activations,
        lambda weight: fp8.fake_quantize_kv(weight.float(), 2.0),
        lambda weight: fp8.fake_quantize_kv(weight.float()),
    ):
        weight = exact.to(dtype)
        got = quantise(weight)
        assert torch.equal(weight, exact.to(dtype))
        assert as_bytes(got) == as_bytes(quantise(exact))
