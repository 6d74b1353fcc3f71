"""One forward step over a mixed batch: decoding requests and chunks of prompts together.

All rows share the linear layers; attention runs once for the decoding rows and once per prompt
chunk. Invariant: the logits of a request do not depend on the other rows beyond float rounding,
and with MKL not at all: rows are padded to MIN_ROWS and lengths to LENGTH_STEP, above which its
results for a row do not depend on the shape of the rest.
"""

# T rows of the step, B decoding rows (the first ones), H hidden, D head dim, E experts, K per token

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from rlmix.engine.embedded.attention import Attention, Chunk, Span
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.routes import RouteCache
from rlmix.engine.embedded.shape import ModelShape
from rlmix.engine.embedded.weights import LayerWeights, ModelWeights, NativeWeights
from rlmix.numerics import fp8, nvfp4
from rlmix.numerics.fp8 import fake_quantize_kv

MIN_ROWS = 4
"""MKL takes another kernel, with another order of additions, for fewer rows."""

BATCHED_EXPERT_RATIO = 8
"""Up to this many experts per chosen one, every expert gets room for the same number of rows and
all are multiplied at once; beyond it most of that would be padding, and the experts that were
chosen are computed one by one."""


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

    def __init__(
        self,
        shape: ModelShape,
        profile: Profile,
        cache: KvCache,
        *,
        routes: RouteCache | None = None,
    ) -> None:
        """`routes` gets the experts of every row; None records nothing."""
        self._shape = shape
        self._cache = cache
        self._routes = routes
        self._attention = Attention(shape, profile, cache)
        self._rounds = profile.rounds_to_bf16
        self._activations = profile.activations
        self._fp8_scales = profile.fp8_scales
        self._expert_fp8_scales = profile.expert_fp8_scales
        self._rounds_cache_to_fp8 = profile.kv == "fp8"
        self._rounds_query_to_fp8 = profile.rounds_query_to_fp8
        self._rounds_cache_to_bf16 = profile.kv == "bf16" and not self._rounds
        self._batches_experts = shape.num_experts <= BATCHED_EXPERT_RATIO * shape.top_k
        positions = torch.arange(cache.capacity, dtype=torch.float64)
        exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
        angles = positions[:, None] * (1.0 / shape.rope_theta**exponents)
        self._rotations = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        self._hidden_floor = torch.tensor((shape.hidden * shape.rms_eps) ** 0.5)
        self._head_floor = torch.tensor((shape.head_dim * shape.rms_eps) ** 0.5)

    @torch.inference_mode()
    def logits(self, weights: ModelWeights, step: Step) -> Tensor:
        """Next-token logits, float32 [B + chunks that need logits, V], in this order."""
        assert isinstance(weights, NativeWeights), "the profile decides how weights are loaded"
        rows = Rows(step, self._cache)
        spans = self._spans(step)
        is_decode = step.num_decoding > 0
        hidden_TH = weights.embedding.index_select(0, rows.token_ids_T)
        rotations_T = self._rotations.index_select(0, rows.positions_T)[:, None]
        taken: list[tuple[Tensor, Tensor]] | None = None if self._routes is None else []
        for index, layer in enumerate(weights.layers):
            queries_T = self._queries(index, layer, hidden_TH, rotations_T, rows.write_index)
            attended_T = self._attention.attend(index, queries_T, spans, is_decode=is_decode)
            attended_T = self._round(attended_T)
            if layer.attention_is_quantised:
                attended_T = self._quantise(attended_T, layer)
            hidden_TH = self._round(torch.addmm(hidden_TH, attended_T, layer.out))
            hidden_TH = self._mlp(layer, hidden_TH, taken)
        if self._routes is not None and taken is not None:
            self._routes.write(rows.slots_T, rows.positions_T, taken)
        wanted_H = hidden_TH if rows.logit_rows is None else hidden_TH[rows.logit_rows]
        final = self._round(_norm(wanted_H, weights.final_norm, self._hidden_floor))
        return torch.mm(final, weights.head)[: rows.num_logits]

    def _spans(self, step: Step) -> Sequence[Span]:
        spans = []
        first = step.num_decoding
        if first:
            positions_B = step.positions_T[:first]
            spans.append(self._attention.decode_span(positions_B, longest=step.longest_decoding))
        for chunk in step.chunks:
            spans.append(self._attention.chunk_span(chunk, first=first))
            first += chunk.num_tokens
        return spans

    def _round(self, values: Tensor) -> Tensor:
        return values.bfloat16().float() if self._rounds else values

    def _quantise(self, inputs: Tensor, layer: LayerWeights, *, is_expert: bool = False) -> Tensor:
        """What a quantised matrix is multiplied with, from its input [..., K]."""
        if self._activations == "fp8":
            scales = self._expert_fp8_scales if is_expert else self._fp8_scales
            if layer.scale_group is None:
                scales = "fp32"
            return fp8.fake_quantize_activations(inputs, scales, group=layer.scale_group)
        if self._activations == "nvfp4":
            return nvfp4.fake_quantize_activations(inputs)
        return inputs

    def _quantise_in_mlp(self, inputs: Tensor, layer: LayerWeights) -> Tensor:
        if not layer.mlp_is_quantised:
            return inputs
        return self._quantise(inputs, layer, is_expert=layer.router is not None)

    def _queries(
        self,
        index: int,
        layer: LayerWeights,
        hidden_TH: Tensor,
        rotations_T: Tensor,
        write_index: Tensor,
    ) -> Tensor:
        """Queries [T, heads, D] of a layer; its keys and values go into the cache."""
        shape = self._shape
        num_rows, num_queries = len(hidden_TH), shape.num_heads
        num_rotated = num_queries + shape.num_kv_heads
        normed = self._round(_norm(hidden_TH, layer.input_norm, self._hidden_floor))
        if layer.attention_is_quantised:
            normed = self._quantise(normed, layer)
        heads = torch.mm(normed, layer.qkv).view(num_rows, -1, shape.head_dim)
        rotated = heads[:, :num_rotated]
        pairs = _norm(rotated, layer.qk_norm, self._head_floor).view(num_rows, num_rotated, -1, 2)
        turned = torch.view_as_complex(pairs) * rotations_T
        rotated.copy_(torch.view_as_real(turned).view(num_rows, num_rotated, shape.head_dim))
        heads = self._round(heads)
        if self._rounds_query_to_fp8:
            heads = fake_quantize_kv(heads)
        queries, cached = heads[:, :num_queries], heads[:, num_queries:]
        if self._rounds_cache_to_fp8 and not self._rounds_query_to_fp8:
            cached = fake_quantize_kv(cached)
        elif self._rounds_cache_to_bf16:
            cached = cached.bfloat16().float()
        self._attention.write(index, write_index, cached)
        return queries

    def _mlp(
        self,
        layer: LayerWeights,
        hidden_TH: Tensor,
        taken: list[tuple[Tensor, Tensor]] | None,
    ) -> Tensor:
        """Adds the layer's MLP to the residual stream, and its routes to `taken`."""
        normed = self._round(_norm(hidden_TH, layer.post_norm, self._hidden_floor))
        inputs = self._quantise_in_mlp(normed, layer)
        if layer.router is None:
            inner = self._gated(torch.mm(inputs, layer.gate_up[0]), layer)
            return self._round(torch.addmm(hidden_TH, inner, layer.down[0]))
        chosen_TK, share_TK = self._route(layer.router, normed)
        if taken is not None:
            taken.append((chosen_TK, share_TK))
        if self._batches_experts:
            outputs_TKH = self._experts_batched(layer, inputs, chosen_TK)
        else:
            outputs_TKH = self._experts_one_by_one(layer, inputs, chosen_TK)
        outputs_TKH.mul_(share_TK.unsqueeze(-1))
        return self._round(outputs_TKH.sum(1).add_(hidden_TH))

    def _route(self, router: Tensor, normed: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and shares of each row's experts, [T, K] each."""
        return self._choose(torch.mm(normed, router))

    def _choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The same from router logits [T, E]."""
        if self._shape.norm_topk_prob:
            top, chosen = scores.topk(self._shape.top_k, dim=-1)
            return chosen, torch.softmax(top, -1)
        share, chosen = torch.softmax(scores, -1).topk(self._shape.top_k, dim=-1)
        return chosen, share

    def _gated(self, gate_up: Tensor, layer: LayerWeights) -> Tensor:
        """What meets the layer's down projection."""
        gate, up = self._round(gate_up).chunk(2, dim=-1)
        inner = self._round(functional.silu(gate).mul_(up))
        return self._quantise_in_mlp(inner, layer)

    def _experts_batched(self, layer: LayerWeights, inputs_TH: Tensor, chosen_TK: Tensor) -> Tensor:
        """Each row's K expert outputs, [T, K, H], by one product over all experts."""
        num_rows, top_k = chosen_TK.shape
        num_experts = self._shape.num_experts
        expert_P = chosen_TK.numpy().ravel()  # P = T * K pairs of row and expert
        order_P = expert_P.argsort(kind="stable")
        counts_E = np.bincount(expert_P, minlength=num_experts)
        room = max(MIN_ROWS, int(counts_E.max()))
        # Pairs sorted by expert fill the expert's room from its start.
        shift_E = np.arange(num_experts) * room - (counts_E.cumsum() - counts_E)
        place_P = np.arange(len(expert_P)) + shift_E[expert_P[order_P]]
        row_of_place = np.zeros(num_experts * room, dtype=np.int64)
        row_of_place[place_P] = order_P // top_k
        place_of_pair = np.empty(len(expert_P), dtype=np.int64)
        place_of_pair[order_P] = place_P
        inputs = inputs_TH.index_select(0, torch.from_numpy(row_of_place)).view(
            num_experts, room, -1
        )
        outputs = torch.bmm(self._gated(torch.bmm(inputs, layer.gate_up), layer), layer.down)
        outputs = outputs.view(num_experts * room, -1)
        return outputs.index_select(0, torch.from_numpy(place_of_pair)).view(num_rows, top_k, -1)

    def _experts_one_by_one(
        self, layer: LayerWeights, inputs_TH: Tensor, chosen_TK: Tensor
    ) -> Tensor:
        """The same, by a product for each expert that any row chose."""
        outputs_TKH = torch.empty(*chosen_TK.shape, inputs_TH.shape[1])
        for expert in chosen_TK.unique().tolist():
            rows, ranks = (chosen_TK == expert).nonzero(as_tuple=True)
            inner = self._gated(torch.mm(inputs_TH[rows], layer.gate_up[expert]), layer)
            outputs_TKH[rows, ranks] = torch.mm(inner, layer.down[expert])
        return outputs_TKH


def _norm(values: Tensor, weight: Tensor, floor: Tensor) -> Tensor:
    """RMS norm over the last axis, of n elements; `weight` was multiplied by sqrt(n) when it was
    loaded, and `floor` is sqrt(n * eps).

    x / sqrt(mean(x^2) + eps) = sqrt(n) * x / hypot(|x|, sqrt(n * eps)), in half the time of torch's
    rms_norm on small batches.
    """
    length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    return (values / torch.hypot(length, floor)).mul_(weight)


class Rows:
    """Index tensors of a step, padded to MIN_ROWS."""

    def __init__(self, step: Step, cache: KvCache) -> None:
        slots = torch.arange(step.num_decoding)
        if step.chunks:
            parts = [torch.full((chunk.num_tokens,), chunk.slot) for chunk in step.chunks]
            slots = torch.cat((slots, *parts))
        self.token_ids_T, self.positions_T = step.token_ids_T, step.positions_T
        padding = MIN_ROWS - len(step.token_ids_T)
        if padding > 0:
            zeros = torch.zeros(padding, dtype=torch.int64)
            self.token_ids_T = torch.cat((self.token_ids_T, zeros))
            self.positions_T = torch.cat((self.positions_T, zeros))
            slots = torch.cat((slots, torch.full((padding,), cache.num_slots)))
        self.slots_T = slots
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
