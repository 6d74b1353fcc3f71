"""One optimizer step's worth of loss, gradient and facts.

Invariants: the denominator is that of the whole step (its policy tokens, or its sequences), so the
split into micro-batches changes nothing but rounding; a micro-batch holds whole sequences; facts
are taken before any weight is applied; a non-finite loss stops before its gradient reaches
anything.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from rlmix.algos.corrections import CENTERED_KINDS
from rlmix.algos.losses import TokenTerms, token_terms
from rlmix.algos.metrics import HeadFacts, TokenFacts, head_facts
from rlmix.algos.sequence_masks import DroppedSequences, SequenceRule, dropped_metrics
from rlmix.algos.support import Support
from rlmix.batch.packing import MicroBatch
from rlmix.core.errors import DataError
from rlmix.trainer.policy import Policy, TokenLogprobs
from rlmix.trainer.routing import RoutingTally
from rlmix.trainer.spec import AlgoSpec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PassResult:
    """What all micro-batches of a step gave together."""

    loss: float
    """Already divided by the denominator."""
    facts: TokenFacts | None
    """None when the loss was not finite."""
    heads: HeadFacts | None
    """Of the heads beside kept sets; None when no token recorded one, or the loss was not
    finite."""
    sequence_metrics: dict[str, float]
    """Shares of the step's sequences that were dropped; 0 without a rule, empty when the loss was
    not finite."""
    routing: tuple[RoutingTally, ...]
    """Of each micro-batch; empty when routes are not replayed or the loss was not finite."""
    failure: str
    """Which micro-batch was not finite; empty when all were."""


def step_denominator(micro_batches: Sequence[MicroBatch], algo: AlgoSpec) -> float:
    """What the loss of a whole step is divided by: its policy tokens, or its sequences."""
    if algo.average == "sequences":
        return float(sum(len(batch.session_ids) for batch in micro_batches))
    return float(sum(batch.sampled_P.size for batch in micro_batches))


def sequence_rule(algo: AlgoSpec) -> SequenceRule:
    """The algorithm's rule about whole sequences; raises ValueError for impossible bounds."""
    return SequenceRule(
        mask=algo.sequence_mask, low=algo.sequence_low, high=algo.sequence_high, veto=algo.veto
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPass:
    """What one micro-batch gave; picklable, so that ranks can exchange it."""

    loss: float
    """Its share: divided by the denominator of the whole step."""
    failure: str
    """Empty when the loss was finite; then the rest is there."""
    facts: TokenFacts | None = None
    heads: HeadFacts | None = None
    dropped: DroppedSequences | None = None
    routing: RoutingTally | None = None


def run_micro_batches(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    algo: AlgoSpec,
    *,
    denominator: float,
    trainer_version: int,
) -> PassResult:
    """Forward all micro-batches, backward those with signal; gradients go where hooks put them.

    Stops at the first that is not finite. Arguments as of `run_micro_batch`, errors as of
    `check_micro_batches`.
    """
    check_micro_batches(policy, micro_batches, algo, trainer_version=trainer_version)
    passes: list[BatchPass] = []
    for batch in micro_batches:
        found = run_micro_batch(
            policy, batch, algo, denominator=denominator, trainer_version=trainer_version
        )
        passes.append(found)
        if found.failure:
            break
    return join_passes(micro_batches, passes)


def check_micro_batches(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    algo: AlgoSpec,
    *,
    trainer_version: int,
) -> None:
    """Refuse what no pass could use, before the first one.

    Every rank asks it of the whole step: one that met bad data in its own share only would leave
    the others waiting for it in an exchange.

    Args:
        trainer_version: policy version of the weights in `policy`.
    Raises:
        DataError: a token of a newer version than the trainer's, records that `algo` cannot do
            without, or a record of experts that no router can have made.
    """
    for batch in micro_batches:
        if batch.versions_P.size and batch.versions_P.max() > trainer_version:
            raise DataError(
                f"trainer: sessions {batch.session_ids[:3]} hold tokens of version "
                f"{batch.versions_P.max()}, but the trainer is at {trainer_version}"
            )
        if algo.centering and not batch.has_support(replay=algo.replay):
            raise DataError(
                f"trainer: sessions {batch.session_ids[:3]} recorded no candidates that "
                "algo.centering can sum over; record kept sets with algo.replay=true, or heads, "
                "or set algo.centering=false"
            )
        policy.check_routes(batch)


def run_micro_batch(
    policy: Policy,
    batch: MicroBatch,
    algo: AlgoSpec,
    *,
    denominator: float,
    trainer_version: int,
    is_in_step: bool = False,
) -> BatchPass:
    """Forward one micro-batch that `check_micro_batches` let pass, and backward if it has signal.

    Args:
        denominator: as `step_denominator` gives it for the step's micro-batches of all ranks.
        trainer_version: policy version of the weights in `policy`, for the tokens' lag.
        is_in_step: other ranks compute with this one, so that the backward pass is made even
            where the loss is not finite; the caller must then throw the gradients away.
    """
    lags_P = trainer_version - torch.from_numpy(batch.versions_P)
    with torch.set_grad_enabled(batch.needs_gradient):
        terms, found = _terms(policy, batch, algo)
        batch_loss = terms.loss_T.sum() / denominator
    value = float(batch_loss.detach())
    is_finite = math.isfinite(value)
    if batch.needs_gradient and (is_finite or is_in_step):
        policy.backward(batch_loss)
    if not is_finite:
        return BatchPass(loss=value, failure=_failure(batch, terms))
    heads = None
    if found.head is not None:
        pools_H = policy.put(batch.pools_P[batch.head_tokens_H])
        heads = _on_cpu(_head_facts(found.head, pools_H, algo))
    facts = TokenFacts(
        log_ratios_T=terms.log_ratios_T,
        weights_T=terms.weights_T,
        outside_T=terms.outside_T,
        entropy_T=found.entropy_P,
        pools_T=torch.from_numpy(batch.pools_P),
        lags_T=lags_P,
        positions_T=torch.from_numpy(batch.cols_P),
        sequences_T=torch.from_numpy(batch.sequences_P),
        coeff_l1_T=terms.coeff_l1_T,
        tail_ratio_T=terms.tail_ratio_T,
    )
    return BatchPass(
        loss=value,
        failure="",
        facts=_on_cpu(facts),
        heads=heads,
        dropped=_on_cpu(terms.dropped),
        routing=_on_cpu(found.routing),
    )


def join_passes(micro_batches: Sequence[MicroBatch], passes: Sequence[BatchPass]) -> PassResult:
    """A step out of its micro-batches, both in the same order.

    Args:
        passes: one for each micro-batch, or up to the first that failed.
    """
    for found in passes:
        if found.failure:
            return PassResult(
                loss=found.loss,
                facts=None,
                heads=None,
                sequence_metrics={},
                routing=(),
                failure=found.failure,
            )
    return PassResult(
        loss=sum(found.loss for found in passes),
        facts=_joined([found.facts for found in passes if found.facts is not None]),
        heads=_joined_heads([found.heads for found in passes if found.heads is not None]),
        sequence_metrics=_sequence_metrics(micro_batches, [found.dropped for found in passes]),
        routing=tuple(found.routing for found in passes if found.routing is not None),
        failure="",
    )


def _terms(policy: Policy, batch: MicroBatch, algo: AlgoSpec) -> tuple[TokenTerms, TokenLogprobs]:
    found = policy.token_logprobs(batch, temperature=algo.temperature, replay=algo.replay)
    terms = token_terms(
        found.trainer_P,
        policy.put(batch.sampler_logprobs_P),
        policy.put(batch.advantages_P),
        importance=algo.importance,
        low=algo.low,
        high=algo.high,
        centering=algo.centering,
        support=found.support,
        sequences_T=policy.put(batch.sequences_P),
        sequence_rule=sequence_rule(algo),
        average=algo.average,
    )
    return terms, found


def _on_cpu(facts: T) -> T:
    """The same dataclass with its tensors in main memory, detached; None stays None."""
    if facts is None:
        return facts
    tensors = {
        name: value.detach().cpu()
        for name in facts.__dataclass_fields__  # type: ignore[attr-defined]
        if isinstance(value := getattr(facts, name), Tensor)
    }
    return replace(facts, **tensors)  # type: ignore[type-var]


def _sequence_metrics(
    micro_batches: Sequence[MicroBatch], dropped: Sequence[DroppedSequences | None]
) -> dict[str, float]:
    """Numbers of sequences are unique in a step, so all micro-batches are counted as one."""
    sequences_T = torch.cat([torch.from_numpy(batch.sequences_P) for batch in micro_batches])
    none_T = torch.zeros_like(sequences_T, dtype=torch.bool)
    found = [part for part in dropped if part is not None]
    everything = DroppedSequences(
        masked_T=torch.cat([part.masked_T for part in found]) if found else none_T,
        vetoed_T=torch.cat([part.vetoed_T for part in found]) if found else none_T,
    )
    return dropped_metrics(everything, sequences_T)


def _failure(batch: MicroBatch, terms: TokenTerms) -> str:
    bad = (~torch.isfinite(terms.loss_T)).nonzero().flatten()
    where = "their sum overflows"
    if bad.numel():
        row = int(batch.rows_P[int(bad[0])])
        where = f"first in session {batch.session_ids[row]}"
    return (
        f"non-finite: {bad.numel()} of {terms.loss_T.numel()} token losses in a micro-batch of "
        f"{len(batch.session_ids)} sessions, {where}"
    )


def _head_facts(head: Support, pools_H: Tensor, algo: AlgoSpec) -> HeadFacts:
    # Weights that are no function of the ratio have no centering term; the tails are theirs too.
    kind = algo.importance if algo.importance in CENTERED_KINDS else "none"
    return head_facts(head, pools_H, kind=kind, low=algo.low, high=algo.high)


def _joined_heads(parts: Sequence[HeadFacts]) -> HeadFacts | None:
    if not parts:
        return None
    names = HeadFacts.__dataclass_fields__
    return HeadFacts(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _joined(parts: Sequence[TokenFacts]) -> TokenFacts:
    def cat(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    has_centering = all(part.tail_ratio_T is not None for part in parts)
    return TokenFacts(
        log_ratios_T=cat("log_ratios_T"),
        weights_T=cat("weights_T"),
        outside_T=cat("outside_T"),
        entropy_T=cat("entropy_T"),
        pools_T=cat("pools_T"),
        lags_T=cat("lags_T"),
        positions_T=cat("positions_T"),
        sequences_T=cat("sequences_T"),
        coeff_l1_T=cat("coeff_l1_T") if has_centering else None,
        tail_ratio_T=cat("tail_ratio_T") if has_centering else None,
    )
