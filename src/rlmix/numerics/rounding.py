"""Rounding float32 to the small formats, and their bytes. All exact, all ties to even.

Rounding adds a number so large that float32's own step there is the format's step, and takes it
away again; it is a power of two times a constant, so torch's `alpha` makes it without rounding.
Bytes are made and read through float16: E4M3 and E2M1 are float16 with a shorter
mantissa and another bias, so a power of two and a shift lead from one to the other.
"""

import functools

import torch
from torch import Tensor

E4M3_MAX, E4M3_MIN = 448.0, 2.0**-9
"""Largest number, and smallest above zero (a subnormal)."""
E2M1_MAX = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of codes 0..7; codes 8..15 are their negatives."""

_EXPONENT = torch.tensor(0x7F800000, dtype=torch.int32)
_MANTISSA = torch.tensor(0x007FFFFF, dtype=torch.int32)
"""Tensors, because torch converts a Python number at each use, which costs microseconds."""
_CODE16, _CODE_SIGN16 = (torch.tensor(bits, dtype=torch.int16) for bits in (7, 8))
_E4M3_MIN_NORMAL, _E4M3_ANCHOR = 2.0**-6, 1.5 * 2.0**20
"""Below the smallest normal number the step stays. For x in [2^e, 2^(e+1)) E4M3's step is 2^(e-3),
float32's near 1.5 * 2^(e+20) is the same."""
_E2M1_MIN_NORMAL, _E2M1_ANCHOR = 1.0, 1.5 * 2.0**22
_E4M3_TO_HALF, _E2M1_TO_HALF = 2.0**-8, 2.0**-14
"""Moves the smallest normal number to float16's, 2^-14."""


def nearest_e4m3(values: Tensor) -> Tensor:
    """Nearest E4M3 numbers as float32; torch's conversion from float8 takes several times as long.

    Args:
        values: float32 of any shape, magnitudes at most 448.
    Returns:
        float32 of the same shape; a negative value that rounds to zero gives +0.
    """
    powers = _powers(values).clamp_(min=_E4M3_MIN_NORMAL)
    return values.add(powers, alpha=_E4M3_ANCHOR).sub_(powers, alpha=_E4M3_ANCHOR)


def nearest_e2m1(values: Tensor, *, out: Tensor, scratch: Tensor) -> Tensor:
    """The same for E2M1; magnitudes below 7, of which those above 5 become 6.

    Args:
        out, scratch: float32 tensors of the shape of `values`, overwritten; `out` is returned and
            may be `values` itself.
    """
    powers = torch.bitwise_and(values.view(torch.int32), _EXPONENT, out=scratch.view(torch.int32))
    powers = powers.view(torch.float32).clamp_(min=_E2M1_MIN_NORMAL)
    torch.add(values, powers, alpha=_E2M1_ANCHOR, out=out)
    return out.sub_(powers, alpha=_E2M1_ANCHOR)


def round_to_e2m1_(values: Tensor) -> Tensor:
    """`nearest_e2m1` in place."""
    return nearest_e2m1(values, out=values, scratch=torch.empty_like(values))


def power_of_two_above(values: Tensor) -> Tensor:
    """Smallest power of two that is not below each value: a UE8M0 scale, as float32.

    Args:
        values: float32 of any shape, positive and normal.
    """
    bits = (values.view(torch.int32) + _MANTISSA) & _EXPONENT
    return bits.view(torch.float32)


def e4m3_from_bytes(data: Tensor) -> Tensor:
    """float32 from float8_e4m3fn; the NaN code stays NaN."""
    bits = data.view(torch.uint8).to(torch.int16)
    magnitude = bits & 0x7F
    if bool((magnitude == 0x7F).any()):
        return data.float()
    bits.bitwise_and_(0x80).bitwise_left_shift_(8)
    bits.bitwise_or_(magnitude.bitwise_left_shift_(7))
    return bits.view(torch.float16).float().mul_(1 / _E4M3_TO_HALF)


def e2m1_codes_(values: Tensor) -> Tensor:
    """Codes of the nearest E2M1 numbers, 0..15, saturating at 6.

    The sign bit says "below zero": -0.0 gives code 0, a tiny negative value code 8, as the
    reference packages do. Both decode to zero.

    Args:
        values: float32 of any shape, no NaN; changed in place.
    Returns:
        int16 of the same shape.
    """
    # Adding zero turns -0.0 into +0.0 and changes nothing else.
    clipped = values.add_(0.0).clamp_(-E2M1_MAX, E2M1_MAX)
    signs = sign_bits(clipped)
    return codes_of_e2m1_(round_to_e2m1_(clipped), signs)


def sign_bits(values: Tensor) -> Tensor:
    """int16 of the same shape whose highest bits are the signs of float32 values."""
    return values.half().view(torch.int16)


def codes_of_e2m1_(numbers: Tensor, signs: Tensor) -> Tensor:
    """int16 codes of float32 E2M1 numbers; both arguments are changed in place.

    Args:
        signs: what `sign_bits` gives for the values before rounding, which loses some.
    """
    bits = numbers.mul_(_E2M1_TO_HALF).half().view(torch.int16)
    codes = bits.bitwise_right_shift_(9).bitwise_and_(_CODE16)
    return codes.bitwise_or_(signs.bitwise_right_shift_(12).bitwise_and_(_CODE_SIGN16))


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., K / 2] from int16 codes [..., K], K even: the even element is the low nibble."""
    pairs = codes.view(torch.int32)
    return (pairs >> 12).bitwise_or_(pairs).to(torch.uint8)


def e2m1_from_nibbles(packed: Tensor) -> Tensor:
    """float32 [..., 2 * B] from uint8 [..., B]; one look-up gives both values of a byte."""
    pairs = _pairs().index_select(0, packed.reshape(-1).int())
    return pairs.view(torch.float32).view(*packed.shape[:-1], -1)


def _powers(values: Tensor) -> Tensor:
    """The power of two at or below each magnitude; 0 for subnormal numbers."""
    return (values.view(torch.int32) & _EXPONENT).view(torch.float32)


@functools.cache
def _pairs() -> Tensor:
    """int64 [256]: the float32 values of a byte's low and high nibble side by side."""
    values = torch.tensor(E2M1 + tuple(-value for value in E2M1))
    high, low = torch.meshgrid(values, values, indexing="ij")
    return torch.stack((low, high), dim=-1).reshape(256, 2).view(torch.int64).reshape(256)
