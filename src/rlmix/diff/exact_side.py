"""The consistent operators under the names of `program`: both sides of exact mode."""

# T rows, K experts per token, E experts

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.diff.program import Operator, Registers, Shape, Side
from rlmix.numerics.consistent.attention import attend, plan_attention
from rlmix.numerics.consistent.contract import CPU_TILING, TREE_LEAVES, Tiling, min_rows, rounded
from rlmix.numerics.consistent.experts import choose_experts, combine, expert_shares
from rlmix.numerics.consistent.head import head_logits, scores_of_logits
from rlmix.numerics.consistent.linear import linear, row_parallel_linear
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors
from rlmix.numerics.consistent.pointwise import rms_norm, rope, rope_table, swiglu


def shape_of(tensors: ModelTensors, spec: ModelSpec) -> Shape:
    """Sizes out of a model's tensors."""
    layers = tensors.layers
    routers = [layer.router for layer in layers if layer.router is not None]
    return Shape(
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        hidden=tensors.embedding.shape[1],
        inner=layers[0].down.shape[-1],
        vocab_size=len(tensors.head),
        num_experts=len(routers[0]) if routers else 0,
        top_k=spec.top_k,
        moe_layers=frozenset(i for i, layer in enumerate(layers) if layer.router is not None),
        has_qk_norm=layers[0].qk_norm is not None,
    )


def exact_side(
    tensors: ModelTensors,
    spec: ModelSpec,
    *,
    name: str,
    theta: float,
    temperature: float,
    tiling: Tiling = CPU_TILING,
    settings: Mapping[str, str | float] | None = None,
    weights: Mapping[str, Tensor] | None = None,
) -> Side:
    """A side of the consistent operators; `tiling` is that of its attention."""
    operators = _Operators(tensors, spec, theta=theta, temperature=temperature, tiling=tiling)
    names = (
        "embed", "input_norm", "qkv", "qk_norm", "rope", "kv", "attention", "out_proj",
        "post_norm", "router", "route", "gate_up", "act", "down", "combine", "final_norm",
        "head", "logprob",
    )  # fmt: skip
    table: dict[str, Operator] = {one: getattr(operators, one) for one in names}
    said = {
        "rms_eps": spec.rms_eps,
        "rope_theta": theta,
        "temperature": temperature,
        "top_k_experts": spec.top_k,
        "norm_topk_prob": float(spec.norm_topk_prob),
        "vocab_size": float(len(tensors.head)),
    }
    return Side(
        name=name,
        shape=shape_of(tensors, spec),
        operators=table,
        settings={**said, **(settings or {})},
        weights=weights or {},
    )


