"""What `rlmix diff-logprobs` compares, and how it names causes."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class DiffConfig:
    sessions: int
    """That each pool samples."""
    session_tokens: int
    """That a session samples at most."""
    diagnose: bool
    tolerance_nats: float
    """For samplers that are no pool of the configuration."""
    least_share: float
    """Of a difference from which on an operator is named."""
    order_ratio_low: float
    order_ratio_high: float
    order_correlation: float
    rounding_error: float
    slope: float
    slope_fit: float
    setting: float
    weight: float
    grid: float
    tile: int
