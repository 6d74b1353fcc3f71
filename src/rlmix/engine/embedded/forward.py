"""One forward step over a mixed batch: decoding requests and chunks of prompts together.

All rows share the linear layers; attention runs once for the decoding rows and once per prompt
chunk. Invariant: the logits of a request do not depend on the other rows beyond float rounding,
and with MKL not at all: rows are padded to MIN_ROWS and lengths to LENGTH_STEP, above which its
results for a row do not depend on the shape of the rest.
"""

# T rows of the step, B decoding rows (the first ones), H hidden, D head dim, E experts, I inner

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlmix.engine.embedded.kv import LENGTH_STEP, KvCache, round_kv
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import ModelShape
from rlmix.engine.embedded.weights import LayerWeights, ModelWeights
from rlmix.numerics.fp8 import fake_quantize_kv

MIN_ROWS = 4
"""MKL takes another kernel, with another order of additions, for fewer rows."""

DENSE_EXPERT_RATIO = 8
"""Up to this many experts per chosen one, computing all of them as one matrix product beats
gathering the chosen ones: measured at batch 1 to 64 on small models."""

MASKED = float("-inf")


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
class Step:
    """Rows of one forward: B decoding requests in slots 0..B-1, then the chunks' tokens."""

    token_ids_T: Tensor
    """int64 [T], padding not included."""
    positions_T: Tensor
    """int64 [T]."""
    num_decoding: int
    longest_decoding: int
    """Largest position among the decoding rows, plus 1."""
    chunks: tuple[Chunk, ...]


