"""Weights that repair the gap between the policy that sampled and the policy that learns.

Per token position: q is the sampler's distribution, p the trainer's current one, both at the same
temperature and on the same support; d = log p - log q is the log-ratio of the sampled token.

Invariants: everything here except the log p inside the centering sum is detached; log-ratios are
clamped before `exp`; one rule decides the weight of the sampled token and of every candidate, so
that the centering term is the exact expectation of the weighted score.
"""

# T policy tokens, K candidate slots

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.algos.sequences import sequence_mean, sequence_sum
from rlmix.algos.support import Support, candidate_mask

SEQUENCE_KINDS = ("gspo", "seq_tis")
"""Kinds whose weight is one for all tokens of a sequence; they need `sequences_T`."""

CAP_KINDS = ("tis", "seq_tis")
"""Kinds that only cap the ratio; `low` is ignored."""

LOG_RATIO_LIMIT = 20.0
"""Nats. exp(20) = 4.9e8 is far outside every useful bound, and its square is still a float32."""

LOGPROB_FLOOR = -1e4
"""Nats. Stands in for -inf (a token the trainer gives no probability at all): the loss stays
finite and no gradient flows through it. Real softmax tails end long before."""

TAIL_FLOOR = 1e-6
"""Probability. Tail masses are 1 minus a float32 sum, so below this they are rounding noise."""

BOUND_ROUNDING_EPS = 16
"""Bounds are inclusive up to this many machine epsilons in the log-ratio: log 0.5 - log 0.1 and
log 5 differ in the last bit."""


def in_compute_dtype(values: Tensor) -> Tensor:
    """float64 stays; everything narrower (bfloat16 above all) is computed in float32."""
    return values if values.dtype == torch.float64 else values.float()


def log_ratio(trainer_logprobs: Tensor, sampler_logprobs: Tensor) -> Tensor:
    """d = log p - log q, detached, float32 or float64, same shape. -inf becomes the floor."""
    trainer = in_compute_dtype(trainer_logprobs.detach()).clamp(min=LOGPROB_FLOOR)
    sampler = in_compute_dtype(sampler_logprobs.detach()).clamp(min=LOGPROB_FLOOR)
    return trainer - sampler


def is_outside(log_ratios: Tensor, *, low: float, high: float) -> Tensor:
    """bool: True where exp(d) lies outside [low, high], bounds inclusive up to rounding."""
    slack = BOUND_ROUNDING_EPS * torch.finfo(log_ratios.dtype).eps
    log_low = math.log(low) if low > 0 else -math.inf
    log_high = math.log(high) if high > 0 else -math.inf
    return (log_ratios < log_low - slack) | (log_ratios > log_high + slack)


def bounded_ratios(log_ratios: Tensor) -> Tensor:
    """exp(d), with d clamped to `LOG_RATIO_LIMIT`."""
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _unweighted(log_ratios: Tensor, _low: float, _high: float) -> Tensor:
    return torch.ones_like(log_ratios)


def _truncated(log_ratios: Tensor, _low: float, high: float) -> Tensor:
    return bounded_ratios(log_ratios).clamp(max=high)


def _masked(log_ratios: Tensor, low: float, high: float) -> Tensor:
    return bounded_ratios(log_ratios).masked_fill(is_outside(log_ratios, low=low, high=high), 0.0)


def _clipped(log_ratios: Tensor, low: float, high: float) -> Tensor:
    return bounded_ratios(log_ratios).clamp(min=low, max=high)


RATIO_WEIGHTS: Mapping[str, Callable[[Tensor, float, float], Tensor]] = {
    "none": _unweighted,
    "tis": _truncated,
    "mis": _masked,
    "cispo": _clipped,
}
"""Kinds whose weight is a function f(d, low, high) of the log-ratio alone: those that can be
centred. PPO's clip depends on the advantage's sign, GSPO's and sequence TIS' weight on the other
tokens of the session, so a centering term for them is not defined."""

CENTERED_KINDS = tuple(RATIO_WEIGHTS)

IMPORTANCE_KINDS = (*CENTERED_KINDS, "ppo", *SEQUENCE_KINDS)


def ratio_weights(log_ratios: Tensor, *, kind: str, low: float, high: float) -> Tensor:
    """f(r) for every log-ratio, elementwise.

    Args:
        log_ratios: float32 or float64, any shape.
        kind: one of `RATIO_WEIGHTS`.
        low, high: bounds on r itself. "tis" ignores `low`, "none" both.
    Returns:
        Same shape and dtype, >= 0.
    """
    if kind not in RATIO_WEIGHTS:
        raise ValueError(
            f"corrections: the weight of {kind!r} is not a function of the ratio alone; "
            f"use one of {', '.join(CENTERED_KINDS)}"
        )
    return RATIO_WEIGHTS[kind](log_ratios, low, high)


