"""Policy losses over sampled tokens.

Invariants: the denominator is an argument, so that any split of a batch gives the same loss and
gradient; a token whose weight is 0 stays in the denominator and keeps its centering term; a
dropped sequence stays in the denominator and loses both; masked positions are replaced before
arithmetic; bfloat16 input is computed in float32.

Loss values of different importance kinds are not comparable (a score loss is not a surrogate);
only their gradients mean something.
"""

# T policy tokens

from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.algos.corrections import (
    CENTERED_KINDS,
    LOGPROB_FLOOR,
    applied_weights,
    bounded_ratios,
    centering_term,
    check_bounds,
    in_compute_dtype,
    log_ratio,
    outside_bounds,
    unit_log_ratio,
    weight_metrics,
)
from rlmix.algos.metrics import mismatch_metrics
from rlmix.algos.sequence_masks import (
    DroppedSequences,
    SequenceRule,
    dropped_metrics,
    dropped_sequences,
)
from rlmix.algos.sequences import sequence_length
from rlmix.algos.support import Support

AVERAGES = ("tokens", "sequences")
"""What a loss is the mean over: every policy token alike, or every sequence alike (the mean of
each sequence's token mean)."""


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """Everything the loss knows about each policy token. Only `loss_T` carries a gradient."""

    loss_T: Tensor
    log_ratios_T: Tensor
    """Trainer minus sampler logprob, before any clamp or mask."""
    weights_T: Tensor
    """Applied weights: 0 in dropped sequences too."""
    outside_T: Tensor
    """bool: the ratio lies outside the bounds, whether or not the kind acts on it."""
    coeff_l1_T: Tensor | None
    tail_ratio_T: Tensor | None
    """Both None without centering."""
    dropped: DroppedSequences | None
    """None without a rule about sequences."""


def token_terms(
    trainer_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    *,
    importance: str,
    low: float,
    high: float,
    centering: bool,
    support: Support | None = None,
    sequences_T: Tensor | None = None,
    sequence_rule: SequenceRule | None = None,
    average: str = "tokens",
) -> TokenTerms:
    """The loss of each policy token, not yet divided by the denominator.

    Arguments as in `policy_loss`, policy tokens only (nothing masked).
    """
    check_bounds(kind=importance, low=low, high=high)
    _check_centering(importance=importance, centering=centering, support=support)
    _check_sequences(sequences_T, rule=sequence_rule, average=average)
    trainer_T = in_compute_dtype(trainer_logprobs_T).clamp(min=LOGPROB_FLOOR)
    advantages_T = in_compute_dtype(advantages_T.detach())
    log_ratios_T = log_ratio(trainer_T, sampler_logprobs_T)
    unit_T = unit_log_ratio(log_ratios_T, kind=importance, sequences_T=sequences_T)
    weights_T = applied_weights(
        unit_T, kind=importance, low=low, high=high, advantages_T=advantages_T
    )
    coeff_l1_T = tail_ratio_T = None
    if importance in ("ppo", "gspo"):
        loss_T = _clipped_surrogate(trainer_T, unit_T, advantages_T, low=low, high=high)
    else:
        score_T = weights_T * trainer_T
        if centering:
            assert support is not None
            term = centering_term(support, kind=importance, low=low, high=high)
            score_T = score_T - term.sum_T
            coeff_l1_T, tail_ratio_T = term.coeff_l1_T, term.tail_ratio_T
        loss_T = -advantages_T * score_T
    dropped = None
    if sequence_rule is not None and not sequence_rule.is_off:
        assert sequences_T is not None
        dropped = dropped_sequences(log_ratios_T, advantages_T, sequences_T, rule=sequence_rule)
        # The centering term goes with the sequence: it belongs to tokens that are trained on.
        loss_T = loss_T.masked_fill(dropped.any_T, 0.0)
        weights_T = weights_T.masked_fill(dropped.any_T, 0.0)
    if average == "sequences":
        assert sequences_T is not None
        loss_T = loss_T / sequence_length(sequences_T).to(loss_T.dtype)
    return TokenTerms(
        loss_T=loss_T,
        log_ratios_T=log_ratios_T,
        weights_T=weights_T,
        outside_T=outside_bounds(unit_T, kind=importance, low=low, high=high),
        coeff_l1_T=coeff_l1_T,
        tail_ratio_T=tail_ratio_T,
        dropped=dropped,
    )


