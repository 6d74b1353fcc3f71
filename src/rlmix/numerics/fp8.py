"""FP8 E4M3: saturating casts, weights with a scale per block, channel or tensor, activations, KV.

Invariant: no finite input ever becomes NaN. torch's own cast turns magnitudes above 464 into NaN;
the hardware's `satfinite` casts clamp to 448, and so does everything here.

A value is always `code * scale`. Scales are float32, or powers of two rounded up (UE8M0) where
kernels take nothing else (DeepGEMM on SM100).

Source: 128x128 blocks as in DeepSeek's and Qwen's checkpoints; channels and tensors as
compressed-tensors 0.20.1; activations and powers of two as SGLang 0.5.23 and DeepGEMM.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.core.errors import DataError
from rlmix.numerics.checks import CHUNK, amax_over, checked, chunks, finite_amax, refuse_non_finite
from rlmix.numerics.rounding import E4M3_MAX, e4m3_from_bytes, nearest_e4m3, power_of_two_above

BLOCK = (128, 128)
GROUP = 128
"""Elements of an activation row that share a scale."""
SCALES = ("fp32", "ue8m0")

_SMALLEST_WEIGHT = 1e-4
"""DeepGEMM makes no power-of-two scale for a block whose largest magnitude is below."""
_SMALLEST_ACTIVATION = 1e-10
"""Kernels take this for the largest magnitude of a group that has less; scales stay finite."""
_EPSILON = 2.0**-23
"""compressed-tensors' scale for a channel or tensor of zeros."""
_TALL = 16
"""Blocks of at least so many rows are handled one row of blocks at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8BlockTensor:
    """A weight with one float32 scale per block of rows and columns.

    With a block as long as a row there is a scale per output channel, with one as large as the
    weight a scale per tensor.
    """

    data_e4m3: Tensor
    """float8_e4m3fn [N, K]."""
    scale_inv_f32: Tensor
    """float32 [ceil(N / rows), ceil(K / columns)]; multiplied at dequantisation."""
    block: tuple[int, int]

    def dequantize(self) -> Tensor:
        """float32 [N, K]."""
        values = torch.empty(self.data_e4m3.shape)
        for band, scales in _bands(self.scale_inv_f32, self.block, self.data_e4m3.shape):
            torch.mul(e4m3_from_bytes(self.data_e4m3[band]), scales, out=values[band])
        return values

    def to_power_of_two(self) -> "Fp8BlockTensor":
        """What an SM100 engine with DeepGEMM multiplies by after it loaded this weight:
        dequantised to BF16, then quantised with power-of-two scales."""
        return quantize_blocks(self.dequantize().bfloat16(), self.block, scales="ue8m0")


def saturating_cast(values: Tensor) -> Tensor:
    """float8_e4m3fn, nearest with ties to even, magnitudes above 448 become 448."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def quantize_blocks(
    weight: Tensor,
    block: tuple[int, int] = BLOCK,
    *,
    scales: str = "fp32",
    name: str = "weight",
) -> Fp8BlockTensor:
    """Quantise a weight in blocks, as DeepSeek's and Qwen's FP8 checkpoints do.

    Args:
        weight: floating point [N, K]; edge blocks may be partial. scale = amax / 448 in float32,
            1 for an all-zero block; data = e4m3(weight / scale).
        scales: `fp32`, or `ue8m0`: each rounded up to a power of two, from at least 1e-4 / 448.
    Raises:
        DataError: not a matrix, NaN, Inf, empty, or not floating point.
    """
    _check_scales(scales)
    source = _matrix(weight, name)
    amax = _block_amax(source, block)
    refuse_non_finite(amax, weight, name=name, convention="fp8")
    if scales == "ue8m0":
        scale = power_of_two_above(amax.clamp(min=_SMALLEST_WEIGHT) / E4M3_MAX)
    else:
        scale = _scale(amax)
    return _encode(source, scale, block)


def quantize_channels(weight: Tensor, *, name: str = "weight") -> Fp8BlockTensor:
    """One scale per output channel, float32 [N, 1]; goes with activations of one scale per token.

    Args and Raises: as `quantize_blocks`.
    """
    source = _matrix(weight, name)
    block = (1, source.shape[1])
    amax = _block_amax(source, block)
    refuse_non_finite(amax, weight, name=name, convention="fp8")
    return _encode(source, _scale(amax, of_zeros=_EPSILON), block)


def quantize_tensor(
    weight: Tensor, *, amax: Tensor | None = None, name: str = "weight"
) -> Fp8BlockTensor:
    """One scale for the whole weight, float32 [1, 1].

    Args:
        weight: floating point [N, K].
        amax: float32 [], where several weights share a scale; larger values saturate.
    Raises:
        DataError: as `quantize_blocks`.
    """
    source = _matrix(weight, name)
    own_amax = finite_amax(source, name=name, convention="fp8")
    scale = _scale(own_amax if amax is None else amax.float(), of_zeros=_EPSILON)
    return _encode(source, scale.reshape(1, 1), (source.shape[0], source.shape[1]))


