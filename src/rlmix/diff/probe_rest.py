"""Probes of norms, embedding, routing and the last step from logits to a logprob."""

# T rows, H hidden, V vocabulary, E experts, K experts per token

import math

import torch
from torch import Tensor

from rlmix.diff.features import is_bf16
from rlmix.diff.findings import Judgement, Thresholds
from rlmix.diff.probe_products import relative
from rlmix.diff.program import Place, Registers, Side, run_operator


def _found(cause: str, evidence: str, confidence: float, **facts: float | str) -> Judgement:
    return Judgement(cause=cause, evidence=evidence, confidence=confidence, facts=facts)


def _norm(side: Side, place: Place, inputs: Registers, factor: float) -> Tensor:
    """The normed part of what an operator makes of a fixed pattern times `factor`."""
    name = "heads" if place.name == "qk_norm" else "hidden"
    like = inputs[name]
    draws = torch.Generator().manual_seed(7)
    width = like.shape[-1]
    signs = torch.randint(0, 2, (64, *like.shape[1:]), generator=draws).float() * 2 - 1
    out = run_operator(side, place, {**inputs, name: signs * factor})
    if place.name == "qk_norm":
        num_rotated = side.shape.num_heads + side.shape.num_kv_heads
        return (out["heads"][:, :num_rotated] * signs[:, :num_rotated]).reshape(-1, width)
    return (out["normed"] * signs).reshape(-1, width)


