"""Masks that drop whole sequences whose tokens, taken together, cannot be trusted.

d = log p - log q of a sampled token, ratio r = exp(d). Invariants: a decision is one for all
tokens of a sequence; products and means stay logarithms and are never exponentiated; bounds are
inclusive. Dropping is for the caller: a dropped sequence adds 0 to the loss and its tokens stay in
the denominator.
"""

# T policy tokens

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.algos.corrections import LOG_RATIO_LIMIT, in_compute_dtype, is_outside
from rlmix.algos.sequences import (
    count_sequences,
    sequence_length,
    sequence_mean,
    sequence_min,
    sequence_sum,
)


def product_mask(log_ratios_T: Tensor, sequences_T: Tensor, *, low: float, high: float) -> Tensor:
    """bool [T]: True where the product of the sequence's ratios lies outside [low, high].

    The product is the ratio of the whole sequence, so what remains has the right expectation up to
    what is dropped; its spread grows with the length, and so does what is dropped.
    Args:
        log_ratios_T: float [T], d.
        sequences_T: int64 [T], equal ids belong together.
        low, high: inclusive bounds on the product; low 0 drops no small one.
    Source: richardli.xyz/rl-collapse (Seq-MIS).
    """
    return is_outside(sequence_sum(log_ratios_T, sequences_T), low=low, high=high)


def geometric_mask(log_ratios_T: Tensor, sequences_T: Tensor, *, low: float, high: float) -> Tensor:
    """bool [T]: True where the geometric mean of the ratios lies outside [low, high].

    Does not depend on the length; ratios above and below 1 cancel. Arguments as in `product_mask`.
    Source: richardli.xyz/rl-collapse (Geo-RS).
    """
    return is_outside(sequence_mean(log_ratios_T, sequences_T), low=low, high=high)


def k3_mask(log_ratios_T: Tensor, sequences_T: Tensor, *, high: float) -> Tensor:
    """bool [T]: True where the mean of e^d - 1 - d over the sequence is above `high`.

    Every term is >= 0, so nothing cancels; d is clamped to +-20. Source: as `geometric_mask`
    (the K3 form of its rejection), estimator from joschu.net/blog/kl-approx.html.
    """
    clamped_T = log_ratios_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3_T = torch.expm1(clamped_T) - clamped_T
    slack = 1.0 + 16 * torch.finfo(k3_T.dtype).eps
    return sequence_mean(k3_T, sequences_T) > high * slack


def off_policy_mask(
    log_ratios_T: Tensor, sequences_T: Tensor, *, advantages_T: Tensor, high: float
) -> Tensor:
    """bool [T]: True where the advantage is negative and the mean of -d is above `high`.

    A bad sequence that the trainer would hardly write any more teaches nothing about what it
    writes now, and its push downwards has no bound. Good sequences always stay.
    Args:
        advantages_T: float [T]; one value per sequence.
        high: nats per token.
    Source: arXiv:2512.02556 equation 9 (off-policy sequence masking).
    """
    return (advantages_T < 0) & (-sequence_mean(log_ratios_T, sequences_T) > high)


def veto_mask(log_ratios_T: Tensor, sequences_T: Tensor, *, ratio: float) -> Tensor:
    """bool [T]: True where any token of the sequence has a ratio below `ratio`; 0 vetoes nothing.

    One token that the trainer finds impossible is a sign of a damaged session rather than of
    drift. Source: the veto of richardli.xyz/rl-collapse, as in slime and miles (1e-4).
    """
    if ratio == 0:
        return torch.zeros_like(sequences_T, dtype=torch.bool)
    least_T = sequence_min(log_ratios_T, sequences_T)
    return is_outside(least_T, low=ratio, high=math.inf)


SEQUENCE_MASKS: Mapping[str, Callable[[Tensor, Tensor, Tensor, "SequenceRule"], Tensor]] = {
    "none": lambda d_T, seq_T, adv_T, rule: torch.zeros_like(seq_T, dtype=torch.bool),
    "product": lambda d_T, seq_T, adv_T, rule: product_mask(
        d_T, seq_T, low=rule.low, high=rule.high
    ),
    "geometric": lambda d_T, seq_T, adv_T, rule: geometric_mask(
        d_T, seq_T, low=rule.low, high=rule.high
    ),
    "k3": lambda d_T, seq_T, adv_T, rule: k3_mask(d_T, seq_T, high=rule.high),
    "opsm": lambda d_T, seq_T, adv_T, rule: off_policy_mask(
        d_T, seq_T, advantages_T=adv_T, high=rule.high
    ),
}
"""Name -> mask; `k3` and `opsm` ignore the rule's `low`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRule:
    """Which whole sequences are dropped."""

    mask: str
    """One of `SEQUENCE_MASKS`."""
    low: float
    high: float
    """Bounds of `mask`: on the product or the geometric mean of the ratios, on the mean k3 (nats)
    or on OPSM's mean of -d (nats)."""
    veto: float
    """Ratio below which one token drops its sequence; 0 switches the veto off."""

    def __post_init__(self) -> None:
        if self.mask not in SEQUENCE_MASKS:
            raise ValueError(
                f"sequence_masks: mask={self.mask!r} is unknown; use one of "
                f"{', '.join(SEQUENCE_MASKS)}"
            )
        if self.mask in ("product", "geometric") and not 0 <= self.low <= self.high:
            raise ValueError(
                f"sequence_masks: low={self.low}, high={self.high} for {self.mask!r}; bounds are "
                "on a ratio, 0 <= low <= high"
            )
        if not 0 <= self.veto < 1:
            raise ValueError(
                f"sequence_masks: veto={self.veto}; it is a ratio p/q, 0 <= veto < 1, 0 is off"
            )

    @property
    def is_off(self) -> bool:
        return self.mask == "none" and self.veto == 0


@dataclass(frozen=True, slots=True)
class DroppedSequences:
    """Two reasons to drop the sequence of a token; both may hold."""

    masked_T: Tensor
    """bool [T]: by `SequenceRule.mask`."""
    vetoed_T: Tensor
    """bool [T]: by `SequenceRule.veto`."""

    @property
    def any_T(self) -> Tensor:
        return self.masked_T | self.vetoed_T


def dropped_sequences(
    log_ratios_T: Tensor, advantages_T: Tensor, sequences_T: Tensor, *, rule: SequenceRule
) -> DroppedSequences:
    """Apply a rule. Shapes and dtypes as in `product_mask` and `off_policy_mask`; detached."""
    log_ratios_T = in_compute_dtype(log_ratios_T.detach())
    mask = SEQUENCE_MASKS[rule.mask]
    return DroppedSequences(
        masked_T=mask(log_ratios_T, sequences_T, advantages_T.detach(), rule),
        vetoed_T=veto_mask(log_ratios_T, sequences_T, ratio=rule.veto),
    )


def dropped_metrics(dropped: DroppedSequences, sequences_T: Tensor) -> dict[str, float]:
    """`correction/sequence_masked_frac` and `correction/veto_frac`: shares of all sequences."""
    total = count_sequences(sequences_T)
    if total == 0:
        return {"correction/sequence_masked_frac": 0.0, "correction/veto_frac": 0.0}
    # Each token stands for 1 / length of its sequence.
    shares_T = 1.0 / (total * sequence_length(sequences_T))
    return {
        "correction/sequence_masked_frac": float(shares_T[dropped.masked_T].sum()),
        "correction/veto_frac": float(shares_T[dropped.vetoed_T].sum()),
    }
