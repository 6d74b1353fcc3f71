"""A Qwen3 or Llama shaped decoder put together from the consistent operators.

`run_layers` is the whole arithmetic between token ids and final hidden states. A caller brings
rows (tokens of any sequences, in any order) and a way to attend; the trainer attends within its
padded batch, an engine writes to its cache and reads from it. Nothing else differs between them.
Numbers of the compute dtype are held in float32, which changes no bit and saves conversions.
"""

# M rows (tokens), H hidden, D head dim, N query heads, E experts, I inner size, B batch, T length

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlmix.numerics.consistent.attention import attend, plan_attention
from rlmix.numerics.consistent.contract import TREE_LEAVES, Tiling, rounded
from rlmix.numerics.consistent.experts import choose_experts, combine, expert_mlps, expert_shares
from rlmix.numerics.consistent.linear import linear, row_parallel_linear
from rlmix.numerics.consistent.pointwise import (
    rms_norm,
    rope,
    rope_rows,
    row_turns,
    swiglu,
)
from rlmix.numerics.consistent.tree import tree_all_reduce


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Sizes and choices of a model, for one process of `tp_size`."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    """Both of this process."""
    head_dim: int
    rms_eps: float
    top_k: int
    """Experts per token; 0 in a dense model."""
    norm_topk_prob: bool
    round_to: torch.dtype | None
    """bfloat16: activations, keys and values are BF16 numbers; None: float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTensors:
    """One layer. float32, with or without gradient; [outputs, inputs] as in a checkpoint."""

    input_norm: Tensor
    qkv: Tensor
    """[(N + 2 * key heads) * D, H]: queries, keys, values."""
    qk_norm: Tensor | None
    """[N + key heads, D]; None: the model has no such norm."""
    out: Tensor
    post_norm: Tensor
    router: Tensor | None
    """[E, H]; None in a dense layer."""
    gate_up: Tensor
    """[E, 2 * I, H], or [2 * I, H] in a dense layer."""
    down: Tensor
    """[E, H, I], or [H, I]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelTensors:
    embedding: Tensor
    layers: tuple[LayerTensors, ...]
    final_norm: Tensor
    head: Tensor
    """[V, H], the real vocabulary only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The processes that hold a layer together. Heads and dense inner channels are split over
    `tensor`, experts over `experts`; None: this process holds all."""

    tensor: Any | None
    experts: Any | None
    first_expert: int


ALONE = Ranks(tensor=None, experts=None, first_expert=0)

Attend = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, queries [M, N, D], new [M, 2 * key heads, D]) -> [M, N, D], rounded as the spec says.
`new` holds the rows' keys, then their values; where they go is the caller's business."""

Route = Callable[[int, Tensor], tuple[Tensor, Tensor]]
"""(layer, router logits [M, E]) -> (ids int64 [M, K], shares float32 [M, K]): who serves the rows,
and what each counts for. An engine may write them down, a trainer take recorded ones."""


def tensors_of(state: Mapping[str, Tensor], spec: ModelSpec) -> ModelTensors:
    """Tensors under their Hugging Face names, in float32; gradients flow back to `state`.

    Experts may be one by one (`experts.0.gate_proj.weight`) or fused (`experts.gate_up_proj`).
    """
    embedding = state["model.embed_tokens.weight"].float()
    head = state.get("lm_head.weight")
    return ModelTensors(
        embedding=embedding,
        layers=tuple(_layer(state, f"model.layers.{i}.", spec) for i in range(spec.num_layers)),
        final_norm=state["model.norm.weight"].float(),
        head=embedding if head is None else head.float(),
    )


