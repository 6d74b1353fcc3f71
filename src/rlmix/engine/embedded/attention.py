"""Attention over the slots of the KV cache, for decoding rows and for chunks of prompts.

Invariant: a row looks at its own slot only, at positions up to its own. What a slot holds beyond
that is finite and gets weight 0 exactly, so it contributes nothing.
"""

# B decoding rows, T rows of the step, N tokens of a chunk, L cache positions looked at, D head dim

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.engine.embedded.kv import LENGTH_STEP, KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import ModelShape
from rlmix.numerics.fp8 import nearest_e4m3

_TINY = 2.0**-126
"""What is below underflowed, and dividing by it gives 0 instead of NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Consecutive prompt tokens of one request."""

    slot: int
    start: int
    """Position of the first token; everything before it is in the cache."""
    num_tokens: int
    needs_logits: bool
    """True when the chunk ends the prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Rows of a step that attend together, with what they see in each layer."""

    first: int
    last: int
    """Rows first:last of the step."""
    mask: Tensor
    """0 where a row may look and -inf elsewhere, [batch * kv heads, rows per head, L]."""
    keys: Sequence[Tensor]
    """Per layer [batch * kv heads, D, L], views of the cache."""
    values: Sequence[Tensor]
    """Per layer [batch * kv heads, L, D], views of the cache."""
    tile: int
    """Positions that the kernel handles at once."""
    last_of_tile: Tensor | None
    """int64 [L / LENGTH_STEP]: for each LENGTH_STEP positions the last ones of the kernel's tile
    that they are in; None when one tile holds all."""