class _Operators:
    """Every operator as `numerics.consistent.model.run_layers` calls it."""

    def __init__(
        self,
        tensors: ModelTensors,
        spec: ModelSpec,
        *,
        theta: float,
        temperature: float,
        tiling: Tiling,
    ) -> None:
        self._tensors, self._spec, self._tiling = tensors, spec, tiling
        self._theta, self._temperature = theta, temperature
        self._table = torch.empty(2, 0, 0)

    def embed(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"hidden": self._tensors.embedding.index_select(0, r["ids"])}

    def _norm(self, x: Tensor, weight: Tensor, *, rounds: bool = True) -> Tensor:
        round_to = self._spec.round_to if rounds else None
        return rms_norm(x, weight, eps=self._spec.rms_eps, round_to=round_to)

    def input_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        return {"normed": self._norm(r["hidden"], self._tensors.layers[layer].input_norm)}

    def post_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        return {"normed": self._norm(r["hidden"], self._tensors.layers[layer].post_norm)}

    def final_norm(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"normed": self._norm(r["hidden"], self._tensors.final_norm)}

    def qkv(self, layer: int, r: Registers) -> dict[str, Tensor]:
        heads = linear(r["normed"], self._tensors.layers[layer].qkv)
        return {"heads": heads.view(len(heads), -1, self._spec.head_dim)}

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor]:
        num_rotated = self._spec.num_heads + self._spec.num_kv_heads
        return heads[:, :num_rotated], heads[:, num_rotated:]

    def qk_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight = self._tensors.layers[layer].qk_norm
        assert weight is not None, "only run where the model has such a norm"
        rotated, values = self._split(r["heads"])
        normed = self._norm(rotated.contiguous(), weight, rounds=False)
        return {"heads": torch.cat((normed, values), dim=1)}

    def rope(self, _: int, r: Registers) -> dict[str, Tensor]:
        positions_T = r["positions"]
        length = int(positions_T.max()) + 1
        if self._table.shape[1] < length:
            self._table = rope_table(length, head_dim=self._spec.head_dim, theta=self._theta)
        rotated, values = self._split(r["heads"])
        turned = rope(rotated, self._table[:, positions_T])
        return {"heads": rounded(torch.cat((turned, values), dim=1), self._spec.round_to)}

    def kv(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"heads": r["heads"]}

    def attention(self, _: int, r: Registers) -> dict[str, Tensor]:
        spec = self._spec
        heads = r["heads"]
        queries = heads[None, :, : spec.num_heads]
        keys, values = heads[:, spec.num_heads :].transpose(0, 1)[None].chunk(2, dim=1)
        positions = torch.arange(len(heads))[None]  # Places in the cache, whatever rope was told.
        groups = spec.num_heads // spec.num_kv_heads
        plan = plan_attention(positions, groups=groups, tiling=self._tiling)
        out = attend(queries, keys, values, plan, round_to=spec.round_to)
        return {"attended": out[0].reshape(len(heads), -1)}

    def _row_parallel(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return row_parallel_linear(
            x, weight, leaves=TREE_LEAVES, residual=residual, round_to=self._spec.round_to
        )

    def out_proj(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight = self._tensors.layers[layer].out
        return {"hidden": self._row_parallel(r["attended"], weight, r["hidden"])}

    def router(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight = self._tensors.layers[layer].router
        assert weight is not None, "only run in layers with experts"
        return {"router": linear(r["normed"], weight)}

    def route(self, _: int, r: Registers) -> dict[str, Tensor]:
        ids_TK = choose_experts(r["router"], top_k=self._spec.top_k)
        shares_TK = expert_shares(r["router"], ids_TK, renormalise=self._spec.norm_topk_prob)
        return {"experts": ids_TK, "shares": shares_TK}

    def gate_up(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight, round_to = self._tensors.layers[layer].gate_up, self._spec.round_to
        if "experts" not in r:
            return {"gate_up": linear(r["normed"], weight, round_to=round_to)}
        rows = r["normed"][:, None].expand(-1, self._spec.top_k, -1)
        return {"gate_up": rounded(expert_products(rows, r["experts"], weight), round_to)}

    def act(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"inner": swiglu(r["gate_up"], round_to=self._spec.round_to)}

    def down(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight = self._tensors.layers[layer].down
        if "experts" not in r:
            return {"hidden": self._row_parallel(r["inner"], weight, r["hidden"])}
        return {"outputs": expert_products(r["inner"], r["experts"], weight)}

    def combine(self, _: int, r: Registers) -> dict[str, Tensor]:
        found = combine(
            r["outputs"], r["shares"], residual=r["hidden"], round_to=self._spec.round_to
        )
        return {"hidden": found}

    def head(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"logits": head_logits(r["normed"], self._tensors.head)}

    def logprob(self, _: int, r: Registers) -> dict[str, Tensor]:
        scores = scores_of_logits(r["logits"], r["targets"][:, None], temperature=self._temperature)
        return {"logprobs": scores.scores_PK[:, 0] - scores.normaliser_P}


def expert_products(rows_TKI: Tensor, ids_TK: Tensor, weight_EOI: Tensor) -> Tensor:
    """Each choice's row times its expert's matrix, float32 [T, K, outputs]; no product has fewer
    than `min_rows` rows, so a row's bits are those of the forward, which groups rows otherwise."""
    num_out = weight_EOI.shape[1]
    flat = rows_TKI.reshape(-1, rows_TKI.shape[-1])
    out = flat.new_empty(len(flat), num_out)
    ids_P = ids_TK.reshape(-1)
    for expert in ids_P.unique().tolist():
        chosen = (ids_P == expert).nonzero()[:, 0]
        rows = flat[chosen]
        missing = max(0, min_rows() - len(rows))
        found = F.linear(F.pad(rows, (0, 0, 0, missing)), weight_EOI[expert].float())
        out[chosen] = found[: len(chosen)]
    return out.view(*ids_TK.shape, num_out)