def _layer(state: Mapping[str, Tensor], prefix: str, spec: ModelSpec) -> LayerTensors:
    def get(name: str) -> Tensor:
        return state[f"{prefix}{name}"].float()

    qk_norm = None
    if f"{prefix}self_attn.q_norm.weight" in state:
        q_norm, k_norm = get("self_attn.q_norm.weight"), get("self_attn.k_norm.weight")
        per_head = (q_norm.expand(spec.num_heads, -1), k_norm.expand(spec.num_kv_heads, -1))
        qk_norm = torch.cat(per_head)
    router = get("mlp.gate.weight") if f"{prefix}mlp.gate.weight" in state else None
    if router is None:
        gate_up = torch.cat((get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")))
        down = get("mlp.down_proj.weight")
    elif f"{prefix}mlp.experts.gate_up_proj" in state:
        gate_up, down = get("mlp.experts.gate_up_proj"), get("mlp.experts.down_proj")
    else:
        stems = [f"mlp.experts.{expert}." for expert in range(len(router))]
        pairs = [(get(f"{s}gate_proj.weight"), get(f"{s}up_proj.weight")) for s in stems]
        gate_up = torch.stack([torch.cat(pair) for pair in pairs])
        down = torch.stack([get(f"{s}down_proj.weight") for s in stems])
    projections = [get(f"self_attn.{name}_proj.weight") for name in "qkv"]
    return LayerTensors(
        input_norm=get("input_layernorm.weight"),
        qkv=torch.cat(projections),
        qk_norm=qk_norm,
        out=get("self_attn.o_proj.weight"),
        post_norm=get("post_attention_layernorm.weight"),
        router=router,
        gate_up=gate_up,
        down=down,
    )


def run_layers(
    tensors: ModelTensors,
    spec: ModelSpec,
    ids_M: Tensor,
    rotations_2MD: Tensor,
    attend_rows: Attend,
    *,
    ranks: Ranks = ALONE,
    route: Route | None = None,
) -> Tensor:
    """Final, normed hidden states, float32 [M, H] of numbers of the compute dtype.

    Args:
        ids_M: int64.
        rotations_2MD: float32 [2, M, D / 2], columns of `rope_table` at the rows' positions.
        attend_rows: see `Attend`.
        route: called in every layer with experts; None: `own_route`.
    """
    hidden_MH = tensors.embedding.index_select(0, ids_M)
    num_rows = ids_M.shape[0]
    turns = None if torch.is_grad_enabled() else row_turns(rotations_2MD)
    for index, layer in enumerate(tensors.layers):
        normed = rms_norm(hidden_MH, layer.input_norm, eps=spec.rms_eps, round_to=spec.round_to)
        heads = linear(normed, layer.qkv).view(num_rows, -1, spec.head_dim)
        if turns is None:
            heads = _rotated(heads, layer, spec, rotations_2MD)
        else:
            heads = _rotated_in_place(heads, layer, spec, turns)
        queries, new = heads.split((spec.num_heads, 2 * spec.num_kv_heads), dim=1)
        attended = attend_rows(index, queries, new).reshape(num_rows, -1)
        hidden_MH = row_parallel_linear(
            attended,
            layer.out,
            leaves=TREE_LEAVES,
            group=ranks.tensor,
            residual=hidden_MH,
            round_to=spec.round_to,
        )
        normed = rms_norm(hidden_MH, layer.post_norm, eps=spec.rms_eps, round_to=spec.round_to)
        if layer.router is None:
            hidden_MH = _dense_mlp(layer, spec, hidden_MH, normed, ranks)
        else:
            logits_ME = linear(normed, layer.router)
            chosen = own_route(logits_ME, spec) if route is None else route(index, logits_ME)
            hidden_MH = _expert_layer(layer, spec, hidden_MH, normed, ranks, chosen)
    return rms_norm(hidden_MH, tensors.final_norm, eps=spec.rms_eps, round_to=spec.round_to)


def _rotated(heads: Tensor, layer: LayerTensors, spec: ModelSpec, rotations_2MD: Tensor) -> Tensor:
    """Queries, keys and values, [M, N + 2 * key heads, D], as attention takes them."""
    num_rotated = spec.num_heads + spec.num_kv_heads
    # Not slices: their gradients would be whole tensors of zeros, filled and added.
    rotated, values = heads.split((num_rotated, spec.num_kv_heads), dim=1)
    if layer.qk_norm is not None:
        rotated = rms_norm(rotated, layer.qk_norm, eps=spec.rms_eps)
    return rounded(torch.cat((rope(rotated, rotations_2MD), values), dim=1), spec.round_to)


def _rotated_in_place(
    heads: Tensor, layer: LayerTensors, spec: ModelSpec, turns: tuple[Tensor, Tensor]
) -> Tensor:
    """The same without gradient."""
    rotated = heads[:, : spec.num_heads + spec.num_kv_heads]
    normed = rotated
    if layer.qk_norm is not None:
        normed = rms_norm(rotated, layer.qk_norm, eps=spec.rms_eps)
    rope_rows(normed, turns, out=rotated)
    return rounded(heads, spec.round_to)


def _dense_mlp(
    layer: LayerTensors, spec: ModelSpec, hidden_MH: Tensor, normed: Tensor, ranks: Ranks
) -> Tensor:
    inner = swiglu(linear(normed, layer.gate_up, round_to=spec.round_to), round_to=spec.round_to)
    return row_parallel_linear(
        inner,
        layer.down,
        leaves=TREE_LEAVES,
        group=ranks.tensor,
        residual=hidden_MH,
        round_to=spec.round_to,
    )


def own_route(logits_ME: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Ids and shares of the experts that the model chooses, see `Route`."""
    ids_MK = choose_experts(logits_ME, top_k=spec.top_k)
    return ids_MK, expert_shares(logits_ME, ids_MK, renormalise=spec.norm_topk_prob)


def _expert_layer(
    layer: LayerTensors,
    spec: ModelSpec,
    hidden_MH: Tensor,
    normed: Tensor,
    ranks: Ranks,
    chosen: tuple[Tensor, Tensor],
) -> Tensor:
    ids_MK, shares_MK = chosen
    outputs_MKH = expert_mlps(
        normed,
        ids_MK,
        layer.gate_up,
        layer.down,
        first_expert=ranks.first_expert,
        round_to=spec.round_to,
    )
    outputs_MKH = tree_all_reduce(outputs_MKH, ranks.experts)
    return combine(outputs_MKH, shares_MK, residual=hidden_MH, round_to=spec.round_to)


def train_hidden(
    tensors: ModelTensors,
    spec: ModelSpec,
    ids_BT: Tensor,
    table: Tensor,
    *,
    tiling: Tiling,
    route: Route | None = None,
) -> Tensor:
    """Whole sequences at once, float32 [B, T, H], with gradient; rows are padded on the right.

    Args:
        ids_BT: int64.
        table: `rope_table` of at least T positions.
        route: as in `run_layers`; its rows are those of `ids_BT`, one sequence after the other.
    """
    batch, length = ids_BT.shape
    groups = spec.num_heads // spec.num_kv_heads
    plan = plan_attention(torch.arange(length)[None], groups=groups, tiling=tiling)

    def attend_rows(_layer: int, queries: Tensor, new: Tensor) -> Tensor:
        by_row = new.view(batch, length, *new.shape[1:]).transpose(1, 2)
        keys, values = by_row.chunk(2, dim=1)
        rows = queries.view(batch, length, *queries.shape[1:])
        return attend(rows, keys, values, plan, round_to=spec.round_to).flatten(0, 1)

    rotations = table[:, :length].repeat(1, batch, 1)
    hidden = run_layers(tensors, spec, ids_BT.reshape(-1), rotations, attend_rows, route=route)
    return hidden.view(batch, length, -1)
