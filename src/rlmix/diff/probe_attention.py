"""Probes of attention, rotation and cache: who sees whom, at which scale, where, in which format.

Queries of zero weigh every visible key alike, so values that are one-hot by position show the mask
itself. A key with a known score shows the scale. One-hot heads show the angles of the rotation.
"""

# T rows, N query heads, G key heads, D head dim

import math

import torch
from torch import Tensor

from rlmix.diff.findings import Judgement, Thresholds
from rlmix.diff.program import Place, Registers, Shape, Side, run_operator
from rlmix.numerics.fp8 import fake_quantize_kv


def _found(cause: str, evidence: str, confidence: float, **facts: float | str) -> Judgement:
    return Judgement(cause=cause, evidence=evidence, confidence=confidence, facts=facts)


def judge_attention(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """Mask and scale; None when both are the same."""
    visible = {s.name: visible_keys(s, place, inputs) for s in (a, b)}
    differs = visible[a.name] != visible[b.name]
    if differs.any():
        row = int(differs.any(1).nonzero()[0])
        more = int((visible[b.name][row] & ~visible[a.name][row]).sum())
        less = int((visible[a.name][row] & ~visible[b.name][row]).sum())
        return _found(
            "mask",
            f"from position {row} on the other side sees other keys ({more} more, {less} fewer "
            "there)",
            0.95,
            first_position=float(row),
        )
    scales = {s.name: score_scale(s, place, inputs) for s in (a, b)}
    off = scales[b.name] / scales[a.name] - 1
    if abs(off) > limits.setting:
        return _found(
            "hyper-parameter",
            f"scores are multiplied by {scales[b.name]:.5g}, here by {scales[a.name]:.5g}",
            0.95,
            attention_scale=scales[b.name],
        )
    return None


def _heads(shape: Shape, rows: int) -> Tensor:
    return torch.zeros(rows, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)


def visible_keys(side: Side, place: Place, inputs: Registers) -> Tensor:
    """bool [T, T]: which positions each row of the text looks at."""
    shape, rows = side.shape, len(inputs["heads"])
    seen = torch.zeros(rows, rows, dtype=torch.bool)
    for first in range(0, rows, shape.head_dim):
        count = min(shape.head_dim, rows - first)
        heads = _heads(shape, rows)
        values = heads[:, -shape.num_kv_heads :]
        values[first : first + count, :, :count] = torch.eye(count)[:, None]
        out = run_operator(side, place, {**inputs, "heads": heads})["attended"]
        weights = out.view(rows, shape.num_heads, -1)[:, 0, :count]
        seen[:, first : first + count] = weights > 0.25 / rows
    return seen


def score_scale(side: Side, place: Place, inputs: Registers) -> float:
    """What products of query and key are multiplied by."""
    shape, rows = side.shape, len(inputs["heads"])
    heads = _heads(shape, rows)
    factor = 4.0 * shape.head_dim**0.25  # Scores of 16 / sqrt(D) * sqrt(D) / 8, see below.
    size = factor / math.sqrt(8.0)
    heads[:, : shape.num_heads, 0] = size
    heads[0, shape.num_heads : shape.num_heads + shape.num_kv_heads, 0] = size
    heads[0, -shape.num_kv_heads :, 0] = 1.0
    out = run_operator(side, place, {**inputs, "heads": heads})["attended"].double()
    share_T = out.view(rows, shape.num_heads, -1)[1:, 0, 0]
    others_T = torch.arange(1, rows, dtype=torch.float64)
    scores_T = (share_T * others_T / (1 - share_T)).log()
    is_clear_T = (share_T > 0.05) & (share_T < 0.95)
    if not is_clear_T.any():
        return math.nan
    product = float(torch.tensor(size).double() ** 2)
    return float(scores_T[is_clear_T].median()) / product


def judge_rope(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """Pairs, angles and positions of the rotation."""
    turned = {s.name: _angles(s, place, inputs) for s in (a, b)}
    (angle_a, partner_a), (angle_b, partner_b) = turned[a.name], turned[b.name]
    if partner_a != partner_b:
        return _found(
            "hyper-parameter",
            f"channel 0 is turned with channel {partner_b}, here with {partner_a} (interleaved "
            "against half)",
            0.95,
        )
    # Channel 0 turns by its position in radians, whatever theta is.
    off_T = _wrapped(angle_b[:, 0] - angle_a[:, 0])
    if float(off_T.abs().max()) > 0.2:
        row = int((off_T.abs() > 0.2).nonzero()[0])
        return _found(
            "positions",
            f"from position {row} on the other side turns by the angle of another position "
            f"({float(off_T[row]):+.3g} rad in the fastest channel)",
            0.95,
            first_position=float(row),
        )
    thetas = {name: _theta(angles, inputs["positions"]) for name, (angles, _) in turned.items()}
    off = thetas[b.name] / thetas[a.name] - 1
    if abs(off) > limits.setting:
        return _found(
            "hyper-parameter",
            f"angles fit theta {thetas[b.name]:.6g}, here {thetas[a.name]:.6g}",
            0.95,
            rope_theta=thetas[b.name],
        )
    return None


def _wrapped(angles: Tensor) -> Tensor:
    return torch.remainder(angles + math.pi, 2 * math.pi) - math.pi


def _angles(side: Side, place: Place, inputs: Registers) -> tuple[Tensor, int]:
    """([T, D/2] angle of each half-rotation pair, channel that channel 0 is turned with)."""
    shape, rows = side.shape, len(inputs["heads"])
    half = shape.head_dim // 2
    heads = _heads(shape, rows)
    heads[:, 0, :half] = 1.0
    both = run_operator(side, place, {**inputs, "heads": heads})["heads"][:, 0].double()
    heads = _heads(shape, rows)
    heads[:, 0, 0] = 1.0
    one = run_operator(side, place, {**inputs, "heads": heads})["heads"][:, 0].double()
    others = one.abs().sum(0)
    others[0] = 0
    return torch.atan2(both[:, half:], both[:, :half]), int(others.argmax())


def _theta(angles_TH: Tensor, positions_T: Tensor) -> float:
    """Fits one theta to the angles of the slower channels, which do not wrap."""
    count = angles_TH.shape[1]
    exponents = torch.arange(count, dtype=torch.float64) / count
    longest = float(positions_T.max())
    found = []
    for channel in range(1, count):
        angle_T, position_T = angles_TH[:, channel], positions_T.double()
        speed = float(angle_T[position_T == 1].mean()) if bool((position_T == 1).any()) else 0.0
        if speed <= 0:
            continue
        guess = speed * position_T
        whole_T = guess + _wrapped(angle_T - torch.remainder(guess, 2 * math.pi))
        reach = position_T <= min(longest, 0.5 / max(abs(speed) * 2.0**-8, 1e-12))
        fit = float((whole_T * position_T)[reach].sum() / position_T[reach].square().sum())
        if fit > 0:
            found.append(-math.log(fit) / float(exponents[channel]))
    return math.exp(float(torch.tensor(found).median())) if found else math.nan


def judge_kv(
    a: Side, b: Side, place: Place, inputs: Registers, limits: Thresholds
) -> Judgement | None:
    """What a cache makes of keys and values."""
    heads = inputs["heads"].float()
    shape = a.shape
    out = run_operator(b, place, inputs)["heads"].float()
    here = run_operator(a, place, inputs)["heads"].float()
    rows_T = (out != here).flatten(1).any(1)
    kept = slice(shape.num_heads, None)
    if bool((out[:, kept] == fake_quantize_kv(heads[:, kept].clone())).all()):
        which = (
            ""
            if bool((out[:, : shape.num_heads] == heads[:, : shape.num_heads]).all())
            else (", and queries")
        )
        return _found(
            "quantisation", f"cached keys and values{which} are E4M3 numbers of these", 0.95,
            kv="fp8",
        )  # fmt: skip
    gap = out[:, kept] - here[:, kept]
    slope = float((gap * here[:, kept]).sum() / here[:, kept].square().sum())
    share = 1 - float((gap - slope * here[:, kept]).square().sum() / gap.square().sum())
    if share > limits.slope_fit and abs(slope) > limits.slope:
        return _found("cache", f"cached numbers are {1 + slope:.4g} times those written", 0.95)
    num_rows = int(rows_T.sum())
    if num_rows < len(rows_T):
        first, last = int(rows_T.nonzero()[0]), int(rows_T.nonzero()[-1])
        return _found(
            "cache",
            f"only positions {first} to {last} hold other keys and values than were written",
            0.9,
        )
    largest = (gap.abs() / here[:, kept].abs().clamp(min=1e-3)).max()
    if float(largest) <= 2.0**-7:
        return _found("cast", "cached numbers were rounded to BF16", 0.8)
    scale = heads[:, kept].abs().amax(-1, keepdim=True).clamp(min=1e-30)
    for levels in (7, 127):
        codes = out[:, kept] / scale * levels
        if bool(((codes - codes.round()).abs() < 0.01).all()):
            return _found("quantisation", f"cached numbers lie on {levels} levels", 0.9)
    on_grid = fake_quantize_kv(out[:, kept].clone())
    if bool((on_grid == out[:, kept]).all()):
        return _found("quantisation", "cached numbers are E4M3 numbers, not nearest ones", 0.8)
    size = float(gap.square().mean().sqrt() / here[:, kept].square().mean().sqrt())
    if size < 0.08:
        return _found("quantisation", f"cached numbers are off by {size:.2g}, all of them", 0.5)
    return _found("cache", f"cached numbers are others than written, off by {size:.2g}", 0.8)
