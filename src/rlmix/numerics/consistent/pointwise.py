"""Operators that look at one row at a time: norm, rotation, gate.

Only IEEE operations and `exp`, which torch computes with one routine at every place of a tensor;
its `silu` does not (the last elements of a tensor go through another). Sums run over a row of fixed
width. So no row depends on another. Values are rounded once, at the end.
"""

# R rows, D width of a row, P positions, H half of a head

from typing import Any

import torch
from torch import Tensor

from rlmix.numerics.consistent.contract import held_in, rounded


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = _inverse_rms(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed = x * inverse
        grad = grads[0]
        grad_weight = (grad * normed).sum(tuple(range(grad.ndim - weight.ndim)))
        grad_normed = grad * weight
        along = (grad_normed * normed).sum(-1, keepdim=True).div_(x.shape[-1])
        return grad_normed.sub_(normed.mul_(along)).mul_(inverse), grad_weight, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    # torch's rsqrt on a CPU is a root and one division.
    return (x * x).sum(-1, keepdim=True).mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float, round_to: torch.dtype | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, rounded once, after the weight.

    Args:
        x: float32 or bfloat16 [..., D], contiguous along D.
        weight: [D], or [heads, D] for x of [..., heads, D].
        round_to: as in `linear`.
    """
    values, scale = x.float(), weight.float()
    if torch.is_grad_enabled() and (values.requires_grad or scale.requires_grad):
        normed = _RmsNorm.apply(values, scale, eps)
    else:
        normed = (values * _inverse_rms(values, eps)).mul_(scale)
    return held_in(rounded(normed, round_to), x.dtype)


def rope_table(num_positions: int, *, head_dim: int, theta: float) -> Tensor:
    """Cosines and sines of every position, float32 [2, P, H], computed in float64 and rounded.

    Built once and shared by everybody who rotates; always on the CPU, because another device's
    cosine has other bits.
    """
    exponents_H = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    positions_P = torch.arange(num_positions, dtype=torch.float64)
    angles_PH = positions_P[:, None] / theta**exponents_H
    return torch.stack((angles_PH.cos(), angles_PH.sin())).float()


def _turn(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    turned = torch.empty_like(x)
    torch.mul(first, cosines, out=turned[..., :half]).sub_(second * sines)
    torch.mul(second, cosines, out=turned[..., half:]).add_(first * sines)
    return turned


def row_turns(rotations_2RH: Tensor) -> tuple[Tensor, Tensor]:
    """What `rope_rows` multiplies a row with, and its swapped row with: float32 [R, 1, D] each.
    Made once a step, for all layers."""
    cosines, sines = rotations_2RH[:, :, None]
    return torch.cat((cosines, cosines), -1), torch.cat((-sines, sines), -1)


def rope_rows(x_RhD: Tensor, turns: tuple[Tensor, Tensor], out: Tensor) -> Tensor:
    """The bits of `rope` before rounding, without gradient and in fewer operations: a difference
    is the sum with the other sign."""
    swapped = x_RhD.roll(x_RhD.shape[-1] // 2, -1).mul_(turns[1])
    return torch.add(x_RhD * turns[0], swapped, out=out)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turn(x, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cosines, sines = ctx.saved_tensors
        return _turn(grads[0].contiguous(), cosines, -sines), None, None


def rope(x_RhD: Tensor, rotations_2RH: Tensor, *, round_to: torch.dtype | None = None) -> Tensor:
    """Rotates channel i with channel i + D/2, each of two products and one sum, none fused.

    Args:
        x_RhD: float32 or bfloat16 [rows, heads, D].
        rotations_2RH: float32, the table's columns of the rows' positions (`table[:, positions]`).
        round_to: as in `linear`.
    """
    cosines, sines = rotations_2RH[0][:, None], rotations_2RH[1][:, None]
    values = x_RhD.float()
    if torch.is_grad_enabled() and values.requires_grad:
        turned = _Rope.apply(values, cosines, sines)
    else:
        turned = _turn(values, cosines, sines)
    return rounded(turned, round_to).to(x_RhD.dtype)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        divisor = _divisor(gate)
        ctx.save_for_backward(gate_up, divisor)
        return (gate / divisor).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        gate_up, divisor = ctx.saved_tensors
        share = divisor.reciprocal()
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        silu = gate * share
        torch.mul(silu, grads[0], out=grad_up)
        # silu' = share * (1 + gate - silu)
        slope = torch.sub(gate, silu, out=silu).add_(1.0).mul_(share)
        torch.mul(slope, up, out=grad_gate).mul_(grads[0])
        return out


def _divisor(gate: Tensor) -> Tensor:
    """1 + exp(-gate), of which silu is the gate's share."""
    return gate.neg().exp_().add_(1.0)


def swiglu(gate_up: Tensor, *, round_to: torch.dtype | None = None) -> Tensor:
    """silu(gate) * up, rounded once, after the product.

    Args:
        gate_up: float32 or bfloat16 [..., 2 * I], gates before ups.
        round_to: as in `linear`.
    """
    values = gate_up.float()
    if torch.is_grad_enabled() and values.requires_grad:
        product = _SwiGlu.apply(values)
    else:
        gate, up = values.chunk(2, dim=-1)
        divisor = _divisor(gate)
        product = torch.div(gate, divisor, out=divisor).mul_(up)
    return held_in(rounded(product, round_to), gate_up.dtype)