def judge_norm(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """Epsilon, weight, or no norm at all. A pattern of signs has a mean square of 1."""
    wide = {s.name: _norm(s, place, inputs, 64.0).double() for s in (a, b)}
    wider = _norm(b, place, inputs, 256.0).double()
    if relative(wider, wide[b.name]) > 0.5:
        return _found("hyper-parameter", "the other side does not divide by the size at all", 0.95)
    gap = relative(wide[b.name], wide[a.name])
    if gap > limits.weight:
        one = wide[b.name].mean(0) - wide[a.name].mean(0)
        if float((one - 1).abs().max()) < 0.05:
            return _found("hyper-parameter", "the other side multiplies with 1 + weight", 0.95)
        return _found("weights", f"the norm's weight is another one, off by {gap:.2g}", 0.95)
    eps = {}
    size = 2.0**-10  # Its square is 9.5e-7.
    for side in (a, b):
        small = _norm(side, place, inputs, size).double()
        large = wide[side.name]
        share = float((small * large).sum() / large.square().sum())
        eps[side.name] = size**2 * (1 / share**2 - 1) if share > 0 else math.inf
    off = abs(eps[b.name] - eps[a.name]) / size**2
    if off > 4 * limits.setting and abs(eps[b.name] / max(eps[a.name], 1e-30) - 1) > 0.1:
        return _found(
            "hyper-parameter",
            f"tiny inputs show epsilon {eps[b.name]:.2g}, here {eps[a.name]:.2g}",
            0.95,
            rms_eps=eps[b.name],
        )
    return None


def judge_embedding(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """Other ids, another factor, another table."""
    rows_a = run_operator(a, place, inputs)["hidden"].float()
    rows_b = run_operator(b, place, inputs)["hidden"].float()
    all_ids = torch.arange(a.shape.vocab_size)
    table = run_operator(a, place, {**inputs, "ids": all_ids})["hidden"].float()
    is_off_T = (rows_a != rows_b).any(1)
    first = int(is_off_T.nonzero()[0])
    nearest = torch.cdist(rows_b[is_off_T][:32], table).min(1)
    own = nearest.indices == inputs["ids"][is_off_T][:32]
    size = float(table.square().sum(1).mean().sqrt())
    if bool(((nearest.values < 0.02 * size) & ~own).any()):
        row = int(is_off_T.nonzero()[:32][(nearest.values < 0.02 * size) & ~own][0])
        other = int(nearest.indices[(nearest.values < 0.02 * size) & ~own][0])
        return _found(
            "tokens",
            f"at position {row} the other side read token {other}, here {int(inputs['ids'][row])}",
            0.95,
            first_position=float(row),
        )
    slope = float((rows_b * rows_a).sum() / rows_a.square().sum())
    if abs(slope - 1) > limits.slope and relative(rows_b, rows_a * slope) < limits.weight:
        return _found("hyper-parameter", f"embeddings are {slope:.4g} times those here", 0.95)
    if relative(rows_b, rows_a) > limits.weight:
        return _found("weights", f"from position {first} on other rows of the table", 0.9)
    return None


def judge_act(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """Another function: along a line of gates the distance of two functions is smooth, that of two
    roundings is not."""
    like = inputs["gate_up"]
    half = like.shape[-1] // 2
    gates = torch.linspace(-4.0, 4.0, half)
    row = torch.cat((gates, torch.ones(half)))
    rows = row.expand(*like.shape[:-1], -1)[:4].contiguous()
    few = {name: value[:4] for name, value in inputs.items()}
    here, there = (
        run_operator(s, place, {**few, "gate_up": rows})["inner"].reshape(-1, half)[0].double()
        for s in (a, b)
    )
    gap = there - here
    size = float(gap.square().mean().sqrt() / here.square().mean().sqrt())
    jump = float((gap[1:] - gap[:-1]).square().mean() / (2 * gap.square().mean()).clamp(min=1e-30))
    if size > limits.rounding_error and jump < 0.2:
        return _found(
            "hyper-parameter",
            f"another activation: along a line of gates it is off by {size:.2g}, smoothly",
            0.95,
        )
    return None


def judge_route(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """Which experts, and what they count for."""
    one, other = run_operator(a, place, inputs), run_operator(b, place, inputs)
    if one["experts"].shape != other["experts"].shape:
        counts = f"{other['experts'].shape[1]} experts a token, here {one['experts'].shape[1]}"
        return _found("router", f"the other side takes {counts}", 0.95)
    differs_T = (one["experts"] != other["experts"]).any(1)
    if differs_T.any():
        row = int(differs_T.nonzero()[0])
        return _found(
            "router",
            f"from the same scores {int(differs_T.sum())} tokens get other experts, or in another "
            f"order; the first is at position {row}",
            0.95,
        )
    gap = relative(other["shares"], one["shares"])
    if gap > limits.weight:
        return _found("router", f"experts count for other shares, off by {gap:.2g}", 0.95)
    if is_bf16(other["shares"]) and not is_bf16(one["shares"]):
        return _found("cast", "shares of experts are rounded to BF16", 0.95)
    if is_bf16(one["shares"]) and not is_bf16(other["shares"]):
        return _found("cast", "shares of experts are rounded to BF16 here and not there", 0.95)
    return None


def judge_logprob(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """Temperature, renormalisation, vocabulary, shifted targets, rounding."""
    logits, targets = inputs["logits"].float(), inputs["targets"]
    one, other = _logprobs(a, place, logits, targets), _logprobs(b, place, logits, targets)
    shifted = _shift(a, place, logits, targets, one, other)
    if shifted is not None:
        return shifted
    width = logits.shape[1]
    spread = torch.zeros(4, width)
    spread[:, 1] = 3.0
    two = torch.tensor([0, 1, 0, 1])
    slopes = {s.name: _slope(_logprobs(s, place, spread, two)) / 3.0 for s in (a, b)}
    off = slopes[b.name] / slopes[a.name] - 1
    # Two BF16 logprobs hide a slope behind their rounding.
    is_coarse = is_bf16(other) and not is_bf16(one)
    if abs(off) > (4 * limits.setting if is_coarse else limits.setting):
        return _found(
            "sampling",
            f"the other side's logprobs belong to temperature {1 / slopes[b.name]:.4g}, here "
            f"{1 / slopes[a.name]:.4g}",
            0.95,
            temperature=1 / slopes[b.name],
        )
    return _judge_mass(a, b, place, logits, limits) or _judge_rounding(a, b, place, logits, targets)


def _logprobs(side: Side, place: Place, logits: Tensor, targets: Tensor) -> Tensor:
    found = run_operator(side, place, {"logits": logits, "targets": targets})
    return found["logprobs"].double()


def _slope(logprobs_4: Tensor) -> float:
    return float(logprobs_4[1] - logprobs_4[0])


def _shift(
    a: Side, place: Place, logits: Tensor, targets: Tensor, one: Tensor, other: Tensor
) -> Judgement | None:
    own = float((one - other).abs()[:-2].mean())
    for by in (-1, 1):
        moved = _logprobs(a, place, logits, targets.roll(-by))
        gap = float((moved - other).abs()[2:-2].mean())
        if gap < 0.05 * own:
            return _found(
                "tokens", f"the other side scores the targets shifted by {by:+d}", 0.95, shift=by
            )
    return None


def _rows_of_all(side: Side, place: Place, logits_V: Tensor) -> Tensor:
    """[V] logprobs of every id after one row of logits."""
    width = len(logits_V)
    return _logprobs(side, place, logits_V.expand(width, -1).contiguous(), torch.arange(width))


def _judge_mass(
    a: Side, b: Side, place: Place, logits: Tensor, limits: Thresholds
) -> Judgement | None:
    """Whether the probabilities of the real vocabulary sum to 1, and on which ids."""
    row = logits[len(logits) // 2, : a.shape.vocab_size]
    width = min(len(row), 4096)
    row = row.sort(descending=True).values[:width]  # The rest adds nothing to what is asked.
    flat = torch.linspace(0, -1.0, min(width, 256))
    padded = torch.cat((flat, torch.full((len(row) - len(flat),), -60.0)))
    for probe in (row, padded):
        here, there = _rows_of_all(a, place, probe), _rows_of_all(b, place, probe)
        lost = ~torch.isfinite(there) | (there < -1e4)
        gone = lost & torch.isfinite(here) & (here > -1e4)
        if gone.any() or float((there - here)[~lost].min()) > 4e-3:
            lift = float((there - here)[~lost].median())
            return _found(
                "sampling",
                f"the other side's logprobs are {lift:+.4g} nats above, renormalised over a kept "
                f"set ({int(gone.sum())} ids of this row have none)",
                0.9,
                lift=lift,
            )
    low = torch.full_like(padded, -8.0)
    low[0] = -7.0
    mass = {s.name: float(_rows_of_all(s, place, low).exp().sum()) for s in (a, b)}
    if abs(mass[b.name] - mass[a.name]) > 0.02 and mass[b.name] < 1:
        return _found(
            "vocabulary",
            f"with low scores the other side's probabilities sum to {mass[b.name]:.3g}: it also "
            "counts ids that do not exist",
            0.95,
        )
    return None


def _judge_rounding(
    a: Side, b: Side, place: Place, logits: Tensor, targets: Tensor
) -> Judgement | None:
    rounded = logits.bfloat16().float()
    moves = {}
    for side in (a, b):
        plain = _logprobs(side, place, logits, targets)
        moves[side.name] = float((_logprobs(side, place, rounded, targets) - plain).abs().mean())
    if moves[a.name] > 0 and moves[b.name] == 0:
        return _found("cast", "the other side rounds logits to BF16 before the softmax", 0.95)
    here, there = (_logprobs(s, place, logits, targets).float() for s in (a, b))
    if is_bf16(there) and not is_bf16(here):
        return _found("cast", "the other side's logprobs are stored as BF16", 0.95)
    return None
