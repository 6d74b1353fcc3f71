"""Same-input replay: both sides' operators on one side's inputs, and why those that differ do.

An operator that gets the very inputs that the other side recorded cannot inherit a difference, so
every culprit shows at once and nothing that is only downstream does. A probe that shows the cause
itself comes first; the shape of the error decides what probes leave open.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.diff.features import Features, features
from rlmix.diff.findings import Judgement, Thresholds
from rlmix.diff.probe_attention import judge_attention, judge_kv, judge_rope
from rlmix.diff.probe_products import judge_product
from rlmix.diff.probe_rest import judge_act, judge_embedding, judge_logprob, judge_norm, judge_route
from rlmix.diff.program import NORMS, PRODUCTS, Place, Registers, Side, Step, run_operator

Probe = Callable[[Side, Side, Place, Registers, Thresholds], Judgement | None]

PROBES: dict[str, Probe] = {
    "embed": judge_embedding,
    "rope": judge_rope,
    "kv": judge_kv,
    "attention": judge_attention,
    "route": judge_route,
    "act": judge_act,
    "logprob": judge_logprob,
    **dict.fromkeys(PRODUCTS, judge_product),
    **dict.fromkeys(NORMS, judge_norm),
}
"""Operator -> what asks it about its cause; the others are judged by their errors alone."""

RESIDUAL = ("out_proj", "down", "combine")
"""Operators that add to the residual stream, whose own part is judged without it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One operator whose two results differ on the same inputs."""

    place: Place
    judgement: Judgement
    features: Features


def replay(
    a: Side, b: Side, reference: Side, steps: Iterable[Step], limits: Thresholds
) -> list[Finding]:
    """Every operator that differs, in the order of the program.

    Args:
        a: the side whose trace `steps` is.
        reference: float64 operators with A's weights and settings.
    """
    found = []
    for step in steps:
        other = run_operator(b, step.place, step.inputs)
        if same(step.outputs, other):
            continue
        judgement, measured = judge(a, b, reference, step, other, limits)
        found.append(Finding(place=step.place, judgement=judgement, features=measured))
    return found


def same(first: Registers, second: Registers) -> bool:
    """Whether all registers hold the same numbers; NaN equals nothing."""
    return first.keys() == second.keys() and all(
        first[name].shape == second[name].shape and bool((first[name] == second[name]).all())
        for name in first
    )


def main_output(outputs: Registers) -> Tensor:
    """The register that an operator is judged by."""
    return outputs["shares"] if "shares" in outputs else next(iter(outputs.values()))


def judge(
    a: Side, b: Side, reference: Side, step: Step, other: Registers, limits: Thresholds
) -> tuple[Judgement, Features]:
    """Why B's result `other` is not A's."""
    measured = _measure(a, b, reference, step, other)
    probe = PROBES.get(step.place.name)
    told = None if probe is None else probe(a, b, step.place, step.inputs, limits)
    if told is not None:
        return told, measured
    return classify(measured, step.place.name, limits), measured


def _measure(a: Side, b: Side, reference: Side, step: Step, other: Registers) -> Features:
    one, two = main_output(step.outputs), main_output(other)
    exact = main_output(run_operator(reference, step.place, step.inputs))
    if one.shape != two.shape:
        width = min(one.shape[-1], two.shape[-1])
        one, two, exact = (part[..., :width] for part in (one, two, exact))
    whole = features(one, two, exact)
    if step.place.name in RESIDUAL and "outputs" not in step.outputs:
        inputs = {**step.inputs, "hidden": torch.zeros_like(step.inputs["hidden"])}
        parts = [main_output(run_operator(s, step.place, inputs)) for s in (a, b, reference)]
        alone = features(*parts)
        if alone.differing_frac and alone.error_b > 2 * whole.error_b:
            return alone
    return whole


def classify(seen: Features, name: str, limits: Thresholds) -> Judgement:
    """The class that the shape of an error speaks for, where no probe showed a cause."""
    facts = {
        "error_here": seen.error_a,
        "error_there": seen.error_b,
        "correlation": seen.correlation,
        "differing_frac": seen.differing_frac,
    }

    def told(cause: str, evidence: str, confidence: float) -> Judgement:
        return Judgement(cause=cause, evidence=evidence, confidence=confidence, facts=facts)

    errors = f"errors against float64 {seen.error_a:.2g} and {seen.error_b:.2g}"
    if abs(seen.slope) > limits.slope and seen.slope_fit > limits.slope_fit:
        return told("hyper-parameter", f"a constant factor of {1 + seen.slope:.5g}", 0.9)
    if not math.isfinite(seen.error_b) or seen.error_b > limits.rounding_error:
        if seen.error_b < 0.2 and seen.correlation < limits.order_correlation:
            return told(
                "quantisation",
                f"{errors}: that of the other side lies where four to eight bits do",
                0.5,
            )
        return told("hyper-parameter", f"{errors}: another function, on the same inputs", 0.5)
    if seen.is_bf16_b and not seen.is_bf16_a:
        return told("cast", f"the other side's result is BF16, here it is not; {errors}", 0.95)
    if seen.is_bf16_a and not seen.is_bf16_b:
        return told("cast", f"the result is BF16 here and not on the other side; {errors}", 0.95)
    is_order = (
        limits.order_ratio_low <= seen.ratio <= limits.order_ratio_high
        and seen.correlation >= limits.order_correlation
    ) or max(seen.error_a, seen.error_b) < 1e-6
    if is_order:
        first = seen.first_row or 0
        if name == "attention" and first and first % limits.tile == 0:
            return told("tiling", f"the first row that differs is {first}, a tile's edge", 0.9)
        cause = "tiling" if name == "attention" else "order"
        return told(
            cause,
            f"{errors}, correlated by {seen.correlation:.2f}; {seen.differing_frac:.2%} of the "
            "numbers differ: the same roundings of sums in another order",
            0.8,
        )
    return told(
        "cast",
        f"{errors}, correlated by {seen.correlation:.2f}: a rounding more, fewer or elsewhere",
        0.8,
    )
