"""What an engine does otherwise than a trainer, for the same bits: weights stored for decoding, and
attention of one step over a cache of slots, decoding rows together, then each chunk.

A plan is made once a step and serves every layer. Invariant: rows write before anybody reads, and
a row reads its own slot only.
"""

# T rows of the step, B decoding rows (the first ones, in slots 0..B-1), D head dim

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlmix.numerics.consistent.attention import (
    AttentionPlan,
    attend,
    attend_tile,
    is_one_block,
    plan_attention,
)
from rlmix.numerics.consistent.contract import TREE_LEAVES, Tiling, rounded
from rlmix.numerics.consistent.head import VOCAB_TILE
from rlmix.numerics.consistent.model import LayerTensors, ModelTensors
from rlmix.numerics.consistent.storage import by_inputs


def for_decoding(tensors: ModelTensors, *, leaves: int = TREE_LEAVES) -> ModelTensors:
    """The same model with its matrices stored input by input, where that changes no bit.

    Args:
        leaves: of this process's part of a row-parallel product.
    """
    head = tensors.head
    return replace(
        tensors,
        layers=tuple(_for_decoding(layer, leaves) for layer in tensors.layers),
        head=by_inputs(head) if len(head) <= VOCAB_TILE else head,
    )


def _for_decoding(layer: LayerTensors, leaves: int) -> LayerTensors:
    return replace(
        layer,
        qkv=by_inputs(layer.qkv),
        out=by_inputs(layer.out, leaves=leaves),
        gate_up=by_inputs(layer.gate_up),
        down=by_inputs(layer.down, leaves=leaves if layer.router is None else 1),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptChunk:
    """Consecutive tokens of one slot."""

    slot: int
    start: int
    """Position of the first; everything before it is in the cache."""
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Rows first:last of the step, which attend together, to slots first_slot:last_slot."""

    first: int
    last: int
    first_slot: int
    last_slot: int
    plan: AttentionPlan


def plan_step(
    positions_T: Tensor,
    *,
    num_decoding: int,
    chunks: Sequence[PromptChunk],
    groups: int,
    tiling: Tiling,
) -> tuple[Group, ...]:
    """Groups of a step whose rows are `num_decoding` decoding ones, then the chunks' tokens.

    Args:
        positions_T: int64; rows beyond the chunks are padding, belong to no group and get 0.
        groups: query heads per key head.
    """
    found = []
    if num_decoding:
        positions_B1 = positions_T[:num_decoding, None]
        plan = plan_attention(positions_B1, groups=groups, tiling=tiling)
        found.append(
            Group(first=0, last=num_decoding, first_slot=0, last_slot=num_decoding, plan=plan)
        )
    first = num_decoding
    for chunk in chunks:
        last = first + chunk.num_tokens
        positions = torch.arange(chunk.start, chunk.start + chunk.num_tokens)[None]
        plan = plan_attention(positions, groups=groups, tiling=tiling)
        slots = (chunk.slot, chunk.slot + 1)
        found.append(
            Group(first=first, last=last, first_slot=slots[0], last_slot=slots[1], plan=plan)
        )
        first = last
    return tuple(found)


class CacheAttention:
    """`Attend` for `run_layers`: writes the rows' keys and values into the cache and reads it."""

    def __init__(
        self,
        cache: Tensor,
        step: Sequence[Group],
        write_index: Tensor,
        *,
        round_to: torch.dtype | None,
    ) -> None:
        """
        Args:
            cache: float32 [layers, 2, slots, key heads, positions, D], contiguous and finite;
                positions at least `tiling.padded(longest context)`, or reading copies.
            step: from `plan_step`.
            write_index: int64 [T * 2 * key heads], where each row's keys, then its values, go in a
                layer seen as [2 * slots * key heads * positions, D].
        """
        self._cache, self._step, self._write_index = cache, step, write_index
        self._round_to = round_to
        self._decoding = {
            group.first: _Decoding(group, cache)
            for group in step
            if group.plan.num_queries == 1 and _Decoding.fits(group, cache)
        }

    def __call__(self, layer: int, queries: Tensor, new: Tensor) -> Tensor:
        cache, dim = self._cache[layer], new.shape[-1]
        cache.view(-1, dim).index_copy_(0, self._write_index, new.reshape(-1, dim))
        if len(self._step) == 1 and self._step[0].last == queries.shape[0]:
            return self._attend(layer, queries, self._step[0])
        out = torch.zeros(queries.shape)
        for group in self._step:
            out[group.first : group.last] = self._attend(
                layer, queries[group.first : group.last], group
            )
        return out

    def _attend(self, layer: int, queries: Tensor, group: Group) -> Tensor:
        if group.first in self._decoding:
            found = self._decoding[group.first](layer, queries)
            return rounded(found, self._round_to).reshape(queries.shape)
        keys, values = self._cache[layer][:, group.first_slot : group.last_slot]
        batch = group.last_slot - group.first_slot
        rows = queries.reshape(batch, -1, *queries.shape[1:])
        return attend(rows, keys, values, group.plan, round_to=self._round_to).flatten(0, 1)


class _Decoding:
    """One token of each of several sequences: the arithmetic of `attend` in fewer operations, since
    what does not depend on the layer is done once a step."""

    def __init__(self, group: Group, cache: Tensor) -> None:
        _, _, _, heads, _, dim = cache.shape
        plan, batch = group.plan, group.last_slot - group.first_slot
        self._plan, self._batch = plan, slice(0, batch)
        seen = cache[:, :, group.first_slot : group.last_slot].flatten(2, 3)
        self._layers = seen[:, :, :, : plan.num_keys].unbind()
        self._scale = dim**-0.5
        padded = torch.zeros(batch, heads, plan.num_padded, plan.groups, dim)
        self._rows = padded.view(batch * heads, -1, dim)
        self._own = padded[:, :, 0]
        self._shape = padded.shape

    @staticmethod
    def fits(group: Group, cache: Tensor) -> bool:
        batch = group.last_slot - group.first_slot
        return cache.shape[4] >= group.plan.num_keys and is_one_block(
            group.plan, num_heads=batch * cache.shape[3]
        )

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        """float32 [B, key heads, G, D], not rounded."""
        torch.mul(queries.view(self._own.shape), self._scale, out=self._own)
        keys, values = self._layers[layer].unbind()
        tile = self._plan.tiles[0]
        result, _ = attend_tile(self._rows, keys, values, tile, self._plan, self._batch)
        return result.view(self._shape).select(2, 0)