class Forward:
    """The model's arithmetic for one profile and one KV cache."""

    def __init__(self, shape: ModelShape, profile: Profile, cache: KvCache) -> None:
        self._shape = shape
        self._profile = profile
        self._cache = cache
        self._rounds = profile.activations == "bf16"
        self._scale = shape.head_dim**-0.5
        self._probability_dtype = profile.probability_dtype
        self._is_dense_moe = shape.num_experts <= DENSE_EXPERT_RATIO * shape.top_k
        positions = torch.arange(cache.capacity, dtype=torch.float64)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        angles = positions[:, None] * (1.0 / shape.rope_theta**exponents)
        self._rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        self._positions = torch.arange(cache.capacity)
        self._norm_floors = {
            size: torch.tensor((size * shape.rms_eps) ** 0.5)
            for size in (shape.hidden, shape.head_dim)
        }

    @torch.inference_mode()
    def logits(self, weights: ModelWeights, step: Step) -> Tensor:
        """Next-token logits, float32 [B + chunks that need logits, V], in this order."""
        rows = _Rows(step, self._cache, self._shape)
        hidden_TH = weights.embedding.index_select(0, rows.token_ids_T)
        rotations_T = self._rotations.index_select(0, rows.positions_T)[:, None]
        mask = self._decode_mask(step)
        for index, layer in enumerate(weights.layers):
            keys, values = self._cache.values[index]
            heads_T = self._attention_inputs(layer, hidden_TH, rotations_T)
            attended_T = self._attend(heads_T, keys, values, rows, step, mask)
            hidden_TH = self._round(torch.addmm(hidden_TH, self._round(attended_T), layer.out))
            hidden_TH = self._mlp(layer, hidden_TH)
        wanted_H = hidden_TH if rows.logit_rows is None else hidden_TH[rows.logit_rows]
        final = self._round(self._norm(wanted_H, weights.final_norm))
        return functional.linear(final, weights.head)[: rows.num_logits]

    def _round(self, values: Tensor) -> Tensor:
        return values.bfloat16().float() if self._rounds else values

    def _norm(self, values: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last axis; `weight` was multiplied by sqrt(size) when it was loaded.

        x / sqrt(mean(x^2) + eps) = sqrt(n) * x / hypot(|x|, sqrt(n * eps)), in half the time of
        torch's rms_norm on small batches.
        """
        floor = self._norm_floors[values.shape[-1]]
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        return (values / torch.hypot(length, floor)).mul_(weight)

    def _attention_inputs(
        self, layer: LayerWeights, hidden_TH: Tensor, rotations_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, heads, D], and keys and values [T, kv heads, D] as the cache holds them."""
        shape = self._shape
        normed = self._round(self._norm(hidden_TH, layer.input_norm))
        heads = self._round(functional.linear(normed, layer.qkv)).view(
            len(hidden_TH), -1, shape.head_dim
        )
        num_rotated = shape.num_heads + shape.num_kv_heads
        pairs = self._norm(heads[:, :num_rotated], layer.qk_norm).view(
            len(heads), num_rotated, -1, 2
        )
        turned = torch.view_as_real(torch.view_as_complex(pairs) * rotations_T)
        rotated = self._round(turned.view(len(heads), num_rotated, shape.head_dim))
        queries = rotated[:, : shape.num_heads]
        if self._profile.rounds_query_to_fp8:
            queries = fake_quantize_kv(queries)
        keys = round_kv(rotated[:, shape.num_heads :], self._profile.kv)
        return queries, keys, round_kv(heads[:, num_rotated:], self._profile.kv)

    def _attend(
        self,
        heads_T: tuple[Tensor, Tensor, Tensor],
        key_cache: Tensor,
        value_cache: Tensor,
        rows: "_Rows",
        step: Step,
        mask: Tensor | None,
    ) -> Tensor:
        """Write keys and values, then attend; float32 [T, heads * D]."""
        queries, keys, values = heads_T
        head_dim = self._shape.head_dim
        for cache, new in ((key_cache, keys), (value_cache, values)):
            flat = cache.view(-1, head_dim)
            flat.index_copy_(0, rows.write_index, new.reshape(-1, head_dim))
        num_decoding = step.num_decoding
        if mask is not None and num_decoding == len(queries):
            return self._attend_decoding(queries, key_cache, value_cache, mask)
        attended_T = torch.zeros(len(queries), self._shape.num_heads * head_dim)
        if mask is not None:
            attended_T[:num_decoding] = self._attend_decoding(
                queries[:num_decoding], key_cache, value_cache, mask
            )
        first = num_decoding
        for chunk in step.chunks:
            last = first + chunk.num_tokens
            attended_T[first:last] = self._attend_chunk(
                queries[first:last], key_cache[chunk.slot], value_cache[chunk.slot], chunk
            )
            first = last
        return attended_T

    def _decode_mask(self, step: Step) -> Tensor | None:
        """0 where a decoding row may look and -inf elsewhere, [B * kv heads, groups, L]."""
        if step.num_decoding == 0:
            return None
        length = -(-step.longest_decoding // LENGTH_STEP) * LENGTH_STEP
        is_ahead = self._positions[:length] > step.positions_T[: step.num_decoding, None]
        mask = torch.zeros(step.num_decoding, 1, length).masked_fill_(is_ahead[:, None], MASKED)
        heads, groups = self._shape.num_kv_heads, self._shape.num_query_groups
        return mask.repeat_interleave(heads, dim=0).expand(-1, groups, -1).contiguous()

    def _attend_decoding(
        self, queries_B: Tensor, key_cache: Tensor, value_cache: Tensor, mask: Tensor
    ) -> Tensor:
        batch, length = len(queries_B), mask.shape[2]
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        queries = queries_B.reshape(batch * kv_heads, -1, head_dim)
        keys = key_cache.view(-1, self._cache.capacity, head_dim)[: batch * kv_heads, :length]
        values = value_cache.view(-1, self._cache.capacity, head_dim)[: batch * kv_heads, :length]
        return self._attended(mask, queries, keys, values).view(batch, -1)

    def _attended(self, mask: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """softmax(mask + scale * queries keys^T) values, with the kernel's rounding of the
        unnormalised probabilities."""
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=self._scale)
        if self._probability_dtype is None:
            return torch.bmm(torch.softmax(scores, -1), values)
        weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        total = weights.sum(-1, keepdim=True)
        rounded = weights.to(self._probability_dtype).float()
        return torch.bmm(rounded, values).div_(total)

    def _attend_chunk(
        self, queries_N: Tensor, keys: Tensor, values: Tensor, chunk: Chunk
    ) -> Tensor:
        """Causal attention of one chunk over its own slot; float32 [N, heads * D]."""
        num_tokens, end = chunk.num_tokens, chunk.start + chunk.num_tokens
        length = -(-end // LENGTH_STEP) * LENGTH_STEP
        groups, head_dim = self._shape.num_query_groups, self._shape.head_dim
        # [N, kv, groups, D] -> [kv, N * groups, D]
        queries = queries_N.reshape(num_tokens, -1, groups, head_dim).transpose(0, 1)
        queries = queries.reshape(-1, num_tokens * groups, head_dim)
        own = self._positions[chunk.start : end]
        is_ahead = self._positions[:length] > own[:, None]
        mask = torch.zeros(num_tokens, length).masked_fill_(is_ahead, MASKED)
        mask = mask.repeat_interleave(groups, dim=0).expand(len(queries), -1, -1)
        attended = self._attended(mask, queries, keys[:, :length], values[:, :length])
        return (
            attended.view(-1, num_tokens, groups, head_dim).transpose(0, 1).reshape(num_tokens, -1)
        )

    def _mlp(self, layer: LayerWeights, hidden_TH: Tensor) -> Tensor:
        """Adds the layer's MLP to the residual stream."""
        normed = self._round(self._norm(hidden_TH, layer.post_norm))
        if layer.router is None:
            inner = self._gated(functional.linear(normed, layer.gate_up))
            return self._round(torch.addmm(hidden_TH, inner, layer.down))
        chosen_TK, share_TK = self._route(layer.router, normed)
        if self._is_dense_moe:
            return self._all_experts(layer, hidden_TH, normed, chosen_TK, share_TK)
        return self._chosen_experts(layer, hidden_TH, normed, chosen_TK, share_TK)

    def _route(self, router: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and shares of each row's experts, [T, K] each."""
        scores = self._round(functional.linear(normed, router))
        if self._shape.norm_topk_prob:
            top, chosen = scores.topk(self._shape.top_k, dim=-1)
            return chosen, torch.softmax(top, -1)
        share, chosen = torch.softmax(scores, -1).topk(self._shape.top_k, dim=-1)
        return chosen, share

    def _gated(self, gate_up: Tensor) -> Tensor:
        gate, up = self._round(gate_up).chunk(2, dim=-1)
        return self._round(functional.silu(gate).mul_(up))

    def _all_experts(
        self,
        layer: LayerWeights,
        hidden_TH: Tensor,
        normed: Tensor,
        chosen_TK: Tensor,
        share_TK: Tensor,
    ) -> Tensor:
        num_experts = self._shape.num_experts
        shares_TE = normed.new_zeros(len(normed), num_experts).scatter_(1, chosen_TK, share_TK)
        inner = self._gated(functional.linear(normed, layer.gate_up))
        inner.view(len(normed), num_experts, -1).mul_(shares_TE.unsqueeze(-1))
        # The sum over experts happens inside the product: their channels are one long axis.
        return self._round(torch.addmm(hidden_TH, inner, layer.down))

    def _chosen_experts(
        self,
        layer: LayerWeights,
        hidden_TH: Tensor,
        normed: Tensor,
        chosen_TK: Tensor,
        share_TK: Tensor,
    ) -> Tensor:
        num_experts = self._shape.num_experts
        gates, ups = layer.gate_up.view(2, num_experts, -1, self._shape.hidden)
        downs = layer.down.view(num_experts, -1, self._shape.hidden)
        result = hidden_TH.clone()
        for expert in chosen_TK.unique().tolist():
            rows, ranks = (chosen_TK == expert).nonzero(as_tuple=True)
            inputs = normed[rows]
            both = torch.cat(
                (functional.linear(inputs, gates[expert]), functional.linear(inputs, ups[expert])),
                dim=-1,
            )
            inner = self._gated(both).mul_(share_TK[rows, ranks].unsqueeze(-1))
            result.index_add_(0, rows, torch.mm(inner, downs[expert]))
        return self._round(result)


class _Rows:
    """Index tensors of a step, padded to MIN_ROWS."""

    def __init__(self, step: Step, cache: KvCache, shape: ModelShape) -> None:
        num_rows = len(step.token_ids_T)
        slots = torch.arange(step.num_decoding)
        if step.chunks:
            parts = [torch.full((chunk.num_tokens,), chunk.slot) for chunk in step.chunks]
            slots = torch.cat((slots, *parts))
        self.token_ids_T, self.positions_T = step.token_ids_T, step.positions_T
        padding = MIN_ROWS - num_rows
        if padding > 0:
            zeros = torch.zeros(padding, dtype=torch.int64)
            self.token_ids_T = torch.cat((self.token_ids_T, zeros))
            self.positions_T = torch.cat((self.positions_T, zeros))
            slots = torch.cat((slots, torch.full((padding,), cache.num_slots)))
        self.write_index = cache.write_index(slots, self.positions_T)
        self.logit_rows: Tensor | None = None
        self.num_logits = step.num_decoding
        if step.chunks:
            ends, row = [], step.num_decoding
            for chunk in step.chunks:
                row += chunk.num_tokens
                if chunk.needs_logits:
                    ends.append(row - 1)
            wanted = [*range(step.num_decoding), *ends]
            self.num_logits = len(wanted)
            wanted += [0] * (MIN_ROWS - len(wanted))
            self.logit_rows = torch.tensor(wanted)
