"""How far trainer and sampler are apart, as numbers a person can watch.

Invariant: means are over policy tokens, before any weight or mask is applied. d is the trainer's
logprob minus the sampler's; both KL directions are estimated from sampled tokens, so a KL may be
off by its sampling noise, never by a correction.
"""

# T policy tokens

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.algos.corrections import LOG_RATIO_LIMIT, effective_sample_frac

LAG_BUCKETS: tuple[tuple[str, int, int | None], ...] = (
    ("0", 0, 0),
    ("0-1", 0, 1),
    ("2-3", 2, 3),
    ("4-5", 4, 5),
    ("6+", 6, None),
)
"""(name, first lag, last lag) in versions. "0" is part of "0-1" and also shown alone: there the
gap is numerics only, no staleness."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFacts:
    """Detached facts about the policy tokens of one optimizer step, one entry per token."""

    log_ratios_T: Tensor
    weights_T: Tensor
    outside_T: Tensor
    entropy_T: Tensor
    pools_T: Tensor
    """int64, index into `pool_names`."""
    lags_T: Tensor
    """int64, trainer version minus the version that sampled the token."""
    coeff_l1_T: Tensor | None
    tail_ratio_T: Tensor | None


def mismatch_metrics(log_ratios_T: Tensor) -> dict[str, float]:
    """KL estimates, chi-square and absolute differences of the sampled tokens' logprobs.

    Args:
        log_ratios_T: float [T], d = trainer - sampler, detached.
    Returns:
        `mismatch/k1_kl` mean(-d); `k3_kl` mean(e^d - 1 - d), KL(sampler, trainer), never
        negative; `k3_reverse` mean(e^-d - 1 + d); `chi2` mean(e^2d) - 1; `mean_abs`, `max_abs`
        of d in nats. d is clamped to +-20 inside exponentials. All 0 without tokens.
    Source: joschu.net/blog/kl-approx.html (k1, k3).
    """
    names = ("k1_kl", "k3_kl", "k3_reverse", "chi2", "mean_abs", "max_abs")
    if log_ratios_T.numel() == 0:
        return {f"mismatch/{name}": 0.0 for name in names}
    d_T = log_ratios_T.detach().double()
    clamped_T = d_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    values = (
        -d_T.mean(),
        (torch.expm1(clamped_T) - clamped_T).mean(),
        (torch.expm1(-clamped_T) + clamped_T).mean(),
        torch.expm1(2 * clamped_T).mean(),
        d_T.abs().mean(),
        d_T.abs().max(),
    )
    return {f"mismatch/{name}": float(value) for name, value in zip(names, values, strict=True)}


def step_metrics(facts: TokenFacts, *, pool_names: Sequence[str]) -> dict[str, float]:
    """All mismatch, correction and staleness numbers of one optimizer step.

    Pools and lag buckets without a token have no key: absent means not measured.
    """
    num_tokens = facts.log_ratios_T.numel()
    if num_tokens == 0:
        return {}
    metrics = mismatch_metrics(facts.log_ratios_T)
    metrics |= _correction_metrics(facts)
    metrics["loss/entropy"] = float(facts.entropy_T.double().mean())
    lags_T = facts.lags_T.double()
    metrics["staleness/mean_versions"] = float(lags_T.mean())
    metrics["staleness/max_versions"] = float(lags_T.max())
    for index, name in enumerate(pool_names):
        chosen_T = facts.pools_T == index
        if chosen_T.any():
            metrics |= _group_metrics(facts, chosen_T, group=f"by_pool/{name}")
    for name, first, last in LAG_BUCKETS:
        chosen_T = facts.lags_T >= first
        if last is not None:
            chosen_T = chosen_T & (facts.lags_T <= last)
        if chosen_T.any():
            metrics |= _group_metrics(facts, chosen_T, group=f"by_lag/{name}")
    return metrics


def _correction_metrics(facts: TokenFacts) -> dict[str, float]:
    metrics = {
        "correction/masked_frac": float((facts.weights_T == 0).double().mean()),
        "correction/outside_frac": float(facts.outside_T.double().mean()),
        "correction/ess_frac": effective_sample_frac(facts.weights_T),
        "correction/weight_mean": float(facts.weights_T.double().mean()),
    }
    if facts.tail_ratio_T is not None and facts.coeff_l1_T is not None:
        metrics["correction/sc_tail_ratio"] = float(facts.tail_ratio_T.double().mean())
        metrics["correction/sc_tail_ratio_max"] = float(facts.tail_ratio_T.double().max())
        metrics["correction/sc_coeff_l1"] = float(facts.coeff_l1_T.double().mean())
    return metrics


def _group_metrics(facts: TokenFacts, chosen_T: Tensor, *, group: str) -> dict[str, float]:
    gaps = mismatch_metrics(facts.log_ratios_T[chosen_T])
    metrics = {
        f"mismatch/{group}/{name}": gaps[f"mismatch/{name}"]
        for name in ("k1_kl", "k3_kl", "k3_reverse", "chi2", "mean_abs", "max_abs")
    }
    weights_T = facts.weights_T[chosen_T]
    metrics[f"mismatch/{group}/tokens"] = float(weights_T.numel())
    metrics[f"correction/{group}/masked_frac"] = float((weights_T == 0).double().mean())
    metrics[f"correction/{group}/outside_frac"] = float(facts.outside_T[chosen_T].double().mean())
    metrics[f"correction/{group}/ess_frac"] = effective_sample_frac(weights_T)
    if facts.tail_ratio_T is not None:
        metrics[f"correction/{group}/sc_tail_ratio"] = float(
            facts.tail_ratio_T[chosen_T].double().mean()
        )
    return metrics
