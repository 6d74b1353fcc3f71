"""Probes of matrix products: which matrix does it multiply with, and in which format does it see
its input?

A product is linear, so one-hot rows show the matrix itself. Rows hold 6.0: the largest NVFP4 code,
so that a quantiser of inputs changes nothing. Inputs that went through a known quantiser already
show whether the operator applies it: then nothing changes.
"""

# T rows, I inputs, O outputs, K experts per token

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlmix.diff.findings import Judgement, Thresholds
from rlmix.diff.program import Place, Registers, Shape, Side, run_operator
from rlmix.numerics import fp8, nvfp4

HOT = 6.0
MAX_EXPERTS = 4
"""Experts whose matrices are read: those whose results differ most."""
READS_FROM = {
    "qkv": "normed",
    "router": "normed",
    "gate_up": "normed",
    "out_proj": "attended",
    "down": "inner",
    "head": "normed",
}
WRITES_TO = {
    "qkv": "heads",
    "router": "router",
    "gate_up": "gate_up",
    "out_proj": "hidden",
    "head": "logits",
}


def judge_product(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """Weights and input formats; None when neither differs."""
    experts = _experts(a, b, place, inputs)
    matrices = [(read(a, place, inputs, e), read(b, place, inputs, e)) for e in experts]
    if any(one.shape != other.shape for one, other in matrices):
        shapes = f"{tuple(matrices[0][0].shape)} and {tuple(matrices[0][1].shape)}"
        return _found("vocabulary", f"the matrices have shapes {shapes}", 0.95)
    found = _judge_weights(matrices, _parts(a.shape, place), limits)
    if found is not None:
        return found
    return _judge_inputs(a, b, place, inputs, experts[0]) or _judge_linearity(
        a, b, place, inputs, experts[0], limits
    )


def _found(cause: str, evidence: str, confidence: float, **facts: float | str) -> Judgement:
    return Judgement(cause=cause, evidence=evidence, confidence=confidence, facts=facts)


def _experts(a: Side, b: Side, place: Place, inputs: Registers) -> list[int | None]:
    """Experts in the order of how much their results differ; [None] in a dense layer."""
    if "experts" not in inputs or place.name not in ("gate_up", "down"):
        return [None]
    one, other = (next(iter(run_operator(s, place, inputs).values())) for s in (a, b))
    gap_TK = (one.float() - other.float()).square().sum(-1)
    gap_E = torch.zeros(a.shape.num_experts).index_add_(
        0, inputs["experts"].reshape(-1), gap_TK.reshape(-1)
    )
    return [int(e) for e in gap_E.argsort(descending=True)[:MAX_EXPERTS].tolist()]


def _parts(shape: Shape, place: Place) -> tuple[int, ...]:
    """Rows of the matrices that a checkpoint holds where an operator multiplies with several."""
    if place.name == "qkv":
        keys = shape.num_kv_heads * shape.head_dim
        return (shape.num_heads * shape.head_dim, keys, keys)
    return (shape.inner, shape.inner) if place.name == "gate_up" else ()


def ask(side: Side, place: Place, rows: Tensor, inputs: Registers, expert: int | None) -> Tensor:
    """The product of rows [R, I] with one matrix, without residual; [R, O]."""
    registers = dict(inputs)
    registers["hidden"] = (
        torch.zeros(len(rows), inputs["hidden"].shape[-1])
        if ("hidden" in inputs)
        else torch.zeros(0)
    )
    name = READS_FROM[place.name]
    if expert is not None:
        top_k = inputs["experts"].shape[1]
        registers["experts"] = torch.full((len(rows), top_k), expert)
        if place.name == "down":
            rows = rows[:, None].expand(-1, top_k, -1).contiguous()
    registers[name] = rows
    out = run_operator(side, place, registers)
    found = out.get("outputs", out.get(WRITES_TO.get(place.name, "hidden")))
    assert found is not None
    if expert is not None:
        found = found[:, 0]
    return found.reshape(len(found), -1).float()


def read(side: Side, place: Place, inputs: Registers, expert: int | None) -> Tensor:
    """[O, I]: the matrix that a side multiplies with, as far as the format of its result shows."""
    width = inputs[READS_FROM[place.name]].shape[-1]
    return ask(side, place, torch.eye(width) * HOT, inputs, expert).t() / HOT


def _judge_weights(
    matrices: list[tuple[Tensor, Tensor]], parts: tuple[int, ...], limits: Thresholds
) -> Judgement | None:
    gaps = [relative(b, a) for a, b in matrices]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[worst] <= limits.weight:
        return None
    one, other = matrices[worst]
    for name, made in _quantised(one, parts):
        left = relative(other, made) / gaps[worst]
        if left <= limits.grid:
            return _found(
                "quantisation",
                f"one-hot inputs show the other side's matrix: {name} of this side's "
                f"({gaps[worst]:.2g} from it, {left:.2g} of that from its {name})",
                0.95,
                weights=name,
                weight_gap=gaps[worst],
            )
    levels = _uniform_levels(other)
    if levels:
        return _found(
            "quantisation",
            f"one-hot inputs show a matrix on a grid of {levels} levels a row, {gaps[worst]:.2g} "
            "from this side's",
            0.9,
            weights=f"{levels} levels",
            weight_gap=gaps[worst],
        )
    return _found(
        "weights",
        f"one-hot inputs show another matrix, {gaps[worst]:.2g} from this side's and near no "
        "quantised form of it",
        0.95,
        weight_gap=gaps[worst],
    )


def relative(values: Tensor, base: Tensor) -> float:
    """Root mean square of the difference over that of the base."""
    size = float(base.double().square().mean().sqrt()) or 1.0
    return float((values.double() - base.double()).square().mean().sqrt()) / size


def _quantised(matrix: Tensor, parts: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """A matrix in the formats of the weight views, each of its parts by itself."""
    whole = matrix.bfloat16()
    weights = whole.split(parts) if sum(parts) == len(whole) else (whole,)
    amax = whole.abs().amax().float()

    def joined(make: Callable[[Tensor], Tensor]) -> Tensor:
        return torch.cat([make(weight.contiguous()) for weight in weights])

    yield "fp8 blocks", joined(lambda w: fp8.quantize_blocks(w, name="probe").dequantize())
    yield "fp8 channels", joined(lambda w: fp8.quantize_channels(w, name="probe").dequantize())
    if whole.shape[-1] % nvfp4.BLOCK == 0:
        yield "nvfp4", joined(lambda w: nvfp4.quantize(w, amax=amax, name="probe").dequantize())
        yield "nvfp4", joined(lambda w: nvfp4.quantize(w, name="probe").dequantize())


def _uniform_levels(matrix: Tensor) -> int:
    """Levels on either side of 0 of an integer grid per row that holds the matrix; 0: none."""
    largest = matrix.abs().amax(1, keepdim=True).clamp(min=1e-30)
    for levels in (7, 127):
        codes = matrix / largest * levels
        # A result in BF16 is off by up to a half of 2^-8 of itself.
        room = 0.02 + codes.abs() * 2.0**-8
        if bool(((codes - codes.round()).abs() <= room).all()) and levels * 2.0**-8 < 0.4 + (
            levels > 7
        ):
            return levels
    return 0


def _known_inputs() -> dict[str, Callable[[Tensor], Tensor]]:
    return {
        "fp8 in groups of 128": lambda x: fp8.fake_quantize_activations(x, "fp32"),
        "fp8 in groups of 128, power-of-two scales": lambda x: fp8.fake_quantize_activations(
            x, "ue8m0"
        ),
        "fp8 by row": lambda x: fp8.fake_quantize_activations(x, "fp32", group=None),
        "nvfp4": nvfp4.fake_quantize_activations,
        "int8 by row": _int8_rows,
    }


def _int8_rows(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


def _judge_inputs(
    a: Side, b: Side, place: Place, inputs: Registers, expert: int | None
) -> Judgement | None:
    """Formats in which B rounds its input and A does not."""
    rows = inputs[READS_FROM[place.name]].float()
    rows = rows.reshape(-1, rows.shape[-1])[:64].contiguous()
    plain = {side.name: ask(side, place, rows, inputs, expert) for side in (a, b)}
    for name, quantise in _known_inputs().items():
        try:
            rounded = quantise(rows.clone())
        except ValueError:  # DataError: a width that this format does not divide.
            continue
        left = {}
        for side in (a, b):
            moved = relative(ask(side, place, rounded, inputs, expert), plain[side.name])
            left[side.name] = moved
        if left[a.name] > 4e-3 and left[b.name] <= 0.2 * left[a.name]:
            return _found(
                "quantisation",
                f"the other side rounds its input to {name}: inputs rounded beforehand move this "
                f"side's result by {left[a.name]:.2g}, the other's by {left[b.name]:.2g}",
                0.95,
                activations=name,
            )
    return None


def _judge_linearity(
    a: Side, b: Side, place: Place, inputs: Registers, expert: int | None, limits: Thresholds
) -> Judgement | None:
    """A bias, a cap or another function around the product."""
    rows = inputs[READS_FROM[place.name]].float()
    rows = rows.reshape(-1, rows.shape[-1])[:64].contiguous()
    zero = ask(b, place, torch.zeros_like(rows[:4]), inputs, expert)
    if float(zero.abs().max()) > 0 and not float(
        ask(a, place, torch.zeros_like(rows[:4]), inputs, expert).abs().max()
    ):
        return _found("weights", "the other side adds a bias: zeros give no zeros", 0.95)
    bent = relative(
        ask(b, place, rows * 16, inputs, expert) / 16, ask(b, place, rows, inputs, expert)
    )
    straight = relative(
        ask(a, place, rows * 16, inputs, expert) / 16, ask(a, place, rows, inputs, expert)
    )
    if bent > limits.weight and bent > 4 * straight:
        return _found(
            "hyper-parameter",
            f"the other side is not linear: 16 times the input gives a result that is off by "
            f"{bent:.2g} (a cap or a clamp)",
            0.9,
        )
    return None
