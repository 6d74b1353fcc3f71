"""Compares recorded texts whose sampler cannot be run here: dump files and real servers.

There are no operators to replay on the other side, so the trainer's own scores are asked instead:
under which change of the question (temperature, renormalisation, shift, rounding) would they be
the recorded ones? What no change explains stays inconclusive. Invariant: a cause is named only when
it removes most of the difference, and the evidence says how much.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlmix.diff.advice import next_experiment
from rlmix.diff.findings import verdict_of
from rlmix.diff.report_data import Cause

EXPLAINS = 0.8
"""Share of the mean |difference| that a change must remove to be named."""
TEMPERATURES = torch.linspace(0.3, 2.0, 341)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One change of the question, and what it leaves."""

    cause: str
    operator: str
    evidence: str
    left: float


def explain(logits_PV: Tensor, targets_P: Tensor, recorded_P: Tensor) -> tuple[Cause, ...]:
    """The change of the trainer's question that explains what was recorded, if any does.

    Args:
        logits_PV: float32, the trainer's, over the sampling temperature that was told.
        targets_P: int64, the sampled ids.
        recorded_P: float32, what the sampler reported.
    """
    scores = logits_PV.double()
    own = _picked(scores, targets_P) - scores.logsumexp(-1)
    gap = float((own - recorded_P).abs().mean())
    if gap == 0:
        return ()
    asked = [*_temperature(scores, targets_P, recorded_P), *_rest(scores, targets_P, recorded_P)]
    best = min(asked, key=lambda one: one.left)
    removed = 1 - best.left / gap
    if removed < EXPLAINS:
        return ()
    return (
        Cause(
            operator=best.operator,
            layers=(-1,),
            verdict=verdict_of(best.cause),
            cause=best.cause,
            evidence=f"{best.evidence}: that leaves {best.left:.3g} of {gap:.3g} nats",
            confidence=0.9 if removed > 0.95 else 0.7,
            share=removed,
            alone=gap - best.left,
            left=best.left,
            next_experiment=next_experiment(best.cause, best.operator),
        ),
    )


def _picked(scores_PV: Tensor, targets_P: Tensor) -> Tensor:
    return scores_PV.gather(1, targets_P[:, None])[:, 0]


def _temperature(scores: Tensor, targets: Tensor, recorded: Tensor) -> Iterator[Asked]:
    left = []
    for temperature in TEMPERATURES.tolist():
        tempered = scores / temperature
        own = _picked(tempered, targets) - tempered.logsumexp(-1)
        left.append(float((own - recorded).abs().mean()))
    best = int(np.argmin(left))
    factor = float(TEMPERATURES[best])
    if abs(factor - 1) > 0.006:
        yield Asked(
            cause="sampling",
            operator="logprob",
            evidence=f"recorded logprobs belong to {factor:.3g} times the temperature",
            left=left[best],
        )


def _rest(scores: Tensor, targets: Tensor, recorded: Tensor) -> Iterator[Asked]:
    own = _picked(scores, targets) - scores.logsumexp(-1)
    lift = float((recorded - own).median())
    yield Asked(
        cause="sampling",
        operator="logprob",
        evidence=f"recorded logprobs are {lift:+.4g} nats off, all of them (a kept set?)",
        left=float((own + lift - recorded).abs().mean()),
    )
    for share in (0.99, 0.97, 0.95, 0.9, 0.8):
        ordered = scores.softmax(-1).sort(dim=-1, descending=True)
        before = ordered.values.cumsum(-1) - ordered.values
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(1, ordered.indices, before < share)
        kept.scatter_(1, targets[:, None], True)
        mass = scores.masked_fill(~kept, float("-inf")).logsumexp(-1)
        yield Asked(
            cause="sampling",
            operator="logprob",
            evidence=f"recorded logprobs are renormalised on the ids of top_p={share:g}",
            left=float((_picked(scores, targets) - mass - recorded).abs().mean()),
        )
    for name, held in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        yield Asked(
            cause="cast",
            operator="logprob",
            evidence=f"recorded logprobs are the trainer's, stored as {name}",
            left=float((own.to(held).double() - recorded).abs().mean()),
        )
    rounded = scores.bfloat16().double()
    yield Asked(
        cause="cast",
        operator="head",
        evidence="recorded logprobs are those of logits that were rounded to BF16",
        left=float((_picked(rounded, targets) - rounded.logsumexp(-1) - recorded).abs().mean()),
    )


def whole(parts: Sequence[np.ndarray]) -> Tensor:
    """All texts' numbers in one float64 row."""
    return torch.from_numpy(np.concatenate(parts)).double()