def fake_quantize_activations(
    values: Tensor, scales: str = "fp32", *, group: int | None = GROUP
) -> Tensor:
    """What a W8A8 kernel multiplies by: activations rounded to E4M3 with scales of their own.

    Args:
        values: floating point [..., K], a row per token; a last group that is not full is used
            as it is.
        scales: `fp32`, or `ue8m0` as DeepGEMM on SM100 wants them.
        group: elements that share a scale; None: the whole row, as with per-channel weights.
    Returns:
        float32 [..., K]: `code * scale`, code = e4m3(value * (1 / scale)).
    """
    _check_scales(scales)
    groups = values.float()
    num_columns = groups.shape[-1]
    width = group or num_columns
    is_cut = num_columns > width
    if is_cut:
        groups = torch.nn.functional.pad(groups, (0, -num_columns % width))
        groups = groups.unflatten(-1, (-1, width))
    amax = amax_over(groups, -1).unsqueeze_(-1)
    scale = amax.clamp_(min=_SMALLEST_ACTIVATION).div_(E4M3_MAX)
    if scales == "ue8m0":
        scale = power_of_two_above(scale)
    codes = nearest_e4m3((groups * (1 / scale)).clamp_(-E4M3_MAX, E4M3_MAX)).mul_(scale)
    return codes.flatten(-2)[..., :num_columns] if is_cut else codes


def kv_scale(amax: Tensor) -> Tensor:
    """The `k_scale` or `v_scale` of a layer from the largest magnitude that calibration saw.

    Args:
        amax: float32 [].
    Returns:
        float32 []; 1 where the cache stayed zero.
    """
    return _scale(amax.float())


def fake_quantize_kv(values: Tensor, scale: float = 1.0) -> Tensor:
    """Keys or values as an FP8 KV cache returns them, in the input's dtype.

    Args:
        values: floating point, any shape.
        scale: `k_scale` or `v_scale`; values are divided by it in float32 and multiplied again.
            1 leaves only the cast.
    """
    if scale != 1.0:
        codes = nearest_e4m3((values.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX))
        return codes.mul_(scale).to(values.dtype)
    if values.dtype == torch.float32:
        nearest = nearest_e4m3(values.clamp(-E4M3_MAX, E4M3_MAX))
        return torch.copysign(nearest, values)
    return saturating_cast(values).to(values.dtype)


def from_parts(
    data: Tensor, scale_inv: Tensor, *, name: str, block: tuple[int, int] = BLOCK
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


def _check_scales(scales: str) -> None:
    if scales not in SCALES:
        raise DataError(f"fp8: scales {scales!r} are unknown; known are {', '.join(SCALES)}")


def _matrix(weight: Tensor, name: str) -> Tensor:
    source = checked(weight, name=name, convention="fp8")
    if source.ndim != 2:
        raise DataError(f"fp8: {name} has shape {tuple(source.shape)}; expected a matrix [N, K]")
    return source


def _scale(amax: Tensor, *, of_zeros: float = 1.0) -> Tensor:
    scale = amax / E4M3_MAX
    return torch.where(scale > 0, scale, torch.tensor(of_zeros))


def _encode(source: Tensor, scale: Tensor, block: tuple[int, int]) -> Fp8BlockTensor:
    data = torch.empty(source.shape, dtype=torch.float8_e4m3fn)
    for band, scales in _bands(scale, block, source.shape):
        values = source[band].float() / scales
        data[band] = values.clamp_(-E4M3_MAX, E4M3_MAX)
    return Fp8BlockTensor(data_e4m3=data, scale_inv_f32=scale, block=block)


def _block_amax(source: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [ceil(N / rows), ceil(K / columns)]: each block's largest magnitude."""
    rows, columns = source.shape
    height, width = block
    at_once = height if height >= _TALL else max(1, CHUNK // columns // height) * height
    parts = []
    for band in chunks(rows, at_once):
        values = source[band]
        missing = (-len(values) % height, -columns % width)
        if any(missing):
            values = torch.nn.functional.pad(values, (0, missing[1], 0, missing[0]))
        blocks = values.unflatten(1, (-1, width)).unflatten(0, (-1, height))
        parts.append(amax_over(amax_over(blocks, 1), 2))
    return torch.cat(parts).float()


def _bands(
    scale: Tensor, block: tuple[int, int], shape: torch.Size
) -> Iterator[tuple[slice, Tensor]]:
    """Bands of rows that fit the cache, each with its scales [1 or rows, 1 or K]."""
    rows, columns = shape
    height, width = block
    at_once = max(1, CHUNK // columns)
    by_rows = height >= _TALL
    for outer in chunks(rows, height if by_rows else max(1, at_once // height) * height):
        scales = scale[outer.start // height : -(-outer.stop // height)]
        if not by_rows:
            scales = scales.repeat_interleave(height, dim=0)[: outer.stop - outer.start]
        if scale.shape[1] > 1:
            scales = scales.repeat_interleave(width, dim=1)[:, :columns]
        if not by_rows:
            yield outer, scales
            continue
        for inner in chunks(outer.stop - outer.start, at_once):
            yield slice(outer.start + inner.start, outer.start + inner.stop), scales
