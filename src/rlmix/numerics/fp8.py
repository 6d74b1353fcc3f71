"""FP8 E4M3: saturating casts, 128x128 block weights, KV values.

Invariant: no finite input ever becomes NaN. torch's own cast turns magnitudes above 464 into NaN;
the hardware's `satfinite` casts clamp to 448, and so does everything here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.core.errors import DataError
from rlmix.numerics.checks import finite_amax

E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
"""Below it the step between neighbours stays 2^-9."""

_EXPONENT_BITS = 0x7F800000
_STEP_TO_ANCHOR = 1.5 * 2.0**20
"""For x in [2^e, 2^(e+1)) E4M3's step is 2^(e-3), and float32 has that step near 1.5 * 2^(e+20)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8BlockTensor:
    """A weight with one float32 scale per block of rows and columns."""

    data_e4m3: Tensor
    """float8_e4m3fn [N, K]."""
    scale_inv_f32: Tensor
    """float32 [ceil(N / rows), ceil(K / columns)]; multiplied at dequantisation."""
    block: tuple[int, int]

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        rows, columns = self.data_e4m3.shape
        return self.data_e4m3.float() * _spread(self.scale_inv_f32, self.block, rows, columns)


def saturating_cast(values: Tensor) -> Tensor:
    """float8_e4m3fn, nearest with ties to even, magnitudes above 448 become 448."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def nearest_e4m3(values: Tensor) -> Tensor:
    """Nearest E4M3 numbers, ties to even, as float32.

    Adding a number so large that float32's own step there is E4M3's step, and taking it away
    again, rounds exactly; torch's conversion from float8 takes several times as long.

    Args:
        values: float32 of any shape, magnitudes at most 448.
    Returns:
        float32 of the same shape; a negative value that rounds to zero gives +0.
    """
    powers = (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    anchors = powers.clamp_(min=E4M3_MIN_NORMAL).mul_(_STEP_TO_ANCHOR)
    return (values + anchors).sub_(anchors)


def fake_quantize_kv(values: Tensor) -> Tensor:
    """Keys or values as an FP8 KV cache with scale 1.0 returns them, in the input's dtype."""
    if values.dtype == torch.float32:
        nearest = nearest_e4m3(values.clamp(-E4M3_MAX, E4M3_MAX))
        return torch.copysign(nearest, values)
    return saturating_cast(values).to(values.dtype)


def quantize_blocks(
    weight: Tensor, block: tuple[int, int] = (128, 128), *, name: str = "weight"
) -> Fp8BlockTensor:
    """Quantise a weight in blocks, as DeepSeek's and Qwen's FP8 checkpoints do.

    Args:
        weight: floating point [N, K]; edge blocks may be partial. scale = amax / 448 in float32,
            1 for an all-zero block; data = e4m3(weight / scale).
    Raises:
        DataError: not a matrix, NaN, Inf, empty, or not floating point.
    """
    if weight.ndim != 2:
        raise DataError(f"fp8: {name} has shape {tuple(weight.shape)}; expected a matrix [N, K]")
    finite_amax(weight, name=name, convention="fp8")
    values = weight.float()
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % block[1], 0, -rows % block[0]))
    amax = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).amax(dim=(1, 3))
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones(()))
    return Fp8BlockTensor(
        data_e4m3=saturating_cast(values / _spread(scale, block, rows, columns)),
        scale_inv_f32=scale,
        block=block,
    )


def from_parts(
    data: Tensor, scale_inv: Tensor, *, name: str, block: tuple[int, int] = (128, 128)
) -> Fp8BlockTensor:
    """A tensor read from a checkpoint.

    Raises:
        DataError: dtype or shapes are not those of one block-quantised weight.
    """
    if data.dtype != torch.float8_e4m3fn or data.ndim != 2:
        raise DataError(
            f"fp8: {name} is {data.dtype} {tuple(data.shape)}; expected a float8_e4m3fn matrix"
        )
    expected = (-(-data.shape[0] // block[0]), -(-data.shape[1] // block[1]))
    if tuple(scale_inv.shape) != expected:
        raise DataError(
            f"fp8: {name} of shape {tuple(data.shape)} has scales {tuple(scale_inv.shape)}; "
            f"{block[0]}x{block[1]} blocks need {expected}"
        )
    return Fp8BlockTensor(data_e4m3=data, scale_inv_f32=scale_inv.float(), block=block)


def _spread(scale: Tensor, block: tuple[int, int], rows: int, columns: int) -> Tensor:
    """Each block's scale at each of its elements; a view where there is only one block."""
    if scale.numel() == 1:
        return scale.expand(rows, columns)
    spread = scale.repeat_interleave(block[0], dim=0)[:rows]
    return spread.repeat_interleave(block[1], dim=1)[:, :columns]