def surrogate_weights(log_ratios: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """The weight that a clipped surrogate min(r A, clip(r, low, high) A) puts on A * score.

    r where the minimum still moves with r, else 0: a good token is no longer pushed up once r is
    above `high`, a bad one no longer down once r is below `low`.
    Source: arXiv:1707.06347.
    """
    ratios = bounded_ratios(log_ratios)
    is_clipped = ((advantages > 0) & (ratios > high)) | ((advantages < 0) & (ratios < low))
    return ratios.masked_fill(is_clipped, 0.0)


def check_bounds(*, kind: str, low: float, high: float) -> None:
    """Raises ValueError for an unknown kind or bounds that would keep nothing."""
    if kind not in IMPORTANCE_KINDS:
        raise ValueError(
            f"corrections: importance={kind!r} is unknown; use one of {', '.join(IMPORTANCE_KINDS)}"
        )
    if kind != "none" and not (high > 0 and (kind in CAP_KINDS or 0 <= low <= high)):
        raise ValueError(
            f"corrections: low={low}, high={high} for {kind!r}; bounds are on the ratio p/q, "
            "0 <= low <= high and high > 0"
        )


def importance_weights(
    trainer_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    *,
    kind: str,
    low: float,
    high: float,
    advantages_T: Tensor | None = None,
    sequences_T: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The detached weight of each sampled token's score.

    Args:
        trainer_logprobs_T: float [T], natural log, of the policy being updated (no frozen copy).
        sampler_logprobs_T: float [T], natural log, as the engine that sampled reported it.
        kind: "none" 1; "tis" min(r, high); "mis" r inside [low, high], else 0; "cispo"
            clip(r, low, high); "ppo" r unless the clipped surrogate is flat there; "gspo" the
            same rule on the geometric mean of the sequence's ratios; "seq_tis" min(R, high) with
            R the product of the sequence's ratios.
        low, high: inclusive bounds on the ratio r = p/q, for `SEQUENCE_KINDS` on the sequence's.
        advantages_T: float [T]; needed by "ppo" and "gspo", whose clip depends on its sign.
        sequences_T: int64 [T], equal ids belong together; needed by `SEQUENCE_KINDS`.
    Returns:
        (weights float32 or float64 [T], metrics): `correction/masked_frac` (weight 0),
        `correction/outside_frac` (ratio outside [low, high], whatever the kind),
        `correction/ess_frac` ((sum w)^2 / (T sum w^2)), `correction/ratio_mean` (of the tokens).
    Raises:
        ValueError: unknown kind, impossible bounds, a missing argument.
    Source: "tis" fengyao.notion.site/off-policy-rl; "mis" arXiv:2510.18855 (IcePop); "cispo"
        arXiv:2506.13585; "ppo" arXiv:1707.06347; "gspo" arXiv:2507.18071; "seq_tis"
        richardli.xyz/rl-collapse.
    """
    check_bounds(kind=kind, low=low, high=high)
    log_ratios_T = log_ratio(trainer_logprobs_T, sampler_logprobs_T)
    unit_T = unit_log_ratio(log_ratios_T, kind=kind, sequences_T=sequences_T)
    weights_T = applied_weights(unit_T, kind=kind, low=low, high=high, advantages_T=advantages_T)
    outside_T = outside_bounds(unit_T, kind=kind, low=low, high=high)
    return weights_T, weight_metrics(weights_T, log_ratios_T, outside_T)


def outside_bounds(unit_T: Tensor, *, kind: str, low: float, high: float) -> Tensor:
    """bool [T]: the ratio that the weight is a function of lies outside the bounds of `kind`."""
    return is_outside(unit_T, low=0.0 if kind in CAP_KINDS else low, high=high)


def unit_log_ratio(log_ratios_T: Tensor, *, kind: str, sequences_T: Tensor | None) -> Tensor:
    """[T] the log-ratio that the weight is a function of: the token's, or its sequence's.

    "gspo": mean over the sequence (the length-normalised ratio); "seq_tis": sum over it.
    """
    if kind not in SEQUENCE_KINDS:
        return log_ratios_T
    if sequences_T is None:
        raise ValueError(f"corrections: {kind} needs sequences_T, the sequence of each token")
    reduce = sequence_mean if kind == "gspo" else sequence_sum
    return reduce(log_ratios_T, sequences_T)


def applied_weights(
    log_ratios_T: Tensor, *, kind: str, low: float, high: float, advantages_T: Tensor | None
) -> Tensor:
    """[T] the weight on A * score for every kind; `log_ratios_T` as `unit_log_ratio` gives it."""
    if kind not in ("ppo", "gspo"):
        rule = "tis" if kind == "seq_tis" else kind
        return ratio_weights(log_ratios_T, kind=rule, low=low, high=high)
    if advantages_T is None:
        raise ValueError(f"corrections: {kind} needs advantages_T, its clip follows the sign")
    advantages_T = in_compute_dtype(advantages_T.detach())
    return surrogate_weights(log_ratios_T, advantages_T, low=low, high=high)


def weight_metrics(weights_T: Tensor, log_ratios_T: Tensor, outside_T: Tensor) -> dict[str, float]:
    """Health of a set of weights; without tokens nothing is masked and the ESS is 1."""
    num_tokens = weights_T.numel()
    if num_tokens == 0:
        return {
            "correction/masked_frac": 0.0,
            "correction/outside_frac": 0.0,
            "correction/ess_frac": 1.0,
            "correction/ratio_mean": 1.0,
        }
    ratios_T = bounded_ratios(log_ratios_T).double()
    return {
        "correction/masked_frac": float((weights_T == 0).double().mean()),
        "correction/outside_frac": float(outside_T.double().mean()),
        "correction/ess_frac": effective_sample_frac(weights_T),
        "correction/ratio_mean": float(ratios_T.mean()),
    }


def effective_sample_frac(weights_T: Tensor) -> float:
    """(sum w)^2 / (T sum w^2): 1 when all weights agree, 1/T when one token has them all."""
    weights_T = weights_T.double()
    squares = float((weights_T**2).sum())
    if squares == 0.0:
        return 0.0
    return float(weights_T.sum()) ** 2 / (weights_T.numel() * squares)


@dataclass(frozen=True, slots=True)
class CenteringTerm:
    """The expectation of the weighted score under the sampler, as a term of the loss."""

    sum_T: Tensor
    """[T] sum over candidates of sg[c] log p; its gradient is E_q[f(r) grad log p]."""
    coeff_l1_T: Tensor
    """[T] detached. L1 norm of that gradient in the logits of the whole vocabulary: the size of
    the push that centering removes, 0 when the policies agree."""
    tail_ratio_T: Tensor
    """[T] detached. Tail mass of the sampler over that of the trainer; 1 with exact support."""


def centering_term(support: Support, *, kind: str, low: float, high: float) -> CenteringTerm:
    """Score centering: what to subtract so that a constant advantage pushes nowhere.

    With m_v = q_v f(p_v / q_v), the term is sum_v m_v log p_v. On an exact support that is all.
    On a head H the tail is modelled as q = rho p with rho = (1 - Q_H) / (1 - P_H); because
    sum_v p_v grad log p_v = 0 over the vocabulary, the tail folds into the head as
    c_v = m_v - alpha p_v with alpha = rho f(1 / rho).

    Args:
        support: candidates of T tokens; padded slots are ignored.
        kind, low, high: as in `importance_weights`; `kind` must be one of `CENTERED_KINDS`.
    Returns:
        `CenteringTerm`, float32 or float64.
    Source: arXiv:2609.20807.
    """
    kept_TK = candidate_mask(support)
    # Padded slots are replaced before any arithmetic: 0 * inf would be nan.
    trainer_TK = in_compute_dtype(support.trainer_logprobs_TK).masked_fill(~kept_TK, 0.0)
    trainer_TK = trainer_TK.clamp(min=LOGPROB_FLOOR)
    # Masses in the trainer's precision: a float32 q would show beside a float64 policy.
    sampler_TK = in_compute_dtype(support.sampler_logprobs_TK.detach()).masked_fill(~kept_TK, 0.0)
    sampler_TK = sampler_TK.to(torch.promote_types(sampler_TK.dtype, trainer_TK.dtype))
    weights_TK = ratio_weights(log_ratio(trainer_TK, sampler_TK), kind=kind, low=low, high=high)
    q_TK = sampler_TK.exp().masked_fill(~kept_TK, 0.0)
    p_TK = trainer_TK.detach().exp().masked_fill(~kept_TK, 0.0)
    mass_TK = q_TK * weights_TK
    if support.is_exact:
        coeff_TK = mass_TK
        tail_ratio_T = torch.ones_like(q_TK.sum(dim=1))
        p_tail_T = torch.zeros_like(tail_ratio_T)
    else:
        q_tail_T = (1.0 - q_TK.sum(dim=1)).clamp(min=TAIL_FLOOR)
        p_tail_T = (1.0 - p_TK.sum(dim=1)).clamp(min=TAIL_FLOOR)
        tail_ratio_T = q_tail_T / p_tail_T
        tail_weight_T = ratio_weights(-tail_ratio_T.log(), kind=kind, low=low, high=high)
        coeff_TK = mass_TK - (tail_ratio_T * tail_weight_T)[:, None] * p_TK
    # sum_v c_v grad log p_v is c_v - C p_v in the logits, C the sum of c; c is 0 in the tail.
    total_T = coeff_TK.sum(dim=1)
    push_TK = coeff_TK - total_T[:, None] * p_TK
    return CenteringTerm(
        sum_T=(coeff_TK * trainer_TK).sum(dim=1),
        coeff_l1_T=push_TK.abs().sum(dim=1) + total_T.abs() * p_tail_T,
        tail_ratio_T=tail_ratio_T,
    )
