"""How far two lists of logprobs are apart: the numbers that a comparison always prints.

d is the first side's logprob minus the second's (trainer minus sampler).
"""

from dataclasses import asdict, dataclass

import numpy as np

EXPONENT_LIMIT = 20.0
"""Log-ratios are clamped to it before `exp`, as in `algos.metrics`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """One edge between two sides, over all its tokens."""

    tokens: int
    mismatch_count: int
    """Tokens whose two logprobs are not the same float32 number."""
    mean_abs: float
    max_abs: float
    p50_abs: float
    p99_abs: float
    """All four in nats."""
    signed_mean: float
    k3_kl: float
    """mean(e^d - 1 - d): KL(second, first) where the second sampled the tokens."""
    k3_reverse: float
    """mean(e^-d - 1 + d), the same with the sides changed. No estimate of KL(first, second): the
    second sampled these tokens too. Far above `k3_kl`: it samples what the first hardly would."""
    prob_diff_mean: float
    prob_diff_max: float
    """Of |p - q|, which hides tokens that are unlikely on both sides."""
    first_mismatch: int | None
    """Position in its text of the first token that differs in any text; None: none differs."""
    logprob_dtype: str
    """Coarsest of float32, bfloat16 and float16 that holds every stored number: `0` is easier to
    reach in a short one."""

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def gap(first_P: np.ndarray, second_P: np.ndarray, positions_P: np.ndarray | None = None) -> Gap:
    """Statistics of two float32 [P] lists of the same tokens' logprobs.

    Args:
        positions_P: int [P], each token's place in its text; None: its place in the list.
    Raises:
        ValueError: other shapes, no token, or a number that is not finite.
    Source: joschu.net/blog/kl-approx.html (k3).
    """
    if first_P.shape != second_P.shape or first_P.ndim != 1 or not first_P.size:
        raise ValueError(
            f"diff: {first_P.shape} against {second_P.shape} logprobs; two equal, not empty lists"
        )
    if not (np.isfinite(first_P).all() and np.isfinite(second_P).all()):
        raise ValueError("diff: a logprob is NaN or infinite")
    differs_P = first_P.astype(np.float32) != second_P.astype(np.float32)
    d_P = first_P.astype(np.float64) - second_P.astype(np.float64)
    clamped_P = np.clip(d_P, -EXPONENT_LIMIT, EXPONENT_LIMIT)
    probs_P = np.abs(np.exp(first_P.astype(np.float64)) - np.exp(second_P.astype(np.float64)))
    places_P = np.arange(len(d_P)) if positions_P is None else positions_P
    size_P = np.abs(d_P)
    return Gap(
        tokens=len(d_P),
        mismatch_count=int(differs_P.sum()),
        mean_abs=float(size_P.mean()),
        max_abs=float(size_P.max()),
        p50_abs=float(np.quantile(size_P, 0.5)),
        p99_abs=float(np.quantile(size_P, 0.99)),
        signed_mean=float(d_P.mean()),
        k3_kl=float((np.expm1(clamped_P) - clamped_P).mean()),
        k3_reverse=float((np.expm1(-clamped_P) + clamped_P).mean()),
        prob_diff_mean=float(probs_P.mean()),
        prob_diff_max=float(probs_P.max()),
        first_mismatch=int(places_P[differs_P].min()) if differs_P.any() else None,
        logprob_dtype=coarsest_dtype(second_P),
    )


def coarsest_dtype(values_P: np.ndarray) -> str:
    """`bfloat16`, `float16` or `float32`: the shortest format that holds all values as they are."""
    bits = np.ascontiguousarray(values_P, dtype=np.float32).view(np.uint32)
    if not (bits & 0xFFFF).any():
        return "bfloat16"
    with np.errstate(over="ignore"):
        is_half = (values_P.astype(np.float16).astype(np.float32) == values_P).all()
    return "float16" if is_half else "float32"