def policy_loss(
    trainer_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    advantages_T: Tensor,
    mask_T: Tensor,
    *,
    importance: str,
    low: float,
    high: float,
    denominator: float,
    centering: bool,
    support: Support | None = None,
    sequences_T: Tensor | None = None,
    sequence_rule: SequenceRule | None = None,
    average: str = "tokens",
) -> tuple[Tensor, dict[str, float]]:
    """Policy-gradient loss with a correction for the sampler's other numbers and older weights.

    loss = -1/denominator * sum_t A_t ( sg[f(r_t)] log p_t - sum_v sg[q_v f(p_v/q_v)] log p_v )

    for the importance kinds "none", "tis", "mis", "cispo" and "seq_tis", the second part with
    `centering` only (not for "seq_tis"); "ppo" and "gspo" use the clipped surrogate
    -min(r A, clip(r, low, high) A).

    Args:
        trainer_logprobs_T: float [T], natural log, differentiable; on the same support and at the
            same temperature as the sampler's.
        sampler_logprobs_T: float [T], natural log, of the distribution really sampled from.
        advantages_T: float [T], dimensionless; detached here.
        mask_T: bool [T], True for tokens the policy sampled. The rest may hold anything, nan too.
        importance: one of `corrections.IMPORTANCE_KINDS`.
        low, high: inclusive bounds on the ratio p/q; for "ppo" 1 - eps and 1 + eps.
        denominator: policy tokens of the whole batch, over all micro-batches and ranks, masked
            weights and dropped sequences included; with `average` "sequences" its sequences.
        centering: subtract the expected weighted score (needs `support`).
        support: candidates of each token, [T, K].
        sequences_T: int64 [T], equal ids belong together, each sequence whole; needed by
            `corrections.SEQUENCE_KINDS`, by `sequence_rule` and by `average` "sequences".
        sequence_rule: which whole sequences add nothing; None drops none.
        average: one of `AVERAGES`.
    Returns:
        (scalar loss float32 or float64, metrics over this call's policy tokens).
    Raises:
        ValueError: impossible settings, `centering` without support, a rule about sequences
            without `sequences_T`, denominator not positive.
    Source: arXiv:2609.20807 (centering), arXiv:2510.18855 (mis); see `importance_weights`.
    """
    if not denominator > 0:
        raise ValueError(
            f"policy_loss: denominator={denominator}; pass the number of policy tokens of the "
            "whole batch, which is positive"
        )
    _check_centering(importance=importance, centering=centering, support=support)
    mask_T = mask_T.bool()
    if sequences_T is not None:
        sequences_T = sequences_T[mask_T]
    if support is not None:
        support = Support(
            trainer_logprobs_TK=support.trainer_logprobs_TK[mask_T],
            sampler_logprobs_TK=support.sampler_logprobs_TK[mask_T],
            is_exact=support.is_exact,
        )
    # Indexing takes masked positions out of the graph: whatever they hold cannot reach the loss.
    terms = token_terms(
        trainer_logprobs_T[mask_T],
        sampler_logprobs_T[mask_T],
        advantages_T[mask_T],
        importance=importance,
        low=low,
        high=high,
        centering=centering,
        support=support,
        sequences_T=sequences_T,
        sequence_rule=sequence_rule,
        average=average,
    )
    metrics = mismatch_metrics(terms.log_ratios_T)
    metrics |= weight_metrics(terms.weights_T, terms.log_ratios_T, terms.outside_T)
    if terms.tail_ratio_T is not None and terms.coeff_l1_T is not None and mask_T.any():
        metrics["correction/sc_tail_ratio"] = float(terms.tail_ratio_T.mean())
        metrics["correction/sc_coeff_l1"] = float(terms.coeff_l1_T.mean())
    if terms.dropped is not None and sequences_T is not None:
        metrics |= dropped_metrics(terms.dropped, sequences_T)
    return terms.loss_T.sum() / denominator, metrics


def _check_centering(*, importance: str, centering: bool, support: Support | None) -> None:
    if not centering:
        return
    if importance not in CENTERED_KINDS:
        raise ValueError(
            f"policy_loss: centering is not defined for importance={importance!r}; use one of "
            f"{', '.join(CENTERED_KINDS)}, or centering=False"
        )
    if support is None:
        raise ValueError(
            "policy_loss: centering=True needs the candidates that the sampler recorded, got "
            "support=None; record kept sets or a head, or set centering=False"
        )


def _check_sequences(
    sequences_T: Tensor | None, *, rule: SequenceRule | None, average: str
) -> None:
    if average not in AVERAGES:
        raise ValueError(
            f"policy_loss: average={average!r} is unknown; use one of {', '.join(AVERAGES)}"
        )
    if sequences_T is None and (average == "sequences" or not (rule is None or rule.is_off)):
        raise ValueError(
            "policy_loss: got no sequences_T, the sequence of each token; a sequence rule and "
            'average="sequences" need it'
        )


def _clipped_surrogate(
    trainer_T: Tensor, unit_T: Tensor, advantages_T: Tensor, *, low: float, high: float
) -> Tensor:
    """-min(r A, clip(r, low, high) A); r carries the gradient through log p alone."""
    # exp(x - sg[x]) is 1 and has the gradient of log p: the ratio's value stays clamped.
    ratios_T = bounded_ratios(unit_T)
    ratios_T = ratios_T * (trainer_T - trainer_T.detach()).exp()
    return -torch.minimum(ratios_T * advantages_T, ratios_T.clamp(min=low, max=high) * advantages_T)
