"""Activation quantisers: hand-worked numbers, and scalar references in numpy."""

import numpy as np
import pytest
import torch

from rlmix.core.errors import DataError
from rlmix.numerics import fp8, nvfp4
from rlmix.numerics.rounding import E2M1


def test_fp8_activations_have_a_scale_per_token_and_128_channels():
    row = torch.zeros(2, 200)
    row[0, :2] = torch.tensor([448.0, 100.0])  # scale 1: 100 is the tie of 96 and 104, even is 96
    row[0, 128:130] = torch.tensor([4.48, 1.0])  # the last group has 72 elements, scale 0.01
    row[1, 0] = 3.0
    got = fp8.fake_quantize_activations(row)
    assert got.dtype == torch.float32
    assert got.shape == row.shape
    assert got[0, :2].tolist() == [448.0, 96.0]
    # 1 * 100 = 100 again becomes 96.
    torch.testing.assert_close(got[0, 128:130], torch.tensor([4.48, 0.96]))
    torch.testing.assert_close(got[1, 0], torch.tensor(3.0))
    whole_row = fp8.fake_quantize_activations(row, group=None)
    assert whole_row[0, 129].item() == 1.0  # scale 1 for the whole row


def test_power_of_two_scales_round_up():
    # 300 needs 0.67: with 1 the nearest numbers are 288 and 320. 449 needs 1.002: with 2, 448.
    row = torch.tensor([[300.0], [449.0], [448.0], [0.0]])
    got = fp8.fake_quantize_activations(row, "ue8m0")
    assert got.flatten().tolist() == [288.0, 448.0, 448.0, 0.0]
    assert fp8.fake_quantize_activations(row, "fp32")[0].item() == pytest.approx(300.0, rel=1e-6)
    with pytest.raises(DataError, match="known are fp32, ue8m0"):
        fp8.fake_quantize_activations(row, "int8")


def test_nvfp4_activations_worked_by_hand():
    blocks = torch.zeros(5, 16)
    blocks[0, :5] = torch.tensor([6.0, 5.0, 2.4, 0.3, -0.2])  # scale 1
    blocks[1, :2] = torch.tensor([3000.0, 448.0])  # 500 saturates at 448
    blocks[2, 0] = 0.01  # 0.01 / 6 = 0.85 * 2^-9: scale 2^-9, and 5.12 becomes 6
    blocks[3, 0] = 1e-3  # 1e-3 / 6 is below 2^-10: scale 0, all lost
    blocks[4, :2] = torch.tensor([12.0, -1.0])  # scale 2: -0.5 is a code
    got = nvfp4.fake_quantize_activations(blocks)
    assert got[0, :5].tolist() == [6.0, 4.0, 2.0, 0.5, 0.0]
    assert got[1, :2].tolist() == [2688.0, 448.0]
    assert got[2, 0].item() == 6 * 2.0**-9
    assert got[3].abs().sum() == 0
    assert got[4, :2].tolist() == [12.0, -1.0]


def test_the_tensor_scale_moves_the_range_of_block_scales():
    row = torch.zeros(1, 16)
    row[0, :2] = torch.tensor([1e-3, 2.5e-4])
    fine = nvfp4.fake_quantize_activations(row, 2.0**-14)
    # 1e-3 / 6 * 2^14 = 2.73 becomes 2.75; 1e-3 * 2^14 / 2.75 = 5.96 is 6, 1.49 is 1.5.
    step = 2.75 * 2.0**-14
    assert fine[0, :2].tolist() == [6 * step, 1.5 * step]
    assert torch.equal(fine, nvfp4.fake_quantize_activations(row, torch.tensor(2.0**-14)))
    per_token = nvfp4.fake_quantize_activations(row, None)
    torch.testing.assert_close(per_token[0, 0], row[0, 0])  # amax / 2688: the block scale is 448


def nearest(value, grid):
    distances = np.abs(grid - abs(value))
    best = np.flatnonzero(distances == distances.min())
    index = best[0] if len(best) == 1 else best[best % 2 == 0][0]
    return np.copysign(grid[index], value)


def e4m3_grid():
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)]
    return np.array(subnormal + normal[:-1], dtype=np.float32)


def fp8_reference(row, scales):
    out = np.zeros_like(row)
    for start in range(0, len(row), 128):
        group = row[start : start + 128]
        scale = max(np.abs(group).max(), np.float32(1e-10)) / np.float32(448)
        if scales == "ue8m0":
            mantissa, exponent = np.frexp(scale)
            scale = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
        for column, value in enumerate(group * (np.float32(1) / scale)):
            out[start + column] = nearest(min(max(value, -448), 448), e4m3_grid()) * scale
    return out


def nvfp4_reference(row, tensor_scale):
    grid, one = np.array(E2M1, dtype=np.float32), np.float32(1)
    encode = one / np.float32(tensor_scale)
    out = np.zeros_like(row)
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        sixth = np.uint32(0x3E2AAAAB).view(np.float32)
        wanted = np.abs(block).max() * (encode * sixth)
        scale = np.float32(nearest(min(wanted, 448), e4m3_grid()))
        with np.errstate(divide="ignore"):
            inverse = min(one / (scale * (one / encode)), np.finfo(np.float32).max)
        for column, value in enumerate(block * inverse):
            code = np.float32(nearest(value, grid))
            out[start + column] = code * scale * np.float32(tensor_scale)
    return out


@pytest.mark.parametrize("columns", [48, 128, 304])
def test_quantisers_equal_scalar_references(columns):
    generator = torch.Generator().manual_seed(columns)
    rows = torch.randn(3, columns, generator=generator) * torch.tensor([[0.02], [1.0], [700.0]])
    rows = rows.bfloat16()
    for scales in fp8.SCALES:
        expected = [fp8_reference(row.float().numpy(), scales) for row in rows]
        got = fp8.fake_quantize_activations(rows, scales).numpy()
        np.testing.assert_array_equal(got, np.stack(expected))
    for scale in (1.0, 0.013):
        expected = [nvfp4_reference(row.float().numpy(), scale) for row in rows]
        got = nvfp4.fake_quantize_activations(rows, scale).numpy()
        np.testing.assert_array_equal(got, np.stack(expected))


def test_a_token_does_not_depend_on_its_neighbours_and_partial_blocks_are_used_as_they_are():
    rows = torch.randn(64, 200, generator=torch.Generator().manual_seed(0))
    for quantise in (
        fp8.fake_quantize_activations,
        nvfp4.fake_quantize_activations,
        lambda values: nvfp4.fake_quantize_activations(values, None),
    ):
        together = quantise(rows)
        assert torch.equal(together[7:8], quantise(rows[7:8]))
        padded = quantise(torch.nn.functional.pad(rows, (0, 56)))
        assert torch.equal(together, padded[:, :200])
        assert torch.equal(quantise(rows.view(4, 16, 200)).view(64, 200), together)


def test_many_rows_take_the_same_scales_as_few():
    # Above some thousand scales they are rounded by arithmetic instead of by a cast.
    rows = torch.randn(300, 256, generator=torch.Generator().manual_seed(1)) * 5
    got = nvfp4.fake_quantize_activations(rows)
    pieces = [
        nvfp4.fake_quantize_activations(rows[start : start + 10]) for start in range(0, 300, 10)
    ]
    assert torch.equal(got, torch.cat(pieces))
