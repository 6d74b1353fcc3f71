"""How far trainer and sampler are apart, as numbers a person can watch.

Invariant: means are over policy tokens, before any weight or mask is applied. d is the trainer's
logprob minus the sampler's; both KL directions are estimated from sampled tokens, so a KL may be
off by its sampling noise, never by a correction.
"""

# T policy tokens, S sequences, N tokens with a recorded head, K its candidates

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.algos.corrections import (
    LOG_RATIO_LIMIT,
    TAIL_FLOOR,
    centering_term,
    effective_sample_frac,
)
from rlmix.algos.support import Support

LAG_BUCKETS: tuple[tuple[str, int, int | None], ...] = (
    ("0", 0, 0),
    ("0-1", 0, 1),
    ("2-3", 2, 3),
    ("4-5", 4, 5),
    ("6+", 6, None),
)
"""(name, first lag, last lag) in versions. "0" is part of "0-1" and also shown alone: there the
gap is numerics only, no staleness."""

POSITION_BUCKETS: tuple[tuple[str, int, int | None], ...] = (
    ("0-63", 0, 63),
    ("64-255", 64, 255),
    ("256-1023", 256, 1023),
    ("1k-4k", 1024, 4095),
    ("4k-16k", 4096, 16383),
    ("16k-64k", 16384, 65535),
    ("64k+", 65536, None),
)
"""(name, first position, last position) in the session's tokens, prompt and outputs included:
a gap that grows with the position is a matter of the KV cache or of position encoding."""

UNKNOWN_VIEW = "unknown"


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
    positions_T: Tensor
    """int64, place of the token in its session, prompt included."""
    sequences_T: Tensor
    """int64, number of the token's session in the step."""
    coeff_l1_T: Tensor | None
    tail_ratio_T: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadFacts:
    """What the recorded heads of some tokens say about the tail, one entry per such token."""

    sampler_mass_N: Tensor
    trainer_mass_N: Tensor
    """Probability on the head, of the whole vocabulary."""
    coeff_l1_N: Tensor
    """Size of the push that centering with the tail model would remove."""
    pools_N: Tensor
    """int64, index into `pool_names`."""


def mismatch_metrics(log_ratios_T: Tensor, sequences_T: Tensor | None = None) -> dict[str, float]:
    """Divergence estimates and absolute differences of the sampled tokens' logprobs.

    Args:
        log_ratios_T: float [T], d = trainer - sampler, detached.
        sequences_T: int64 [T], the sequence of each token; None leaves out what needs it.
    Returns:
        `mismatch/k1_kl` mean(-d); `k2_kl` mean(d^2 / 2); `k3_kl` mean(e^d - 1 - d), KL(sampler,
        trainer), never negative; `k3_reverse` mean(e^-d - 1 + d); `chi2` mean(e^2d) - 1;
        `mean_abs`, `max_abs` of d in nats; `prob_error` mean(e^|d|), 1 when equal. With
        sequences `chi2_sequence` mean over sequences of e^(2 sum d) - 1 and `ppl_ratio` mean over
        sequences of e^(mean -d). Exponents are clamped to +-20. Without tokens ratios are 1 and
        the rest is 0.
    Source: joschu.net/blog/kl-approx.html (k1, k2, k3).
    """
    d_T = log_ratios_T.detach().double()
    has_tokens = d_T.numel() > 0
    if not has_tokens:
        d_T = d_T.new_zeros(1)
    clamped_T = _clamped(d_T)
    values = {
        "k1_kl": -d_T.mean(),
        "k2_kl": (d_T**2 / 2).mean(),
        "k3_kl": (torch.expm1(clamped_T) - clamped_T).mean(),
        "k3_reverse": (torch.expm1(-clamped_T) + clamped_T).mean(),
        "chi2": torch.expm1(2 * clamped_T).mean(),
        "mean_abs": d_T.abs().mean(),
        "max_abs": d_T.abs().max(),
        "prob_error": clamped_T.abs().exp().mean(),
    }
    if sequences_T is not None:
        if not has_tokens:
            sequences_T = sequences_T.new_zeros(1)
        sums_S, counts_S = _sequence_sums(d_T, sequences_T)
        values["chi2_sequence"] = torch.expm1(2 * _clamped(sums_S)).mean()
        values["ppl_ratio"] = _clamped(-sums_S / counts_S).exp().mean()
    return {f"mismatch/{name}": float(value) for name, value in values.items()}


def head_facts(
    support: Support, pools_N: Tensor, *, kind: str, low: float, high: float
) -> HeadFacts:
    """Facts of recorded heads; what centering would do if only they were known.

    Args:
        support: [N, K] full-vocabulary logprobs of the likeliest tokens, both sides at the
            sampling temperature.
        pools_N: int64 [N].
        kind, low, high: as in `corrections.importance_weights`.
    """
    is_slot_NK = ~torch.isneginf(support.sampler_logprobs_TK)

    def mass(logprobs_NK: Tensor) -> Tensor:
        return logprobs_NK.detach().double().exp().masked_fill(~is_slot_NK, 0.0).sum(dim=1)

    term = centering_term(support, kind=kind, low=low, high=high)
    return HeadFacts(
        sampler_mass_N=mass(support.sampler_logprobs_TK),
        trainer_mass_N=mass(support.trainer_logprobs_TK),
        coeff_l1_N=term.coeff_l1_T.detach(),
        pools_N=pools_N,
    )


