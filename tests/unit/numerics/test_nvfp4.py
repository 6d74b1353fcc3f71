"""Golden values are worked by hand from the format's definition, never from our own output."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmix.core.errors import DataError
from rlmix.numerics import nvfp4

# (value, code): every tie of E2M1, its neighbours, saturation and signed zeros.
CODES = [
    (0.0, 0),
    (0.25, 0),  # tie between 0 and 0.5: the even code is 0
    (np.nextafter(np.float32(0.25), np.float32(1)), 1),
    (0.5, 1),
    (np.nextafter(np.float32(0.75), np.float32(0)), 1),
    (0.75, 2),  # tie between 0.5 (code 1) and 1 (code 2)
    (1.25, 2),  # tie between 1 (2) and 1.5 (3)
    (np.nextafter(np.float32(1.25), np.float32(2)), 3),
    (np.nextafter(np.float32(1.75), np.float32(0)), 3),
    (1.75, 4),  # tie between 1.5 (3) and 2 (4)
    (2.5, 4),  # tie between 2 (4) and 3 (5)
    (np.nextafter(np.float32(2.5), np.float32(3)), 5),
    (np.nextafter(np.float32(3.5), np.float32(0)), 5),
    (3.5, 6),  # tie between 3 (5) and 4 (6)
    (5.0, 6),  # tie between 4 (6) and 6 (7)
    (np.nextafter(np.float32(5), np.float32(6)), 7),
    (6.0, 7),
    (7.0, 7),  # saturates
    (1e30, 7),
    (-0.0, 0),  # the sign bit says "below zero", and -0.0 is not
    (-1e-9, 8),  # rounds to -0
    (-0.25, 8),
    (-0.75, 10),
    (-5.0, 14),
    (-1e30, 15),
]


@pytest.mark.parametrize(("value", "code"), CODES)
def test_rounding_goes_to_the_nearest_code_and_ties_to_the_even_one(value, code):
    assert nvfp4.e2m1_codes_(torch.tensor([float(value)])).tolist() == [code]


def test_the_low_nibble_is_the_even_element():
    row = torch.tensor([0.5, -6.0, 1.0, 3.0])
    assert nvfp4.pack(row).tolist() == [0xF1, 0x52]
    assert nvfp4.unpack(nvfp4.pack(row)).tolist() == row.tolist()


def test_a_block_worked_by_hand():
    # amax 6 gives tensor scale 6 / (6 * 448) = 1/448. Block 0 has amax 6: scale 6 / (6/448) = 448.
    # Block 1 has amax 0.75: 0.75 * 448 / 6 = 56, which E4M3 holds exactly (1.75 * 2^5).
    weight = torch.zeros(1, 32)
    weight[0, :5] = torch.tensor([6.0, -5.0, 2.4, 0.3, -0.2])
    weight[0, 16:19] = torch.tensor([0.75, 0.3, -0.1])
    quantised = nvfp4.quantize(weight)
    assert quantised.tensor_scale_f32.item() == np.float32(6) / np.float32(2688)
    assert quantised.block_scale_e4m3.float().tolist() == [[448.0, 56.0]]
    # Block 0 divides by 1: 6 -> 7, -5 -> -4 (14), 2.4 -> 2 (4), 0.3 -> 0.5 (1), -0.2 -> -0 (8).
    # Block 1 divides by 0.125: 6 -> 7, 2.4 -> 4, -0.8 -> -1 (10).
    assert quantised.packed_uint8[0, :3].tolist() == [0xE7, 0x14, 0x08]
    assert quantised.packed_uint8[0, 8:10].tolist() == [0x47, 0x0A]
    values = quantised.dequantize()[0]
    torch.testing.assert_close(values[:4], torch.tensor([6.0, -4.0, 2.0, 0.5]))
    torch.testing.assert_close(values[16:19], torch.tensor([0.75, 0.25, -0.125]))


def test_zero_blocks_have_scale_one_and_zero_tensors_stay_zero():
    weight = torch.zeros(2, 32)
    weight[0, 0] = 3.0
    quantised = nvfp4.quantize(weight)
    assert quantised.block_scale_e4m3.float().tolist() == [[448.0, 1.0], [1.0, 1.0]]
    assert torch.equal(nvfp4.quantize(torch.zeros(2, 16)).dequantize(), torch.zeros(2, 16))


def test_the_smallest_block_scale_is_the_smallest_e4m3_number():
    weight = torch.zeros(1, 32)
    weight[0, 0] = 1.0
    weight[0, 16] = 1e-7  # wants scale 1e-7 * 448 = 4.5e-5, far below 2^-9
    quantised = nvfp4.quantize(weight)
    assert quantised.block_scale_e4m3.float()[0, 1].item() == 2.0**-9
    assert quantised.dequantize()[0, 16].item() == 0.0


def test_a_shared_larger_amax_scales_and_a_smaller_one_saturates():
    weight = torch.full((1, 16), 3.0)
    wide = nvfp4.quantize(weight, amax=torch.tensor(6.0))
    assert wide.block_scale_e4m3.float().tolist() == [[224.0]]
    torch.testing.assert_close(wide.dequantize(), weight)
    narrow = nvfp4.quantize(weight, amax=torch.tensor(1.0))
    torch.testing.assert_close(narrow.dequantize(), torch.ones(1, 16))


def test_a_partial_block_is_padded_with_zeros_and_cut_again():
    weight = torch.linspace(-1, 1, 3 * 20).reshape(3, 20)
    quantised = nvfp4.quantize(weight)
    assert quantised.packed_uint8.shape == (3, 16)
    assert quantised.block_scale_e4m3.shape == (3, 2)
    padded = torch.nn.functional.pad(weight, (0, 12))
    assert torch.equal(quantised.dequantize(), nvfp4.quantize(padded).dequantize()[:, :20])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_with_the_tensors_name(bad):
    weight = torch.ones(2, 16)
    weight[1, 3] = bad
    with pytest.raises(DataError, match=r"layers\.0\.q_proj.*1 NaN or Inf"):
        nvfp4.quantize(weight, name="layers.0.q_proj")


def test_empty_and_integer_tensors_are_refused():
    with pytest.raises(DataError, match="is empty"):
        nvfp4.quantize(torch.zeros(0, 16))
    with pytest.raises(DataError, match=r"int64; give bf16"):
        nvfp4.quantize(torch.zeros(2, 16, dtype=torch.int64))


def reference(weight: np.ndarray) -> np.ndarray:
    """The convention in plain numpy float32, one block at a time."""
    grid = np.array(nvfp4.MAGNITUDES, dtype=np.float32)
    tensor_scale = np.abs(weight).max() / np.float32(2688)
    out = np.zeros_like(weight)
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], 16):
            block = weight[row, start : start + 16]
            scale = np.abs(block).max() / (np.float32(6) * tensor_scale)
            scale = np.float32(1) if scale == 0 else np.clip(scale, 2.0**-9, 448)
            scale = torch.tensor(scale).to(torch.float8_e4m3fn).float().numpy()
            for column, value in enumerate(block / (scale * tensor_scale)):
                distance = np.abs(grid - abs(value))
                nearest = np.flatnonzero(distance == distance.min())
                index = nearest[0] if len(nearest) == 1 else nearest[nearest % 2 == 0][0]
                out[row, start + column] = np.copysign(grid[index], value) * scale * tensor_scale
    return out


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), log_spread=st.floats(-3, 3))
def test_quantise_then_dequantise_equals_a_scalar_reference(seed, log_spread):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(3, 48, generator=generator)
    scales = torch.randn(3, 1, generator=generator).mul(log_spread).exp()
    weight = (rows * scales).bfloat16().float()
    np.testing.assert_array_equal(
        nvfp4.quantize(weight).dequantize().numpy(), reference(weight.numpy())
    )


def test_the_error_stays_within_the_formats_bound_and_requantising_changes_nothing():
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    quantised = nvfp4.quantize(weight)
    values = quantised.dequantize()
    amax = weight.float().unflatten(1, (-1, 16)).abs().amax(-1, keepdim=True)
    error = (values - weight.float()).unflatten(1, (-1, 16)).abs()
    # Half the widest step (4 to 6) at a block scale of amax / 6, which E4M3 rounds by up to 1/16.
    assert (error <= amax / 6 * (1 + 1 / 16)).all()
    again = nvfp4.quantize(values, amax=quantised.tensor_scale_f32 * 2688)
    torch.testing.assert_close(again.dequantize(), values, rtol=1e-6, atol=0)


def four_over_six_reference(weight: np.ndarray, amax: float) -> tuple[np.ndarray, np.ndarray]:
    """Decoded values and block scales, a block at a time; errors in float64."""
    grid = np.array(nvfp4.MAGNITUDES, dtype=np.float32)
    tensor_scale = np.float32(amax) / np.float32(6 * 256)
    decoded, scales = np.zeros_like(weight), []
    for index, block in enumerate(weight):
        wanted = np.abs(block).max() / (np.float32(6) * tensor_scale)
        best = None
        for times in (1.0, 1.5):
            clipped = min(max(np.float32(wanted * np.float32(times)), 2.0**-9), 448.0)
            scale = torch.tensor(clipped).to(torch.float8_e4m3fn).float().numpy()
            scaled = block / np.float32(scale * tensor_scale)
            distance = np.abs(grid - np.minimum(np.abs(scaled), 6)[:, None])
            codes = distance.shape[1] - 1 - distance[:, ::-1].argmin(axis=1)
            is_tie = (distance == distance.min(axis=1, keepdims=True)).sum(axis=1) == 2
            codes = np.where(is_tie & (codes % 2 == 1), codes - 1, codes)
            numbers = np.sign(scaled) * grid[codes]
            error = np.square(numbers.astype(float) - scaled).sum() * float(scale) ** 2
            if best is None or error < best[0]:
                best = error, numbers * scale * tensor_scale, scale
        decoded[index], chosen = best[1], best[2]
        scales.append(float(chosen))
    return decoded, np.array(scales)


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_four_over_six_is_the_block_by_block_reference(share):
    # With a quarter of its amax the tensor saturates: values divide to more than 7.
    weight = torch.randn(256, 16, generator=torch.Generator().manual_seed(6)).bfloat16().float()
    weight *= torch.logspace(-4, 0, 256).unsqueeze(1)
    weight[3] = 0.0
    amax = (weight.abs().amax() * share).bfloat16().float()
    made = nvfp4.quantize(weight, amax=amax, four_over_six=True)
    decoded, scales = four_over_six_reference(weight.numpy(), amax.item())
    scales[3] = 1.0  # the convention's scale of a block of zeros
    np.testing.assert_array_equal(made.block_scale_e4m3.float().numpy().ravel(), scales)
    np.testing.assert_allclose(made.dequantize().numpy(), decoded, rtol=1e-6, atol=0)
    largest = made.block_scale_e4m3.float().max()
    assert largest == 448 if share < 1 else largest <= 384