class Attention:
    """Reads and writes one KV cache in one profile's formats."""

    def __init__(self, shape: ModelShape, profile: Profile, cache: KvCache) -> None:
        self._shape = shape
        self._cache = cache
        self._scale = shape.head_dim**-0.5
        self._probability_format = profile.probability_format
        self._kernels = profile.kernels
        self._tiles: dict[tuple[int, int], Tensor] = {}
        self._positions = torch.arange(cache.capacity)
        self._zero, self._masked = torch.tensor(0.0), torch.tensor(float("-inf"))
        self._flat = [layer.view(-1, shape.head_dim) for layer in cache.values]
        self._seen: tuple[int, int, Sequence[Tensor], Sequence[Tensor]] = (-1, -1, (), ())

    def write(self, layer: int, index: Tensor, keys_and_values: Tensor) -> None:
        """Store [T, 2 * kv heads, D] at the rows that `KvCache.write_index` gave."""
        new = keys_and_values.reshape(-1, self._shape.head_dim)
        self._flat[layer].index_copy_(0, index, new)

    def decode_span(self, positions_B: Tensor, *, longest: int) -> Span:
        """Decoding rows in slots 0..B-1, the last of them at position `longest` - 1."""
        batch = len(positions_B)
        length = self._padded(longest)
        heads, groups = self._shape.num_kv_heads, self._shape.num_query_groups
        may_look = self._may_look(positions_B, length)
        mask = (
            may_look[:, None, None]
            .expand(-1, heads, groups, -1)
            .reshape(batch * heads, groups, length)
        )
        if self._seen[:2] != (batch, length):
            caches = self._cache.values[:, :, :batch, :, :length].flatten(2, 3)
            self._seen = (batch, length, *self._per_layer(caches))
        _, _, keys, values = self._seen
        return Span(
            first=0,
            last=batch,
            mask=mask,
            keys=keys,
            values=values,
            tile=self._kernels.decode_tile,
            last_of_tile=self._last_of_tile(length, self._kernels.decode_tile),
        )

    def chunk_span(self, chunk: Chunk, *, first: int) -> Span:
        """A chunk whose tokens are the step's rows from `first` on."""
        end = chunk.start + chunk.num_tokens
        length = self._padded(end)
        may_look = self._may_look(self._positions[chunk.start : end], length)
        groups, heads = self._shape.num_query_groups, self._shape.num_kv_heads
        mask = may_look.repeat_interleave(groups, dim=0).expand(heads, -1, -1)
        keys, values = self._per_layer(self._cache.values[:, :, chunk.slot, :, :length])
        return Span(
            first=first,
            last=first + chunk.num_tokens,
            mask=mask,
            keys=keys,
            values=values,
            tile=self._kernels.prefill_tile,
            last_of_tile=self._last_of_tile(length, self._kernels.prefill_tile),
        )

    def attend(
        self, layer: int, queries_T: Tensor, spans: Sequence[Span], *, is_decode: bool
    ) -> Tensor:
        """float32 [T, heads * D] from queries [T, heads, D]; rows of no span give 0."""
        if is_decode and spans[0].last == len(queries_T):
            return self._attend_decoding(layer, queries_T, spans[0])
        attended_T = torch.zeros(len(queries_T), self._shape.num_heads * self._shape.head_dim)
        for number, span in enumerate(spans):
            rows = queries_T[span.first : span.last]
            if is_decode and number == 0:
                attended = self._attend_decoding(layer, rows, span)
            else:
                attended = self._attend_chunk(layer, rows, span)
            attended_T[span.first : span.last] = attended
        return attended_T

    def _attend_decoding(self, layer: int, queries_B: Tensor, span: Span) -> Tensor:
        queries = queries_B.reshape(len(span.mask), -1, self._shape.head_dim)
        return self._softmax_product(layer, queries, span).view(len(queries_B), -1)

    def _attend_chunk(self, layer: int, queries_N: Tensor, span: Span) -> Tensor:
        num_tokens = len(queries_N)
        groups, head_dim = self._shape.num_query_groups, self._shape.head_dim
        # [N, kv * groups, D] -> [kv, N * groups, D] and back.
        queries = queries_N.reshape(num_tokens, -1, groups, head_dim).transpose(0, 1)
        queries = queries.reshape(-1, num_tokens * groups, head_dim)
        attended = self._softmax_product(layer, queries, span)
        attended = attended.view(-1, num_tokens, groups, head_dim).transpose(0, 1)
        return attended.reshape(num_tokens, -1)

    def _softmax_product(self, layer: int, queries: Tensor, span: Span) -> Tensor:
        """softmax(mask + scale * queries keys) values, the probabilities in the kernel's format.

        Kernels walk over the cache tile by tile and cast exp(score - largest score so far), which
        is a probability over the largest probability so far; later they scale it back.
        """
        scores = torch.baddbmm(span.mask, queries, span.keys[layer], alpha=self._scale)
        values = span.values[layer]
        shares = torch.softmax(scores, -1)
        if self._probability_format == "fp32":
            return torch.bmm(shares, values)
        if span.last_of_tile is None:
            largest = shares.amax(-1, keepdim=True)
            tiles = shares
        else:
            tiles = shares.unflatten(-1, (-1, LENGTH_STEP))
            so_far = tiles.amax(-1).cummax(-1).values.clamp_(min=_TINY)
            largest = so_far.index_select(-1, span.last_of_tile).unsqueeze_(-1)
        relative = tiles.div_(largest)
        if self._probability_format == "fp8":
            cast = nearest_e4m3(relative)
        else:
            cast = relative.bfloat16().float()
        return self._products(cast.mul_(largest).view_as(scores), values, span.tile)

    @staticmethod
    def _products(shares: Tensor, values: Tensor, tile: int) -> Tensor:
        """`shares` times `values`, summed tile by tile: MKL cuts long sums of more than 2 rows by
        their length, and a chunk of a prompt would depend on where it ends."""
        if shares.shape[1] <= 2 or shares.shape[2] <= tile:
            return torch.bmm(shares, values)
        pairs = zip(shares.split(tile, dim=2), values.split(tile, dim=1), strict=True)
        first = next(pairs)
        summed = torch.bmm(*first)
        for shares_of_tile, values_of_tile in pairs:
            summed.baddbmm_(shares_of_tile, values_of_tile)
        return summed

    def _last_of_tile(self, length: int, tile: int) -> Tensor | None:
        if length <= tile:
            return None
        if (length, tile) not in self._tiles:
            steps = torch.arange(length // LENGTH_STEP)
            per_tile = tile // LENGTH_STEP
            ends = (steps // per_tile + 1) * per_tile - 1
            self._tiles[length, tile] = ends.clamp_(max=len(steps) - 1)
        return self._tiles[length, tile]

    def _may_look(self, positions: Tensor, length: int) -> Tensor:
        """0 up to each position and -inf beyond, [rows, length]."""
        is_ahead = self._positions[:length] > positions[:, None]
        return torch.where(is_ahead, self._masked, self._zero)

    def _padded(self, length: int) -> int:
        return -(-length // LENGTH_STEP) * LENGTH_STEP

    @staticmethod
    def _per_layer(caches: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Transposed keys, and values, of each layer; from [layers, 2, batch * heads, L, D]."""
        keys = [layer.transpose(1, 2) for layer in caches[:, 0].unbind()]
        return keys, caches[:, 1].unbind()
