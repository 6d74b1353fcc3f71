"""NVFP4 weights in ModelOpt's convention: 4-bit floats in blocks of 16 along the last axis.

A value is `code * block_scale * tensor_scale`: code in E2M1, one E4M3 scale per block, one float32
scale per tensor. Invariant: packing is bit-exact to the convention, including ties, zero blocks
and saturation; dequantising twice, or requantising a dequantised tensor with the same tensor
scale, changes nothing.

Source: nvidia-modelopt 0.47 `NVFP4QTensor`; rounding as in PTX `cvt.rn.satfinite.e2m1x2`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.core.errors import DataError
from rlmix.numerics.checks import finite_amax

BLOCK = 16
"""Elements that share one E4M3 scale."""

E2M1_MAX, E4M3_MAX = 6.0, 448.0
E4M3_MIN = 2.0**-9
"""Smallest positive E4M3 value (a subnormal)."""

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of codes 0..7; codes 8..15 are their negatives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvFp4Tensor:
    """A quantised weight. N rows of K elements, padded with zeros to whole blocks."""

    packed_uint8: Tensor
    """uint8 [..., N, ceil(K / 16) * 8]: two codes a byte, the even element in the low nibble."""
    block_scale_e4m3: Tensor
    """float8_e4m3fn [..., N, ceil(K / 16)]."""
    tensor_scale_f32: Tensor
    """float32 []."""
    num_columns: int
    """K before padding."""

    def dequantize(self) -> Tensor:
        """float32 [..., N, K]. `code * block_scale` is exact, so there is one rounding."""
        values = unpack(self.packed_uint8)
        blocks = values.unflatten(-1, (-1, BLOCK)) * self.block_scale_e4m3.float().unsqueeze(-1)
        return (blocks * self.tensor_scale_f32).flatten(-2)[..., : self.num_columns]


def quantize(weight: Tensor, *, amax: Tensor | None = None, name: str = "weight") -> NvFp4Tensor:
    """Quantise a weight.

    Args:
        weight: floating point [..., K]; computed in float32.
        amax: float32 [], the magnitude that decides the tensor scale, when several tensors
            share one (gate and up; q, k and v). None: the weight's own. Larger values saturate.
        name: how an error calls the tensor.
    Raises:
        DataError: NaN, Inf, empty, or not floating point.
    """
    own_amax = finite_amax(weight, name=name, convention="nvfp4")
    amax = own_amax if amax is None else amax.float()
    # An all-zero tensor has no magnitude to scale by; 1 keeps the arithmetic finite.
    tensor_scale = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones(()))
    values = weight.float()
    num_columns = values.shape[-1]
    if num_columns % BLOCK:
        values = torch.nn.functional.pad(values, (0, BLOCK - num_columns % BLOCK))
    blocks = values.unflatten(-1, (-1, BLOCK))
    block_scale = blocks.abs().amax(-1) / (E2M1_MAX * tensor_scale)
    block_scale = torch.where(block_scale == 0, torch.ones(()), block_scale)
    block_scale = block_scale.clamp(E4M3_MIN, E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = blocks / (block_scale.float() * tensor_scale).unsqueeze(-1)
    return NvFp4Tensor(
        packed_uint8=pack(scaled.flatten(-2)),
        block_scale_e4m3=block_scale,
        tensor_scale_f32=tensor_scale,
        num_columns=num_columns,
    )


def e2m1_codes(values: Tensor) -> Tensor:
    """Nearest E2M1 codes, ties to the even code, saturating at 6.

    Args:
        values: float32 of any shape, no NaN.
    Returns:
        uint8 of the same shape, 0..15. The sign bit is set for values below 0 only, so -0.0
        gives code 0 while a tiny negative gives 8; both dequantise to 0.
    """
    magnitude = values.abs()
    # E2M1's steps are 0.5 below 2, 1 below 4, 2 above. The codes on these three grids are below;
    # each grid is the smallest exactly where it applies, and round() ties to even.
    code = (magnitude * 2).round_()
    torch.minimum(code, magnitude.round().add_(2), out=code)
    torch.minimum(code, magnitude.mul_(0.5).round_().add_(4), out=code)
    code.clamp_(max=7)
    return code.to(torch.uint8) + (values < 0).to(torch.uint8) * 8


def pack(values: Tensor) -> Tensor:
    """uint8 [..., K / 2] from float32 [..., K] with even K, already divided by the scales."""
    codes = e2m1_codes(values)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """float32 [..., 2 * B] code values from uint8 [..., B]."""
    table = torch.tensor(MAGNITUDES + tuple(-value for value in MAGNITUDES))
    low, high = packed & 0xF, packed >> 4
    return table[torch.stack((low, high), dim=-1).flatten(-2).int()]


def from_parts(
    packed: Tensor, block_scale: Tensor, tensor_scale: Tensor, *, name: str
) -> NvFp4Tensor:
    """A tensor read from a checkpoint.

    Raises:
        DataError: dtypes or shapes are not those of one NVFP4 weight.
    """
    if packed.dtype != torch.uint8 or block_scale.dtype != torch.float8_e4m3fn:
        raise DataError(
            f"nvfp4: {name} has dtypes {packed.dtype} and {block_scale.dtype}; "
            "expected uint8 codes and float8_e4m3fn block scales"
        )
    if packed.shape[-1] * 2 != block_scale.shape[-1] * BLOCK or tensor_scale.numel() != 1:
        raise DataError(
            f"nvfp4: {name} has codes {tuple(packed.shape)}, block scales "
            f"{tuple(block_scale.shape)}, tensor scale {tuple(tensor_scale.shape)}; expected "
            "[N, K/2], [N, K/16] and one number"
        )
    return NvFp4Tensor(
        packed_uint8=packed,
        block_scale_e4m3=block_scale,
        tensor_scale_f32=tensor_scale.float().reshape(()),
        num_columns=packed.shape[-1] * 2,
    )
