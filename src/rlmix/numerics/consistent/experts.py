"""Mixture of experts: who serves a token, what the experts say, in which order it is added.

Invariant: a token's experts, shares and result do not depend on the other tokens: ties go to the
lower id, every expert's product has at least `min_rows` rows, and a token's experts are added in
the order of their rank, never in the order of arrival.
"""

# T tokens, E experts, K experts of a token, H hidden, I inner size, S places (rows of all experts)

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.numerics.consistent.contract import held_in, min_rows, rounded
from rlmix.numerics.consistent.pointwise import swiglu

BATCHED_ROWS = 64
"""Rows of the fullest expert up to which all experts may be multiplied at once, the others filled
up."""

CALL_FLOPS = 4_000_000
"""What a core computes in the 50 us that calls for one expert alone cost; filling up is worth so
many operations for each expert that is spared them."""

SORTED_EXPERTS = 16
"""Up to so many a sort is faster; for 128 the packed top-k is more than ten times faster."""


def choose_experts(logits_TE: Tensor, *, top_k: int) -> Tensor:
    """Ids of the largest logits, best first, int64 [T, K]; of equal ones the lower id comes first.

    A stable descending sort, or its equal at the price of an unstable top-k: a logit and its id are
    packed into one integer, so no two are equal.
    """
    num_experts = logits_TE.shape[1]
    if num_experts <= SORTED_EXPERTS:
        order = (-logits_TE.detach().numpy()).argsort(axis=1, kind="stable")
        return torch.from_numpy(np.ascontiguousarray(order[:, :top_k]))
    # + 0.0 turns -0.0 into 0.0, which compare as equal but differ as integers.
    bits = (logits_TE.detach().float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    low_ids_first = torch.arange(num_experts - 1, -1, -1)
    keys_TE = ordered.to(torch.int64).mul_(num_experts).add_(low_ids_first)
    return keys_TE.topk(top_k, dim=-1).indices


def expert_shares(logits_TE: Tensor, ids_TK: Tensor, *, renormalise: bool) -> Tensor:
    """What each chosen expert counts for, float32 [T, K].

    Args:
        logits_TE: float32.
        ids_TK: int64, chosen here or recorded by an engine.
        renormalise: softmax over the chosen ones (Qwen3's `norm_topk_prob`); else over all.
    """
    chosen_TK = logits_TE.gather(1, ids_TK)
    if renormalise:
        weights_TK = (chosen_TK - chosen_TK.detach().amax(-1, keepdim=True)).exp()
        total, *others = weights_TK.unbind(1)
        for other in others:
            total = total + other
        return weights_TK / total[:, None]
    top = logits_TE.detach().amax(-1, keepdim=True)
    return (chosen_TK - top).exp() / (logits_TE - top).exp().sum(-1, keepdim=True)


class _Spread(torch.autograd.Function):
    """Rows of tokens to places; backwards a token's places are added in the order of rank."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_of_S: Tensor, place_of_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_of_TK)
        return x_TH.index_select(0, token_of_S)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (place_of_TK,) = ctx.saved_tensors
        grad = grads[0].index_select(0, place_of_TK[:, 0])
        for rank in range(1, place_of_TK.shape[1]):
            grad.add_(grads[0].index_select(0, place_of_TK[:, rank]))
        return grad, None, None


class _Collect(torch.autograd.Function):
    """Rows of places back to [T * K]; places that nobody owns get gradient 0."""

    @staticmethod
    def forward(ctx: Any, y_SH: Tensor, place_of_TK: Tensor) -> Tensor:
        ctx.save_for_backward(place_of_TK)
        ctx.shape = y_SH.shape
        return y_SH.index_select(0, place_of_TK.view(-1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (place_of_TK,) = ctx.saved_tensors
        grad = torch.zeros(ctx.shape)
        return grad.index_copy_(0, place_of_TK.view(-1), grads[0]), None


def expert_mlps(
    x_TH: Tensor,
    ids_TK: Tensor,
    gate_up_EIH: Tensor,
    down_EHI: Tensor,
    *,
    first_expert: int = 0,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """Each token's experts, float32 [T, K, H], not rounded, not weighted.

    Args:
        x_TH: float32 or bfloat16.
        ids_TK: int64.
        gate_up_EIH: [E, 2 * I, H], an expert's gates before its ups.
        down_EHI: [E, H, I].
        first_expert: id of the first of the given experts. Choices of experts that are not given
            (they live on another process) come back as 0, so a sum over processes is exact.
        round_to: of gate and up, and of their product; as in `linear`.
    """
    ids_P = ids_TK.reshape(-1).numpy() - first_expert  # P = T * K choices
    num_experts = gate_up_EIH.shape[0]
    are_ours = first_expert == 0 and int(ids_P.max(initial=0)) < num_experts
    is_ours = None if are_ours else (ids_P >= 0) & (ids_P < num_experts)
    counts_E = np.bincount(ids_P if is_ours is None else ids_P[is_ours], minlength=num_experts)
    counts, least = counts_E.tolist(), min_rows()
    shared_room = max(least, *counts)
    rooms = [max(count, least) if count else 0 for count in counts]
    num_filling = num_experts * shared_room - sum(rooms)
    flops = 2 * num_filling * (gate_up_EIH.stride(0) + down_EHI.stride(0))
    is_batched = shared_room <= BATCHED_ROWS and flops <= CALL_FLOPS * (
        num_experts - counts.count(0)
    )
    if is_batched:
        rooms = [shared_room] * num_experts
    token_of_S, place_of_TK = _places(ids_P, is_ours, counts_E, np.array(rooms), ids_TK.shape)
    inputs_SH = _spread(x_TH.float(), token_of_S, place_of_TK)
    if is_batched:
        batch = inputs_SH.view(num_experts, shared_room, -1)
        gate_up = rounded(torch.bmm(batch, gate_up_EIH.float().transpose(1, 2)), round_to)
        inner = swiglu(gate_up, round_to=round_to)
        outputs_SH = torch.bmm(inner, down_EHI.float().transpose(1, 2)).flatten(0, 1)
    else:
        outputs_SH = _one_by_one(inputs_SH, gate_up_EIH, down_EHI, rooms, round_to)
    if is_ours is not None and not is_ours.all():
        outputs_SH = torch.cat((outputs_SH, outputs_SH.new_zeros(1, outputs_SH.shape[1])))
    if torch.is_grad_enabled() and outputs_SH.requires_grad:
        outputs_PH = _Collect.apply(outputs_SH, place_of_TK)
    else:
        outputs_PH = outputs_SH.index_select(0, place_of_TK.view(-1))
    return outputs_PH.view(*ids_TK.shape, -1)


def _places(
    ids_P: np.ndarray,
    is_ours: np.ndarray | None,
    counts_E: np.ndarray,
    rooms_E: np.ndarray,
    shape: torch.Size,
) -> tuple[Tensor, Tensor]:
    """The token of each place (0 where none is), and the place of each choice: tokens in their
    order within an expert, experts one after another. Choices of nobody get the place after the
    last. `is_ours` is None when all are."""
    num_places = int(rooms_E.sum())
    keys_P = ids_P if is_ours is None else np.where(is_ours, ids_P, len(counts_E))
    order_P = keys_P.argsort(kind="stable")[: int(counts_E.sum())]
    shift_E = (rooms_E.cumsum() - rooms_E) - (counts_E.cumsum() - counts_E)
    places = np.arange(len(order_P)) + shift_E[ids_P[order_P]]
    token_of_S = np.zeros(num_places, dtype=np.int64)
    token_of_S[places] = order_P // shape[1]
    place_of_P = np.full(len(ids_P), num_places, dtype=np.int64)
    place_of_P[order_P] = places
    return torch.from_numpy(token_of_S), torch.from_numpy(place_of_P).view(shape)


def _spread(x_TH: Tensor, token_of_S: Tensor, place_of_TK: Tensor) -> Tensor:
    if torch.is_grad_enabled() and x_TH.requires_grad:
        return _Spread.apply(x_TH, token_of_S, place_of_TK)
    return x_TH.index_select(0, token_of_S)


def _one_by_one(
    inputs_SH: Tensor,
    gate_up_EIH: Tensor,
    down_EHI: Tensor,
    rooms: list[int],
    round_to: torch.dtype | None,
) -> Tensor:
    # Split and unbind, since the gradient of a slice is a whole tensor of zeros for each expert.
    gate_ups, downs = gate_up_EIH.float().unbind(), down_EHI.float().unbind()
    outputs = []
    for expert, rows in enumerate(inputs_SH.split(rooms)):
        if len(rows):
            gate_up = rounded(F.linear(rows, gate_ups[expert]), round_to)
            outputs.append(F.linear(swiglu(gate_up, round_to=round_to), downs[expert]))
    return torch.cat(outputs) if outputs else inputs_SH


def combine(
    outputs_TKH: Tensor,
    shares_TK: Tensor,
    *,
    residual: Tensor,
    round_to: torch.dtype | None = None,
) -> Tensor:
    """residual + ((share_0 * output_0 + share_1 * output_1) + ...), rounded once; products and sums
    are separate operations, since a fused one would depend on the place in the tensor.

    Args:
        outputs_TKH: float32, of all processes together.
        shares_TK: float32.
        residual: [T, H].
    """
    if torch.is_grad_enabled() and (outputs_TKH.requires_grad or shares_TK.requires_grad):
        total = _Combine.apply(outputs_TKH, shares_TK)
    else:
        total = _weighted_sum(outputs_TKH, shares_TK)
    return held_in(rounded(residual + total, round_to), residual.dtype)


def _weighted_sum(outputs_TKH: Tensor, shares_TK: Tensor) -> Tensor:
    first, *others = (outputs_TKH * shares_TK[:, :, None]).unbind(1)
    # In place would spare an allocation, and keep all ranks' products alive behind it.
    total = first + others[0] if others else first.clone()
    for other in others[1:]:
        total.add_(other)
    return total


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs_TKH: Tensor, shares_TK: Tensor) -> Tensor:
        ctx.save_for_backward(outputs_TKH, shares_TK)
        return _weighted_sum(outputs_TKH, shares_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        outputs_TKH, shares_TK = ctx.saved_tensors
        grad_T1H = grads[0][:, None]
        return grad_T1H * shares_TK[..., None], (outputs_TKH * grad_T1H).sum(-1)