def step_metrics(
    facts: TokenFacts, *, pool_names: Sequence[str], pool_views: Mapping[str, str] | None = None
) -> dict[str, float]:
    """All mismatch, correction and staleness numbers of one optimizer step.

    Args:
        pool_names: what `facts.pools_T` indexes.
        pool_views: weight view of each pool, for `.../by_view/<view>/...`; pools that it lacks
            are counted under `unknown`. None: no split by view.
    Returns:
        Numbers of all tokens, and the same by pool, view, lag and position. A group without a
        token has no key: absent means not measured.
    """
    if facts.log_ratios_T.numel() == 0:
        return {}
    everything_T = torch.ones_like(facts.pools_T, dtype=torch.bool)
    metrics = _group_metrics(facts, everything_T, group="")
    metrics["correction/weight_mean"] = float(facts.weights_T.double().mean())
    if facts.tail_ratio_T is not None and facts.coeff_l1_T is not None:
        metrics["correction/sc_tail_ratio_max"] = float(facts.tail_ratio_T.double().max())
        metrics["correction/sc_coeff_l1"] = float(facts.coeff_l1_T.double().mean())
    metrics["loss/entropy"] = float(facts.entropy_T.double().mean())
    lags_T = facts.lags_T.double()
    metrics["staleness/mean_versions"] = float(lags_T.mean())
    metrics["staleness/max_versions"] = float(lags_T.max())
    for group, chosen_T in _groups(facts, pool_names=pool_names, pool_views=pool_views):
        if chosen_T.any():
            metrics |= _group_metrics(facts, chosen_T, group=f"{group}/")
    return metrics


def head_metrics(facts: HeadFacts | None, *, pool_names: Sequence[str]) -> dict[str, float]:
    """`correction/head_*` of all recorded heads and by pool; empty without any.

    The tail ratio here is that of the mean tails, (1 - mean sampler mass) / (1 - mean trainer
    mass): a single token whose tail is rounding noise would rule a mean of ratios.
    """
    if facts is None or facts.pools_N.numel() == 0:
        return {}
    metrics = _head_group(facts, torch.ones_like(facts.pools_N, dtype=torch.bool), prefix="head_")
    for index, name in enumerate(pool_names):
        chosen_N = facts.pools_N == index
        if chosen_N.any():
            metrics |= _head_group(facts, chosen_N, prefix=f"by_pool/{name}/head_")
    return metrics


def _head_group(facts: HeadFacts, chosen_N: Tensor, *, prefix: str) -> dict[str, float]:
    sampler = float(facts.sampler_mass_N[chosen_N].double().mean())
    trainer = float(facts.trainer_mass_N[chosen_N].double().mean())
    values = {
        "tail_ratio": max(1.0 - sampler, TAIL_FLOOR) / max(1.0 - trainer, TAIL_FLOOR),
        "mass_sampler": sampler,
        "mass_trainer": trainer,
        "coeff_l1": float(facts.coeff_l1_N[chosen_N].double().mean()),
        "tokens": float(chosen_N.sum()),
    }
    return {f"correction/{prefix}{name}": value for name, value in values.items()}


def _groups(
    facts: TokenFacts, *, pool_names: Sequence[str], pool_views: Mapping[str, str] | None
) -> Iterator[tuple[str, Tensor]]:
    """(name in a metric key, bool [T]) of every group that tokens are split into."""
    for index, name in enumerate(pool_names):
        yield f"by_pool/{name}", facts.pools_T == index
    if pool_views is not None:
        views = [pool_views.get(name, UNKNOWN_VIEW) for name in pool_names]
        for view in sorted(set(views)):
            members = [index for index, its_view in enumerate(views) if its_view == view]
            yield f"by_view/{view}", torch.isin(facts.pools_T, facts.pools_T.new_tensor(members))
    for kind, buckets, values_T in (
        ("by_lag", LAG_BUCKETS, facts.lags_T),
        ("by_position", POSITION_BUCKETS, facts.positions_T),
    ):
        for name, first, last in buckets:
            chosen_T = values_T >= first
            yield f"{kind}/{name}", chosen_T if last is None else chosen_T & (values_T <= last)


def _group_metrics(facts: TokenFacts, chosen_T: Tensor, *, group: str) -> dict[str, float]:
    """`mismatch/<group>*` and `correction/<group>*` of the chosen tokens, at least one."""
    gaps = mismatch_metrics(facts.log_ratios_T[chosen_T], facts.sequences_T[chosen_T])
    metrics = {key.replace("mismatch/", f"mismatch/{group}", 1): gaps[key] for key in gaps}
    weights_T = facts.weights_T[chosen_T]
    metrics[f"mismatch/{group}tokens"] = float(weights_T.numel())
    metrics[f"correction/{group}masked_frac"] = float((weights_T == 0).double().mean())
    metrics[f"correction/{group}outside_frac"] = float(facts.outside_T[chosen_T].double().mean())
    metrics[f"correction/{group}ess_frac"] = effective_sample_frac(weights_T)
    if facts.tail_ratio_T is not None:
        tail_ratio_T = facts.tail_ratio_T[chosen_T].double()
        metrics[f"correction/{group}sc_tail_ratio"] = float(tail_ratio_T.mean())
    return metrics


def _sequence_sums(d_T: Tensor, sequences_T: Tensor) -> tuple[Tensor, Tensor]:
    """([S] sum of d, [S] tokens) of each sequence."""
    _, index_T = torch.unique(sequences_T, return_inverse=True)
    num_sequences = int(index_T.max()) + 1
    sums_S = d_T.new_zeros(num_sequences).index_add(0, index_T, d_T)
    return sums_S, torch.bincount(index_T, minlength=num_sequences).to(d_T.dtype)


def _clamped(values: Tensor) -> Tensor:
    return values.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
