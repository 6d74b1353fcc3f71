"""What an inspection of one operator says, and the limits it goes by."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

OPERATOR_CLASSES: Final = ("order", "tiling", "cast", "quantisation")
FRAMEWORK_CLASSES: Final = (
    "tokens", "mask", "positions", "sampling", "weights", "vocabulary", "hyper-parameter",
    "router", "cache",
)  # fmt: skip
OPERATOR, FRAMEWORK = "operator path", "framework"


def verdict_of(cause: str) -> str:
    """`operator path` or `framework`.

    Raises:
        KeyError: no such class.
    """
    if cause in OPERATOR_CLASSES:
        return OPERATOR
    if cause in FRAMEWORK_CLASSES:
        return FRAMEWORK
    raise KeyError(cause)


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Limits of the classifier, frozen in conf/diff/default.yaml; see docs/diff-logprobs.md."""

    order_ratio_low: float
    order_ratio_high: float
    """Of the two errors, between which another order is possible."""
    order_correlation: float
    """Of the two errors, from which on they are one rounding with few other bits."""
    rounding_error: float
    """Relative error up to which BF16 roundings explain a difference."""
    slope: float
    slope_fit: float
    """A constant factor is named when it is off by more than `slope` and explains as much of the
    difference as `slope_fit`."""
    setting: float
    """Relative difference of an estimated epsilon, theta, scale or temperature."""
    weight: float
    """Relative difference of matrices that is more than the rounding of a result."""
    grid: float
    """What a known quantiser of A's matrix must leave of its distance to B's."""
    tile: int
    """A first differing row that is a multiple of this many positions is a tile's edge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Why one operator differs."""

    cause: str
    """One of OPERATOR_CLASSES or FRAMEWORK_CLASSES."""
    evidence: str
    """One sentence with the number that decided."""
    confidence: float
    """0 to 1: 0.95 where a probe shows the cause itself, 0.8 where the error's shape does, 0.5
    where the rest was ruled out."""
    facts: Mapping[str, float | str]
    """Numbers beside it."""

    @property
    def verdict(self) -> str:
        return verdict_of(self.cause)
