import numpy as np
import pytest
import torch

from rlmix.core.errors import DataError
from rlmix.numerics import fp8


def e4m3_grid() -> np.ndarray:
    """All finite magnitudes of E4M3 by its definition: bias 7, 3 mantissa bits, max 448."""
    subnormal = [mantissa * 2.0**-9 for mantissa in range(8)]
    normal = [
        (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent in range(1, 16)
        for mantissa in range(8)
        if not (exponent == 15 and mantissa == 7)  # that code is NaN
    ]
    return np.array(subnormal + normal, dtype=np.float64)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (448.0, 448.0),
        (464.0, 448.0),  # torch's own cast still gives 448 here ...
        (465.0, 448.0),  # ... and NaN here
        (1e30, 448.0),
        (-465.0, -448.0),
        (432.0, 416.0 + 32.0),  # tie between 416 (mantissa 101) and 448 (110): even is 448
        (400.0, 384.0),  # tie between 384 (100) and 416 (101): even is 384
        (2.0**-9, 2.0**-9),
        (2.0**-10, 0.0),  # tie between 0 and the smallest subnormal
        (3 * 2.0**-10, 2.0**-8),  # tie between subnormals 1 and 2: even is 2
        (-0.0, -0.0),
    ],
)
def test_the_cast_saturates_and_breaks_ties_to_even(value, expected):
    result = fp8.saturating_cast(torch.tensor([value])).float().item()
    assert result == expected
    assert np.signbit(result) == np.signbit(expected)


def test_every_bf16_number_goes_to_a_nearest_e4m3_number():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = bits[torch.isfinite(bits)]
    result = fp8.fake_quantize_kv(finite)
    assert result.dtype == torch.bfloat16
    grid = e4m3_grid()
    values, got = finite.double().numpy(), result.double().numpy()
    clipped = np.minimum(np.abs(values), 448)
    nearest = np.abs(grid[None] - clipped[:, None]).min(axis=1)
    np.testing.assert_array_equal(np.abs(np.abs(got) - clipped), nearest)
    assert np.isin(np.abs(got), grid).all()
    assert (np.signbit(got) == np.signbit(values)).all()


def test_the_float32_path_rounds_like_the_cast_on_every_bf16_number_and_on_ties():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = bits[torch.isfinite(bits)].float()
    grid = torch.from_numpy(e4m3_grid()).float()
    ties = (grid[1:] + grid[:-1]) / 2
    near_ties = torch.cat([torch.nextafter(ties, grid[1:]), torch.nextafter(ties, grid[:-1])])
    for numbers in (values, ties, -ties, near_ties):
        expected = fp8.saturating_cast(numbers).float()
        got = fp8.fake_quantize_kv(numbers)
        assert torch.equal(got, expected)
        assert torch.equal(torch.signbit(got), torch.signbit(expected))


def test_kv_values_that_e4m3_holds_are_unchanged():
    values = torch.tensor([[0.0, 1.0, -1.125, 448.0, 2.0**-9]])
    assert torch.equal(fp8.fake_quantize_kv(values), values)


def test_a_block_weight_worked_by_hand():
    # Blocks of 2x2 on a 3x3 matrix: the edge blocks are partial.
    weight = torch.tensor([[448.0, 100.0, 2.0], [-3.0, 1.0, 0.0], [0.0, 0.0, -896.0]])
    quantised = fp8.quantize_blocks(weight, (2, 2))
    assert quantised.scale_inv_f32.tolist() == [[1.0, np.float32(2) / np.float32(448)], [1.0, 2.0]]
    # 100 lies between 96 and 104, a tie: 96 has the even mantissa (1.5 * 64, 100).
    assert quantised.data_e4m3.float()[:2, :2].tolist() == [[448.0, 96.0], [-3.0, 1.0]]
    torch.testing.assert_close(
        quantised.dequantize(),
        torch.tensor([[448.0, 96.0, 2.0], [-3.0, 1.0, 0.0], [0.0, 0.0, -896.0]]),
    )


def test_the_error_is_at_most_a_sixteenth_or_half_the_smallest_step():
    weight = torch.randn(200, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantised = fp8.quantize_blocks(weight)
    assert quantised.scale_inv_f32.shape == (2, 3)
    error = (quantised.dequantize() - weight.float()).abs()
    smallest_step = quantised.scale_inv_f32.max() * 2.0**-9
    assert (error <= torch.maximum(weight.float().abs() / 16, smallest_step / 2) * 1.0001).all()


def test_requantising_a_dequantised_weight_changes_nothing():
    weight = torch.randn(128, 128, generator=torch.Generator().manual_seed(3))
    once = fp8.quantize_blocks(weight)
    twice = fp8.quantize_blocks(once.dequantize())
    assert torch.equal(once.data_e4m3.float(), twice.data_e4m3.float())


def test_nan_inf_and_wrong_shapes_are_refused_by_name():
    weight = torch.ones(4, 4)
    weight[0, 0] = float("nan")
    with pytest.raises(DataError, match="down_proj"):
        fp8.quantize_blocks(weight, name="down_proj")
    with pytest.raises(DataError, match="matrix"):
        fp8.quantize_blocks(torch.ones(2, 2, 2))
    with pytest.raises(DataError, match=r"blocks need \(2, 1\)"):
        fp8.from_parts(
            torch.ones(200, 100).to(torch.float8_e4m3fn), torch.ones(1, 1), name="q_proj"
        )
