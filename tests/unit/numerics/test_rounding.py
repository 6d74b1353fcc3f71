import numpy as np
import pytest
import torch

from rlmix.numerics import checks, rounding


def test_every_e4m3_byte_decodes_as_torch_decodes_it():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    expected = every.float()
    assert torch.equal(rounding.e4m3_from_bytes(every).isnan(), expected.isnan())
    finite = every[~expected.isnan()]
    got = rounding.e4m3_from_bytes(finite)
    assert torch.equal(got, finite.float())
    assert torch.equal(got.signbit(), finite.float().signbit())


def test_every_byte_of_two_codes_decodes_to_two_values():
    packed = torch.arange(256, dtype=torch.uint8)
    values = rounding.e2m1_from_nibbles(packed).view(256, 2)
    for byte in (0x00, 0x21, 0x7F, 0x98, 0xF7):
        low, high = byte & 15, byte >> 4
        expected = [(1 - code // 8 * 2) * rounding.E2M1[code % 8] for code in (low, high)]
        assert values[byte].tolist() == expected


@pytest.mark.parametrize("nearest", [rounding.nearest_e4m3, rounding.round_to_e2m1_])
def test_rounding_is_idempotent_monotone_and_odd(nearest):
    largest = 6.0 if nearest is rounding.round_to_e2m1_ else 448.0
    values = torch.linspace(0, largest, 200_001)
    rounded = nearest(values.clone())
    assert torch.equal(nearest(rounded.clone()), rounded)
    assert (rounded[1:] >= rounded[:-1]).all()
    assert torch.equal(nearest(-values), -rounded)
    assert (rounded - values).abs().max() <= (1.0 if largest == 6.0 else 16.0)


def test_codes_of_every_bf16_number_are_those_of_the_nearest_value():
    bits = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16).float()
    values = bits[torch.isfinite(bits) & (bits <= 8)]
    codes = rounding.e2m1_codes_(values.clone()).numpy()
    distance = np.abs(np.array(rounding.E2M1)[None] - np.minimum(values.numpy(), 6.0)[:, None])
    chosen = distance[np.arange(len(codes)), codes]
    np.testing.assert_array_equal(chosen, distance.min(axis=1))
    is_tie = (distance == distance.min(axis=1, keepdims=True)).sum(axis=1) == 2
    assert is_tie.sum() == 7
    assert (codes[is_tie] % 2 == 0).all()


def test_powers_of_two_are_rounded_up_and_kept():
    values = torch.tensor([1.0, 1.0000001, 0.75, 2.0**-20, 3e-5, 448.0])
    expected = [1.0, 2.0, 1.0, 2.0**-20, 2.0**-15, 512.0]
    assert rounding.power_of_two_above(values).tolist() == expected


def test_a_weight_with_power_of_two_scales_is_requantised_from_bf16_once():
    from rlmix.numerics import fp8

    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(7)).bfloat16()
    once = fp8.quantize_blocks(weight).to_power_of_two()
    mantissas, _ = torch.frexp(once.scale_inv_f32)
    assert (mantissas == 0.5).all()
    twice = once.to_power_of_two()
    assert torch.equal(once.dequantize(), twice.dequantize())
    # Values that 128x128 float32 scales hold lie between those that powers of two hold.
    assert not torch.equal(once.dequantize(), fp8.quantize_blocks(weight).dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_largest_magnitude_of_each_block_is_its_own(dtype):
    values = torch.randn(33, 16, generator=torch.Generator().manual_seed(8)).to(dtype)
    values[2] = 0.0
    values[3, 15], values[4, 0] = -9.0, 9.0  # at the edges, where a neighbour might see them
    found = checks.amax_of_blocks(values, 16)
    assert found.dtype == dtype
    assert torch.equal(found, values.abs().amax(1))
    values[5, 7], values[6, 0] = float("nan"), -float("inf")
    found = checks.amax_of_blocks(values, 16)
    assert found.isfinite().tolist() == [row not in (5, 6) for row in range(33)]
