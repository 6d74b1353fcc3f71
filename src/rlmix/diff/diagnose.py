"""Stages 3 to 6 for one pool: traces, same-input replay, causes and their shares."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlmix.diff.advice import next_experiment
from rlmix.diff.findings import Thresholds
from rlmix.diff.judge import Finding, replay
from rlmix.diff.program import Place, Side, Text, Trace, run_whole, trace
from rlmix.diff.report_data import Cause
from rlmix.diff.shares import effects
from rlmix.diff.texts import Recorded, on_kept_sets, positions_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """What stages 3 to 6 say of one text."""

    causes: tuple[Cause, ...]
    """Largest share first; those below the least share are left out unless none is left."""
    heat_LT: np.ndarray
    """float32 [layers, tokens], relative distance of the two residual streams."""
    assembly_max_abs: float
    """Largest difference between B's operators in order and what B recorded, nats."""
    first_difference: str | None
    """First operator whose results differ when each side goes its own way; only the first of
    several causes shows there."""


def text_of(recorded: Recorded) -> Text:
    return Text.of(list(recorded.ids), scored_from=recorded.sampled[0])


def causes_of(
    a: Side,
    b: Side,
    reference: Side,
    recorded: Recorded,
    limits: Thresholds,
    *,
    least_share: float,
) -> Diagnosis:
    """Operators of B that differ from A's on A's inputs, with their shares of the difference."""
    text = text_of(recorded)
    places = positions_of(recorded)
    seen = trace(a, text)
    other = trace(b, text)
    found = replay(a, b, reference, seen.steps, limits)
    strongest: dict[str, Finding] = {}
    for finding in found:
        name = finding.place.name
        if name not in strongest or _strength(finding) > _strength(strongest[name]):
            strongest[name] = finding
    classes = {name: finding.judgement.cause for name, finding in strongest.items()}
    causes = []
    for effect in effects(a, b, text, places, classes):
        name = effect.operator
        judged = strongest[name].judgement
        at = [
            f.place.layer
            for f in found
            if f.place.name == name and f.judgement.cause == judged.cause
        ]
        causes.append(
            Cause(
                operator=name,
                layers=tuple(at),
                verdict=judged.verdict,
                cause=judged.cause,
                evidence=judged.evidence,
                confidence=judged.confidence,
                share=effect.share,
                alone=effect.alone,
                left=effect.left,
                next_experiment=next_experiment(judged.cause, name),
            )
        )
    causes.sort(key=lambda cause: -cause.share)
    told = tuple(cause for cause in causes if cause.share >= least_share) or tuple(causes)
    recorded_P = torch.from_numpy(recorded.logprobs_P)
    own_P = other.logprobs_T[places]
    if recorded.kept is not None:
        logits = other.at(Place("head", -1)).outputs["logits"]
        own_P = on_kept_sets(logits, recorded, temperature=float(b.settings["temperature"]))
    gap = float((own_P - recorded_P).abs().max())
    return Diagnosis(
        causes=told,
        heat_LT=heat(seen, other),
        assembly_max_abs=gap,
        first_difference=first_difference(seen, other),
    )


def _strength(finding: Finding) -> float:
    return finding.features.gap


def heat(seen: Trace, other: Trace) -> np.ndarray:
    """float32 [layers, tokens]: distance of the residual streams after each layer, relative to the
    first side's size."""
    rows = []
    for one, two in zip(seen.steps, other.steps, strict=True):
        if one.place.name not in ("combine", "down") or "hidden" not in one.outputs:
            continue
        here, there = one.outputs["hidden"].float(), two.outputs["hidden"].float()
        size = here.norm(dim=1).clamp(min=1e-12)
        rows.append(((there - here).norm(dim=1) / size).numpy())
    return np.stack(rows).astype(np.float32)


def first_difference(seen: Trace, other: Trace) -> str | None:
    """See `Diagnosis`."""
    for one, two in zip(seen.steps, other.steps, strict=True):
        names = one.outputs.keys()
        if any(
            not torch.equal(one.outputs[name].float(), two.outputs[name].float()) for name in names
        ):
            return str(one.place)
    return None


def replayed(side: Side, texts: Sequence[Recorded]) -> list[torch.Tensor]:
    """Logprobs of the sampled tokens of each text through a side's operators, within their kept
    sets where those were recorded."""
    found = []
    for one in texts:
        registers = run_whole(side, text_of(one))
        if one.kept is None:
            found.append(registers["logprobs"][positions_of(one)])
        else:
            temperature = float(side.settings["temperature"])
            found.append(on_kept_sets(registers["logits"], one, temperature=temperature))
    return found
