"""The same operators in float64: what both sides approximate, and the order-free oracle.

Nothing is rounded. Inputs are taken as they are; results stay float64.
"""

# T rows, N query heads, G key heads, D head dim

import torch
from torch import Tensor

from rlmix.diff.program import READS, Operator, Registers, Side
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors


def reference_side(
    tensors: ModelTensors, spec: ModelSpec, *, like: Side, theta: float, temperature: float
) -> Side:
    """Float64 operators with the trainer's weights and settings."""
    operators = _Operators(tensors, spec, theta=theta, temperature=temperature)
    table: dict[str, Operator] = {name: getattr(operators, name) for name in READS}
    return Side(
        name="float64",
        shape=like.shape,
        operators=table,
        settings=dict(like.settings),
        weights=like.weights,
    )


class _Operators:
    def __init__(
        self, tensors: ModelTensors, spec: ModelSpec, *, theta: float, temperature: float
    ) -> None:
        self._tensors, self._spec = tensors, spec
        self._theta, self._temperature = theta, temperature

    def embed(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"hidden": self._tensors.embedding[r["ids"]].double()}

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        values = x.double()
        mean = values.square().mean(-1, keepdim=True)
        return values / (mean + self._spec.rms_eps).sqrt() * weight.double()

    def input_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        return {"normed": self._norm(r["hidden"], self._tensors.layers[layer].input_norm)}

    def post_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        return {"normed": self._norm(r["hidden"], self._tensors.layers[layer].post_norm)}

    def final_norm(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"normed": self._norm(r["hidden"], self._tensors.final_norm)}

    def qkv(self, layer: int, r: Registers) -> dict[str, Tensor]:
        heads = r["normed"].double() @ self._tensors.layers[layer].qkv.double().t()
        return {"heads": heads.view(len(heads), -1, self._spec.head_dim)}

    def qk_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight = self._tensors.layers[layer].qk_norm
        assert weight is not None, "only run where the model has such a norm"
        num_rotated = self._spec.num_heads + self._spec.num_kv_heads
        normed = self._norm(r["heads"][:, :num_rotated], weight)
        return {"heads": torch.cat((normed, r["heads"][:, num_rotated:].double()), dim=1)}

    def rope(self, _: int, r: Registers) -> dict[str, Tensor]:
        dim = self._spec.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
        angles = r["positions"].double()[:, None] / self._theta**exponents
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        num_rotated = self._spec.num_heads + self._spec.num_kv_heads
        first, second = r["heads"][:, :num_rotated].double().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return {"heads": torch.cat((turned, r["heads"][:, num_rotated:].double()), dim=1)}

    def kv(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"heads": r["heads"].double()}

    def attention(self, _: int, r: Registers) -> dict[str, Tensor]:
        spec, heads = self._spec, r["heads"].double()
        groups = spec.num_heads // spec.num_kv_heads
        queries = heads[:, : spec.num_heads].transpose(0, 1)
        keys, values = heads[:, spec.num_heads :].transpose(0, 1).chunk(2, dim=0)
        keys, values = (part.repeat_interleave(groups, dim=0) for part in (keys, values))
        scores = queries @ keys.transpose(1, 2) * spec.head_dim**-0.5
        ahead = torch.ones(len(heads), len(heads), dtype=torch.bool).triu(1)
        shares = scores.masked_fill(ahead, float("-inf")).softmax(-1)
        return {"attended": (shares @ values).transpose(0, 1).reshape(len(heads), -1)}

    def out_proj(self, layer: int, r: Registers) -> dict[str, Tensor]:
        added = r["attended"].double() @ self._tensors.layers[layer].out.double().t()
        return {"hidden": r["hidden"].double() + added}

    def router(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight = self._tensors.layers[layer].router
        assert weight is not None, "only run in layers with experts"
        return {"router": r["normed"].double() @ weight.double().t()}

    def route(self, _: int, r: Registers) -> dict[str, Tensor]:
        logits = r["router"].double()
        ids = logits.argsort(dim=-1, descending=True, stable=True)[:, : self._spec.top_k]
        if self._spec.norm_topk_prob:
            return {"experts": ids, "shares": logits.gather(1, ids).softmax(-1)}
        return {"experts": ids, "shares": logits.softmax(-1).gather(1, ids)}

    def gate_up(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight, rows = self._tensors.layers[layer].gate_up.double(), r["normed"].double()
        if "experts" not in r:
            return {"gate_up": rows @ weight.t()}
        rows = rows[:, None].expand(-1, r["experts"].shape[1], -1)
        return {"gate_up": _by_expert(rows, r["experts"], weight)}

    def act(self, _: int, r: Registers) -> dict[str, Tensor]:
        gate, up = r["gate_up"].double().chunk(2, dim=-1)
        return {"inner": gate * gate.sigmoid() * up}

    def down(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight, rows = self._tensors.layers[layer].down.double(), r["inner"].double()
        if "experts" not in r:
            return {"hidden": r["hidden"].double() + rows @ weight.t()}
        return {"outputs": _by_expert(rows, r["experts"], weight)}

    def combine(self, _: int, r: Registers) -> dict[str, Tensor]:
        weighted = r["outputs"].double() * r["shares"].double()[:, :, None]
        return {"hidden": r["hidden"].double() + weighted.sum(1)}

    def head(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"logits": r["normed"].double() @ self._tensors.head.double().t()}

    def logprob(self, _: int, r: Registers) -> dict[str, Tensor]:
        logprobs = (r["logits"].double() / self._temperature).log_softmax(-1)
        return {"logprobs": logprobs.gather(1, r["targets"][:, None])[:, 0]}


def _by_expert(rows_TKI: Tensor, ids_TK: Tensor, weight_EOI: Tensor) -> Tensor:
    out = rows_TKI.new_empty(*ids_TK.shape, weight_EOI.shape[1])
    for expert in ids_TK.unique().tolist():
        is_chosen = ids_TK == expert
        out[is_chosen] = rows_TKI[is_chosen] @ weight_EOI[expert].t()
    return out
