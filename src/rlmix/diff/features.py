"""What the outputs of one operator on the same inputs say: bits, errors, correlation, slope.

Everything is relative to a float64 result of the same operator on the same inputs. Invariant: pure
arithmetic; no threshold is applied here.
"""

# T rows, C numbers of a row

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Of one operator: A is the side whose inputs were taken, B the other one."""

    differing_frac: float
    """Of the numbers that are not equal."""
    first_row: int | None
    """First row with a difference."""
    error_a: float
    error_b: float
    """Root mean square of (output - float64), over that of float64."""
    gap: float
    """Root mean square of (B - A), over that of float64."""
    ratio: float
    """error_b / error_a; infinite where only A is exact."""
    correlation: float
    """Of the two errors, 0 where one is 0."""
    slope: float
    """Least squares slope of B over A, minus 1."""
    slope_fit: float
    """Share of (B - A) that a slope explains, 0 to 1."""
    is_bf16_a: bool
    is_bf16_b: bool
    """Whether every number of the output is a BF16 number."""


def features(a: Tensor, b: Tensor, reference: Tensor) -> Features:
    """Compare two outputs [T, ...] of one operator.

    Raises:
        ValueError: other shapes.
    """
    if a.shape != b.shape or a.shape != reference.shape:
        raise ValueError(f"diff: outputs of {tuple(a.shape)} and {tuple(b.shape)}")
    a_TC, b_TC = a.reshape(len(a), -1).double(), b.reshape(len(b), -1).double()
    r_TC = reference.reshape(len(a), -1).double()
    size = _rms(r_TC) or 1.0
    off_a, off_b, gap = a_TC - r_TC, b_TC - r_TC, b_TC - a_TC
    error_a, error_b = _rms(off_a) / size, _rms(off_b) / size
    differs_T = (a_TC != b_TC).any(1)
    slope = float((gap * a_TC).sum() / a_TC.square().sum().clamp(min=1e-300))
    left = (gap - slope * a_TC).square().sum()
    energy = gap.square().sum()
    return Features(
        differing_frac=float((a_TC != b_TC).double().mean()),
        first_row=int(differs_T.nonzero()[0]) if differs_T.any() else None,
        error_a=error_a,
        error_b=error_b,
        gap=_rms(gap) / size,
        ratio=error_b / error_a if error_a > 0 else float("inf"),
        correlation=_correlation(off_a, off_b),
        slope=slope,
        slope_fit=float(1 - left / energy) if energy > 0 else 0.0,
        is_bf16_a=is_bf16(a),
        is_bf16_b=is_bf16(b),
    )


def is_bf16(values: Tensor) -> bool:
    """Whether rounding to BF16 changes nothing."""
    held = values.float()
    return bool((held.bfloat16().float() == held).all())


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _correlation(first: Tensor, second: Tensor) -> float:
    one, other = first - first.mean(), second - second.mean()
    size = float(one.square().sum().sqrt() * other.square().sum().sqrt())
    return float((one * other).sum()) / size if size > 0 else 0.0
