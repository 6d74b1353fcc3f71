"""NVFP4: E2M1 codes in blocks of 16 along the last axis, an E4M3 scale a block, a float32 a tensor.

Two conventions write the same numbers differently. ModelOpt stores the tensor scale that a value is
multiplied by (amax / 2688), compressed-tensors its inverse (2688 / amax). They also round the block
scale from another product and treat blocks of zeros and tiny blocks otherwise, so that their bytes
are not interchangeable. Invariant: bytes are those of the convention's package, including ties,
zero blocks and saturation; requantising a dequantised tensor with its own scale changes nothing.

Source: nvidia-modelopt 0.47 `NVFP4QTensor`; compressed-tensors 0.20.1 `calculate_qparams`,
`generate_gparam` and `NVFP4PackedCompressor` on float32 ranges; rounding as PTX
`cvt.rn.satfinite.e2m1x2`; 4/6 after arXiv:2512.02010.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlmix.core.errors import DataError
from rlmix.numerics.checks import (
    CHUNK,
    amax_of_blocks,
    amax_over,
    checked,
    chunks,
    refuse_non_finite,
)
from rlmix.numerics.rounding import (
    E2M1,
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN,
    codes_of_e2m1_,
    e2m1_codes_,
    e2m1_from_nibbles,
    e4m3_from_bytes,
    nearest_e2m1,
    nearest_e4m3,
    pack_nibbles,
    round_to_e2m1_,
    sign_bits,
)

BLOCK = 16
"""Elements that share one E4M3 scale."""
CONVENTIONS = ("modelopt", "compressed-tensors")
MAGNITUDES = E2M1

E4M3_MAX_4OVER6 = 256.0
"""Largest block scale with 4-over-6, so that 1.5 times it (384) is an E4M3 number too."""
_ZERO_BLOCK_SCALE = {"modelopt": 1.0, "compressed-tensors": 0.125}
_SMALLEST, _LARGEST = 2.0**-149, torch.finfo(torch.float32).max
"""Positive float32 numbers; a divisor that underflows to 0 would turn zeros into NaN."""
_SATURATES = 7.0
"""From here on the step of 2 above 4 would lead to 8."""
_FEW = 2048
"""Numbers up to which a cast is quicker than arithmetic."""
_SIXTH = 0.16666667163372040
"""float32 0x3E2AAAAB, by which kernels multiply where a division by 6 is meant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NvFp4Tensor:
    """A quantised weight. N rows of K elements, padded with zeros to whole blocks."""

    packed_uint8: Tensor
    """uint8 [..., N, ceil(K / 16) * 8]: two codes a byte, the even element in the low nibble."""
    block_scale_e4m3: Tensor
    """float8_e4m3fn [..., N, ceil(K / 16)]."""
    tensor_scale_f32: Tensor
    """float32 [], as the convention stores it."""
    num_columns: int
    """K before padding."""
    convention: str
    """`modelopt`: the tensor scale multiplies; `compressed-tensors`: it divides."""

    def dequantize(self) -> Tensor:
        """float32 [..., N, K]. `code * block_scale` is exact, so there is one rounding."""
        packed = self.packed_uint8.reshape(-1, BLOCK // 2)
        scales = e4m3_from_bytes(self.block_scale_e4m3.reshape(-1, 1))
        values = torch.empty((len(packed), BLOCK))
        by_tensor = torch.mul if self.convention == "modelopt" else torch.div
        for piece in chunks(len(packed), CHUNK // BLOCK):
            blocks = e2m1_from_nibbles(packed[piece]).mul_(scales[piece])
            by_tensor(blocks, self.tensor_scale_f32, out=values[piece])
        return values.view(*self.packed_uint8.shape[:-1], -1)[..., : self.num_columns]


def quantize(
    weight: Tensor,
    *,
    amax: Tensor | None = None,
    name: str = "weight",
    convention: str = "modelopt",
    four_over_six: bool = False,
) -> NvFp4Tensor:
    """Quantise a weight.

    Args:
        weight: floating point [..., K]; computed in float32. A last block that is not full is
            padded with zeros, as ModelOpt does; compressed-tensors has no such blocks.
        amax: float32 [], the magnitude that decides the tensor scale, when several tensors
            share one (gate and up; q, k and v). None: the weight's own. Larger values saturate.
        name: how an error calls the tensor.
        convention: whose bytes: `modelopt` or `compressed-tensors`.
        four_over_six: let a block's largest magnitude become 4 instead of 6 where that makes its
            squared error smaller.
    Raises:
        DataError: NaN, Inf, empty, not floating point, unknown convention, or a partial block
            in a convention without.
    """
    if convention not in CONVENTIONS:
        raise DataError(f"nvfp4: convention {convention!r}; known are {', '.join(CONVENTIONS)}")
    source = checked(weight, name=name, convention="nvfp4")
    num_columns = source.shape[-1]
    if num_columns % BLOCK:
        if convention != "modelopt":
            raise DataError(
                f"nvfp4: {name} has {num_columns} columns; {convention} needs a multiple of {BLOCK}"
            )
        source = torch.nn.functional.pad(source, (0, -num_columns % BLOCK))
    blocks = source.reshape(-1, BLOCK)
    per_chunk = CHUNK // BLOCK
    pieces = list(chunks(len(blocks), per_chunk))
    block_amax = torch.cat([amax_of_blocks(blocks[piece], BLOCK) for piece in pieces]).float()
    largest = block_amax.amax()
    refuse_non_finite(largest, weight, name=name, convention="nvfp4")
    tensor_scale, candidates = _scales(
        block_amax, largest if amax is None else amax.float(), convention, four_over_six
    )
    divisors = [_divisors(scale, tensor_scale, convention) for scale in candidates]
    saturates = any((block_amax / by.squeeze(-1)).amax() >= _SATURATES for by in divisors)
    scales = candidates[0]
    packed = torch.empty((len(blocks), BLOCK // 2), dtype=torch.uint8)
    scratch = torch.empty((4, min(per_chunk, len(blocks)), BLOCK)) if four_over_six else packed
    for piece in pieces:
        values = blocks[piece].float()
        if four_over_six:
            pair = [scale[piece] for scale in candidates]
            codes, is_four = _better(
                values,
                pair,
                [divisor[piece] for divisor in divisors],
                saturates=saturates,
                scratch=scratch[:, : len(values)],
            )
            scales[piece] = torch.where(is_four, pair[1], pair[0])
        else:
            codes = e2m1_codes_(values / divisors[0][piece])
        packed[piece] = pack_nibbles(codes)
    shape = source.shape[:-1]
    return NvFp4Tensor(
        packed_uint8=packed.view(*shape, -1),
        block_scale_e4m3=scales.to(torch.float8_e4m3fn).view(*shape, -1),
        tensor_scale_f32=tensor_scale,
        num_columns=num_columns,
        convention=convention,
    )


def _scales(
    block_amax: Tensor, amax: Tensor, convention: str, four_over_six: bool
) -> tuple[Tensor, list[Tensor]]:
    """The tensor scale, and block scales as float32: those that map a block's largest magnitude
    to 6, with 4-over-6 also those that map it to 4."""
    largest = E2M1_MAX * (E4M3_MAX_4OVER6 if four_over_six else E4M3_MAX)
    one = torch.ones(())
    if convention == "modelopt":
        # A tensor of zeros has no magnitude to scale by; 1 keeps the arithmetic finite.
        tensor_scale = amax / largest
        tensor_scale = torch.where(tensor_scale > 0, tensor_scale, one)
        wanted = block_amax / (E2M1_MAX * tensor_scale)
    else:
        tensor_scale = largest / amax.clamp(min=torch.finfo(torch.float32).tiny)
        tensor_scale = torch.where(torch.isfinite(tensor_scale), tensor_scale, one)
        wanted = tensor_scale * (block_amax / E2M1_MAX)
    multiples = (1.0, 1.5) if four_over_six else (1.0,)
    return tensor_scale, [_block_scale(wanted * times, convention) for times in multiples]


def _block_scale(wanted: Tensor, convention: str) -> Tensor:
    if convention == "modelopt":
        wanted = torch.where(wanted == 0, torch.ones(()), wanted)
        return nearest_e4m3(wanted.clamp_(E4M3_MIN, E4M3_MAX))
    rounded = nearest_e4m3(wanted.clamp_(max=E4M3_MAX))
    return torch.where(rounded == 0, torch.tensor(_ZERO_BLOCK_SCALE[convention]), rounded)


def _divisors(scales: Tensor, tensor_scale: Tensor, convention: str) -> Tensor:
    """[blocks, 1]: what values are divided by to become codes."""
    by = scales * tensor_scale if convention == "modelopt" else scales / tensor_scale
    return by.clamp_(min=_SMALLEST).unsqueeze(-1)


def _better(
    values: Tensor,
    scales: list[Tensor],
    divisors: list[Tensor],
    *,
    saturates: bool,
    scratch: Tensor,
) -> tuple[Tensor, Tensor]:
    """Codes with the second of two block scales where its squared error is smaller, else with the
    first; and where that is.

    Errors are in units of the tensor scale, where they neither overflow nor vanish. Without
    `saturates` every magnitude divides to less than 7, which rounds to 6 of itself. `scratch` is
    float32 [4, *values.shape]: fresh memory for every step would take longer than the arithmetic.
    """
    scaled, powers, *numbers = scratch.unbind()
    errors = []
    for scale, divisor, number in zip(scales, divisors, numbers, strict=True):
        within = torch.div(values, divisor, out=scaled)
        if saturates:
            within = torch.clamp(scaled, -E2M1_MAX, E2M1_MAX, out=number)
        nearest_e2m1(within, out=number, scratch=powers)
        if number is numbers[-1]:
            # Before the error overwrites it; adding zero turns -0.0 into +0.0.
            signs = sign_bits(torch.add(scaled, 0.0, out=powers))
        errors.append(scaled.sub_(number).square_().sum(-1).mul_(scale).mul_(scale))
    is_four = errors[1] < errors[0]
    # Chosen by masks: torch.where takes three times as long with one flag for 16 elements.
    first, second = (number.view(torch.int32) for number in numbers)
    mask = is_four.to(torch.int32).neg_().unsqueeze(-1)
    chosen = second.bitwise_xor_(first).bitwise_and_(mask).bitwise_xor_(first)
    return codes_of_e2m1_(chosen.view(torch.float32), signs), is_four


def fake_quantize_activations(values: Tensor, tensor_scale: float | Tensor | None = 1.0) -> Tensor:
    """What a W4A4 kernel multiplies by: activations rounded to NVFP4 in blocks of 16.

    Args:
        values: floating point [..., K], a row per token; a last block that is not full is used
            as it is.
        tensor_scale: the layer's `input_scale`; engines use 1 where the checkpoint has none.
            None: each row's own amax / 2688, as with per-token scaling.
    Returns:
        float32 [..., K]: `code * block scale * tensor scale`.

    Source: FlashInfer's quantiser with exact arithmetic (`FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH`);
    its default multiplies by approximate reciprocals, which no CPU has.
    """
    rows = values.float()
    num_columns = rows.shape[-1]
    if num_columns % BLOCK:
        rows = torch.nn.functional.pad(rows, (0, -num_columns % BLOCK))
    blocks = rows.unflatten(-1, (-1, BLOCK))
    amax = amax_over(blocks, -1).unsqueeze_(-1)
    if tensor_scale is None:
        tensor_scale = amax.amax(-2, keepdim=True).div_(E2M1_MAX * E4M3_MAX).clamp_(min=2.0**-126)
    if isinstance(tensor_scale, Tensor):
        encode = 1 / tensor_scale.float()
        decode: float | Tensor = 1 / encode
        sixth: float | Tensor = encode * _SIXTH
    else:
        # float32 arithmetic on plain numbers, which is several operations less.
        scalar = np.float32(1) / np.float32(tensor_scale)
        decode = float(np.float32(1) / scalar)
        sixth = float(scalar * np.float32(_SIXTH))
    scales = _round_scales(amax.mul_(sixth).clamp_(max=E4M3_MAX))
    inverse = (1 / (scales * decode)).clamp_(max=_LARGEST)
    codes = round_to_e2m1_((blocks * inverse).clamp_(-E2M1_MAX, E2M1_MAX)).mul_(scales)
    return codes.mul_(tensor_scale).flatten(-2)[..., :num_columns]


def _round_scales(scales: Tensor) -> Tensor:
    """Nearest E4M3 numbers; of a few, by the cast, which is two operations instead of seven."""
    if scales.numel() <= _FEW:
        return scales.to(torch.float8_e4m3fn).float()
    return nearest_e4m3(scales)


def pack(values: Tensor) -> Tensor:
    """uint8 [..., K / 2] from float32 [..., K] with even K, already divided by the scales."""
    return pack_nibbles(e2m1_codes_(values.clone()))


def unpack(packed: Tensor) -> Tensor:
    """float32 [..., 2 * B] code values from uint8 [..., B]."""
    return e2m1_from_nibbles(packed)


def from_parts(
    packed: Tensor,
    block_scale: Tensor,
    tensor_scale: Tensor,
    *,
    name: str,
    convention: str = "modelopt",
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
        convention=convention,
    )
