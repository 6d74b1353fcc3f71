"""The native forward cut into named operators, for comparisons with a trainer.

Nothing here runs when the engine serves. Each operator takes and gives tensors in the order of the
checkpoint's channels; inside, channels lie as this accelerator's kernels add them. Invariant: run
one after another over a text, the operators give the logits of `Forward` bit for bit
(`tests/unit/diff/test_sides.py`).
"""

# T rows, N query heads, G key heads, D head dim, K experts per token

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from rlmix.engine.embedded.attention import Attention, Chunk
from rlmix.engine.embedded.forward import MIN_ROWS, Forward, _norm
from rlmix.engine.embedded.kv import KvCache
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import ModelShape
from rlmix.engine.embedded.weights import LayerWeights, NativeWeights
from rlmix.numerics.fp8 import fake_quantize_kv

Registers = Mapping[str, Tensor]


class NativeOperators:
    """Operators of one profile; attention over one text in slot 0 of a cache of its own."""

    def __init__(
        self,
        shape: ModelShape,
        profile: Profile,
        weights: NativeWeights,
        *,
        context_length: int,
        temperature: float,
        prefilled: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """
        Args:
            prefilled: (first, last) of the runs of positions that attention takes as parts of a
                prompt, ascending; the others are decoded one by one. None: the whole text is one
                prompt.
        """
        self._shape, self._profile, self._weights = shape, profile, weights
        self._cache = KvCache(shape, num_slots=1, context_length=context_length)
        self._forward = Forward(shape, profile, self._cache)
        self._attention = Attention(shape, profile, self._cache)
        self._temperature, self._prefilled = temperature, prefilled
        self._order: dict[int, Tensor | None] = {}

    def table(self) -> dict[str, Callable[[int, Registers], dict[str, Tensor]]]:
        """Operator name -> operator."""
        names = (
            "embed", "input_norm", "qkv", "qk_norm", "rope", "kv", "attention", "out_proj",
            "post_norm", "router", "route", "gate_up", "act", "down", "combine", "final_norm",
            "head", "logprob",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def _permutation(self, size: int) -> Tensor | None:
        if size not in self._order:
            self._order[size] = self._profile.channel_order(size)
        return self._order[size]

    def _stored(self, x: Tensor) -> Tensor:
        """Channels of the last axis as the engine stores them."""
        order = self._permutation(x.shape[-1])
        return x.float() if order is None else x.float().index_select(-1, order)

    def _plain(self, x: Tensor) -> Tensor:
        """And back."""
        order = self._permutation(x.shape[-1])
        return x if order is None else x.index_select(-1, order.argsort())

    @property
    def _num_rotated(self) -> int:
        return self._shape.num_heads + self._shape.num_kv_heads

    def _paired(self, heads: Tensor) -> Tensor:
        """Queries and keys with channel i beside channel i + D/2."""
        rotated = heads[:, : self._num_rotated].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat((rotated, heads[:, self._num_rotated :]), dim=1).float()

    def _halved(self, heads: Tensor) -> Tensor:
        rotated = heads[:, : self._num_rotated].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat((rotated, heads[:, self._num_rotated :]), dim=1)

    def _layer(self, index: int) -> LayerWeights:
        return self._weights.layers[index]

    def _hidden_norm(self, hidden: Tensor, weight: Tensor) -> dict[str, Tensor]:
        forward = self._forward
        normed = _norm(self._stored(hidden), weight, forward._hidden_floor)
        return {"normed": self._plain(forward._round(normed))}

    def embed(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"hidden": self._plain(self._weights.embedding.index_select(0, r["ids"]))}

    def input_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        return self._hidden_norm(r["hidden"], self._layer(layer).input_norm)

    def post_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        return self._hidden_norm(r["hidden"], self._layer(layer).post_norm)

    def final_norm(self, _: int, r: Registers) -> dict[str, Tensor]:
        return self._hidden_norm(r["hidden"], self._weights.final_norm)

    def qkv(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weights, normed = self._layer(layer), self._stored(r["normed"])
        if weights.attention_is_quantised:
            normed = self._forward._quantise(normed, weights)
        heads = torch.mm(normed, weights.qkv).view(len(normed), -1, self._shape.head_dim)
        return {"heads": self._halved(heads)}

    def qk_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        heads = self._paired(r["heads"])
        rotated = heads[:, : self._num_rotated]
        weight, floor = self._layer(layer).qk_norm, self._forward._head_floor
        rotated.copy_(_norm(rotated, weight, floor))
        return {"heads": self._halved(heads)}

    def rope(self, _: int, r: Registers) -> dict[str, Tensor]:
        heads = self._paired(r["heads"])
        rotations_T = self._forward._rotations.index_select(0, r["positions"])[:, None]
        rotated = heads[:, : self._num_rotated]
        pairs = rotated.contiguous().view(len(heads), self._num_rotated, -1, 2)
        turned = torch.view_as_complex(pairs) * rotations_T
        rotated.copy_(torch.view_as_real(turned).view(rotated.shape))
        return {"heads": self._halved(self._forward._round(heads))}

    def kv(self, _: int, r: Registers) -> dict[str, Tensor]:
        heads, forward = r["heads"].float(), self._forward
        if forward._rounds_query_to_fp8:
            return {"heads": fake_quantize_kv(heads.contiguous())}
        queries, cached = heads[:, : self._shape.num_heads], heads[:, self._shape.num_heads :]
        if forward._rounds_cache_to_fp8:
            cached = fake_quantize_kv(cached.contiguous())
        elif forward._rounds_cache_to_bf16:
            cached = cached.bfloat16().float()
        return {"heads": torch.cat((queries, cached), dim=1)}

    def attention(self, _: int, r: Registers) -> dict[str, Tensor]:
        """All layers attend alike, so the cache of the first one serves."""
        heads = self._paired(r["heads"])
        rows = len(heads)
        queries, cached = heads[:, : self._shape.num_heads], heads[:, self._shape.num_heads :]
        places, slots = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
        self._attention.write(0, self._cache.write_index(slots, places), cached.contiguous())
        parts, done = [], 0
        for first, last in [*(self._prefilled or [(0, rows)]), (rows, rows)]:
            for row in range(done, min(first, rows)):
                span = self._attention.decode_span(places[row : row + 1], longest=row + 1)
                one = queries[row : row + 1]
                parts.append(self._attention.attend(0, one, [span], is_decode=True))
            done = min(last, rows)
            if first < done:
                chunk = Chunk(slot=0, start=first, num_tokens=done - first, needs_logits=True)
                span = self._attention.chunk_span(chunk, first=0)
                part = queries[first:done]
                parts.append(self._attention.attend(0, part, [span], is_decode=False))
        return {"attended": self._forward._round(torch.cat(parts))}

    def out_proj(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weights, attended = self._layer(layer), r["attended"].float()
        if weights.attention_is_quantised:
            attended = self._forward._quantise(attended, weights)
        summed = torch.addmm(self._stored(r["hidden"]), attended, weights.out)
        return {"hidden": self._plain(self._forward._round(summed))}

    def router(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight = self._layer(layer).router
        assert weight is not None, "only run in layers with experts"
        return {"router": torch.mm(self._stored(r["normed"]), weight)}

    def route(self, _: int, r: Registers) -> dict[str, Tensor]:
        experts, shares = self._forward._choose(r["router"].float())
        return {"experts": experts, "shares": shares}

    def gate_up(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weights = self._layer(layer)
        inputs = self._forward._quantise_in_mlp(self._stored(r["normed"]), weights)
        if "experts" not in r:
            found = torch.mm(inputs, weights.gate_up[0])
        else:
            rows = inputs[:, None].expand(-1, r["experts"].shape[1], -1)
            found = _by_expert(rows, r["experts"], weights.gate_up)
        gate, up = self._forward._round(found).chunk(2, dim=-1)
        return {"gate_up": torch.cat((self._plain(gate), self._plain(up)), dim=-1)}

    def act(self, _: int, r: Registers) -> dict[str, Tensor]:
        gate, up = r["gate_up"].float().chunk(2, dim=-1)
        gate, up = self._stored(gate), self._stored(up)
        return {"inner": self._plain(self._forward._round(functional.silu(gate).mul_(up)))}

    def down(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weights = self._layer(layer)
        inner = self._forward._quantise_in_mlp(self._stored(r["inner"]), weights)
        if "experts" not in r:
            summed = torch.addmm(self._stored(r["hidden"]), inner, weights.down[0])
            return {"hidden": self._plain(self._forward._round(summed))}
        return {"outputs": self._plain(_by_expert(inner, r["experts"], weights.down))}

    def combine(self, _: int, r: Registers) -> dict[str, Tensor]:
        outputs = self._stored(r["outputs"]) * r["shares"].float().unsqueeze(-1)
        summed = outputs.sum(1).add_(self._stored(r["hidden"]))
        return {"hidden": self._plain(self._forward._round(summed))}

    def head(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"logits": torch.mm(self._stored(r["normed"]), self._weights.head)}

    def logprob(self, _: int, r: Registers) -> dict[str, Tensor]:
        logits = r["logits"].float()
        if self._temperature != 1.0:
            logits = logits / self._temperature
        found = torch.log_softmax(logits, dim=-1).gather(1, r["targets"][:, None])
        return {"logprobs": found[:, 0]}


def _by_expert(rows_TKI: Tensor, ids_TK: Tensor, weight_EIO: Tensor) -> Tensor:
    """[T, K, outputs]: each choice's row times its expert's matrix, at least MIN_ROWS at once."""
    flat = rows_TKI.reshape(-1, rows_TKI.shape[-1])
    out = flat.new_empty(len(flat), weight_EIO.shape[2])
    ids_P = ids_TK.reshape(-1)
    for expert in ids_P.unique().tolist():
        chosen = (ids_P == expert).nonzero()[:, 0]
        missing = max(0, MIN_ROWS - len(chosen))
        rows = functional.pad(flat[chosen], (0, 0, 0, missing))
        out[chosen] = torch.mm(rows, weight_EIO[expert])[: len(chosen)]
    return out.view(*ids_TK.shape, -1)
