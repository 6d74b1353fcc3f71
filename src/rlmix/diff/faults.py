"""Faults planted into a side, one operator each, so that a diagnosis can be held against the truth.

A fault wraps an operator of the side it is planted into; the rest of the side stays as it is. What
a diagnosis should say of it stands beside it. `FROZEN` were there when the thresholds were chosen,
`LATER` (in `later_faults`) were made afterwards and changed no threshold.
"""

# T rows, N query heads, G key heads, D head dim

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.diff.program import Operator, Registers, Side
from rlmix.numerics.consistent.attention import attend, plan_attention
from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.model import ModelSpec, ModelTensors
from rlmix.numerics.fp8 import fake_quantize_kv


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What a fault needs to know of the model that it is planted into."""

    side: Side
    tensors: ModelTensors
    spec: ModelSpec
    theta: float
    temperature: float

    def original(self, name: str) -> Operator:
        return self.side.operators[name]


Plant = Callable[[Ground], Operator]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One cause of a difference, and what to say of it."""

    name: str
    operator: str
    cause: str
    plant: Plant
    needs_experts: bool = False
    needs_qk_norm: bool = False
    also: tuple[str, ...] = ()
    """Other classes that would be right as well."""


def planted(ground: Ground, *faults: Fault) -> Side:
    """The ground's side with all of these faults; two of one operator wrap each other."""
    side = ground.side
    for fault in faults:
        here = replace(ground, side=side)
        side = side.with_operators(f"{side.name}+{fault.name}", {fault.operator: fault.plant(here)})
    return side


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def _round(ground: Ground, x: Tensor) -> Tensor:
    return x if ground.spec.round_to is None else _bf16(x)


def _rotated(ground: Ground) -> int:
    return ground.spec.num_heads + ground.spec.num_kv_heads


def _split_k(ground: Ground) -> Operator:
    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        weight = ground.tensors.layers[layer].qkv
        half = weight.shape[1] // 2
        x = r["normed"]
        found = F.linear(x[:, :half], weight[:, :half]) + F.linear(x[:, half:], weight[:, half:])
        return {"heads": found.view(len(x), -1, ground.spec.head_dim)}

    return run


def _float64_product(ground: Ground) -> Operator:
    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        weight = ground.tensors.layers[layer].out
        found = r["attended"].double() @ weight.double().t() + r["hidden"].double()
        return {"hidden": _round(ground, found.float())}

    return run


def _kv_tile(ground: Ground) -> Operator:
    tiling = replace(CPU_TILING, kv_tile=64, trims=())

    def run(_: int, r: Registers) -> dict[str, Tensor]:
        spec, heads = ground.spec, r["heads"]
        keys, values = heads[:, spec.num_heads :].transpose(0, 1)[None].chunk(2, dim=1)
        groups = spec.num_heads // spec.num_kv_heads
        plan = plan_attention(torch.arange(len(heads))[None], groups=groups, tiling=tiling)
        out = attend(heads[None, :, : spec.num_heads], keys, values, plan, round_to=spec.round_to)
        return {"attended": out[0].reshape(len(heads), -1)}

    return run


def _attention(
    ground: Ground,
    *,
    scale: float = 1.0,
    window: int | None = None,
    ahead: int = 0,
    hides_first: bool = False,
) -> Operator:
    """Attention of the library, with a scale or a mask of its own."""

    def run(_: int, r: Registers) -> dict[str, Tensor]:
        spec, heads = ground.spec, r["heads"]
        rows = len(heads)
        queries = heads[:, : spec.num_heads].transpose(0, 1)
        keys, values = heads[:, spec.num_heads :].transpose(0, 1).chunk(2, dim=0)
        groups = spec.num_heads // spec.num_kv_heads
        keys, values = (part.repeat_interleave(groups, dim=0) for part in (keys, values))
        row, column = torch.arange(rows)[:, None], torch.arange(rows)[None]
        sees = column <= row + ahead
        if window is not None:
            sees &= column > row - window
        if hides_first:
            sees &= (column > 0) | (row == 0)
        out = F.scaled_dot_product_attention(
            queries[None], keys[None], values[None], attn_mask=sees,
            scale=scale * spec.head_dim**-0.5,
        )[0]  # fmt: skip
        return {"attended": _round(ground, out.transpose(0, 1).reshape(rows, -1))}

    return run


def _partial_sums(ground: Ground) -> Operator:
    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        weight, x = ground.tensors.layers[layer].out, r["attended"]
        half = weight.shape[1] // 2
        parts = [
            _bf16(F.linear(x[:, part], weight[:, part]))
            for part in (slice(0, half), slice(half, None))
        ]
        return {"hidden": _round(ground, _bf16(parts[0] + parts[1]) + r["hidden"])}

    return run


def _norm_cast(ground: Ground) -> Operator:
    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        x = r["hidden"]
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + ground.spec.rms_eps)
        return {"normed": _bf16(_bf16(normed) * ground.tensors.layers[layer].input_norm)}

    return run


def _norm_eps(ground: Ground) -> Operator:
    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        x = r["hidden"]
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 10 * ground.spec.rms_eps)
        return {"normed": _round(ground, normed * ground.tensors.layers[layer].input_norm)}

    return run


def _turn(heads: Tensor, angles_TH: Tensor, count: int, *, table_bf16: bool = False) -> Tensor:
    cos, sin = angles_TH.cos().float()[:, None], angles_TH.sin().float()[:, None]
    if table_bf16:
        cos, sin = _bf16(cos), _bf16(sin)
    first, second = heads[:, :count].chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned, heads[:, count:]), dim=1)


def _angles(ground: Ground, positions_T: Tensor, *, theta: float | None = None) -> Tensor:
    dim = ground.spec.head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    return positions_T.double()[:, None] / (theta or ground.theta) ** exponents


def _rope_table(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        angles = _angles(ground, r["positions"])
        heads = _turn(r["heads"], angles, _rotated(ground), table_bf16=True)
        return {"heads": _round(ground, heads)}

    return run


def _rope_theta(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        angles = _angles(ground, r["positions"], theta=1.05 * ground.theta)
        return {"heads": _round(ground, _turn(r["heads"], angles, _rotated(ground)))}

    return run


def position_fault(ground: Ground, shift: Callable[[Tensor], Tensor]) -> Operator:
    """Rotation by other positions than told."""
    original = ground.original("rope")
    return lambda layer, r: original(layer, {**r, "positions": shift(r["positions"])})


def _position_jump(ground: Ground) -> Operator:
    return position_fault(ground, lambda p: p + (p >= 80).long())


def _router_bf16(ground: Ground) -> Operator:
    original = ground.original("router")
    return lambda layer, r: {"router": _bf16(original(layer, r)["router"])}


def _act_cast(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        gate, up = r["gate_up"].chunk(2, dim=-1)
        return {"inner": _bf16(_bf16(F.silu(gate)) * up)}

    return run


def _kv_fp8(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        count = ground.spec.num_heads
        cached = fake_quantize_kv(r["heads"][:, count:].contiguous())
        return {"heads": torch.cat((r["heads"][:, :count], cached), dim=1)}

    return run


def _logits_bf16(ground: Ground) -> Operator:
    original = ground.original("head")
    return lambda layer, r: {"logits": _bf16(original(layer, r)["logits"])}


def _softmax_bf16(ground: Ground) -> Operator:
    original = ground.original("logprob")
    return lambda layer, r: {"logprobs": _bf16(original(layer, r)["logprobs"])}


def logprob_fault(ground: Ground, change: Callable[[Registers], Mapping[str, Tensor]]) -> Operator:
    """Logprobs of changed logits or targets."""
    original = ground.original("logprob")
    return lambda layer, r: original(layer, {**r, **change(r)})


def _temperature(ground: Ground) -> Operator:
    return logprob_fault(ground, lambda r: {"logits": r["logits"] / 0.99})


def _top_p(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        logprobs = (r["logits"] / ground.temperature).log_softmax(-1)
        ordered = logprobs.sort(dim=-1, descending=True)
        before = ordered.values.exp().cumsum(-1) - ordered.values.exp()
        kept = torch.zeros_like(logprobs, dtype=torch.bool)
        kept.scatter_(1, ordered.indices, before < 0.95)
        kept.scatter_(1, r["targets"][:, None], True)  # A sampled token was kept.
        mass = logprobs.masked_fill(~kept, float("-inf")).logsumexp(-1)
        return {"logprobs": logprobs.gather(1, r["targets"][:, None])[:, 0] - mass}

    return run


def _padded_vocabulary(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        padded = F.pad(r["logits"], (0, 128)) / ground.temperature
        return {"logprobs": padded.log_softmax(-1).gather(1, r["targets"][:, None])[:, 0]}

    return run


def _label_shift(ground: Ground) -> Operator:
    return logprob_fault(ground, lambda r: {"targets": r["targets"].roll(-1)})


def _stale_layer(ground: Ground) -> Operator:
    """One layer's matrix is off by 1 %, as from an update that it missed."""
    original = ground.original("out_proj")
    draws = torch.Generator().manual_seed(3)
    index = ground.spec.num_layers - 1
    weight = ground.tensors.layers[index].out
    noise = torch.randn(weight.shape, generator=draws) * weight.square().mean().sqrt()
    stale = _bf16(weight + 0.01 * noise)

    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        if layer != index:
            return original(layer, r)
        return {"hidden": _round(ground, F.linear(r["attended"], stale) + r["hidden"])}

    return run


def _changed_token(ground: Ground) -> Operator:
    original = ground.original("embed")

    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        ids = r["ids"].clone()
        if len(ids) > 60:
            ids[60] = (ids[60] + 17) % len(ground.tensors.embedding)
        return original(layer, {**r, "ids": ids})

    return run


FROZEN: tuple[Fault, ...] = (
    Fault(name="split_k", operator="qkv", cause="order", plant=_split_k),
    Fault(name="kv_tile", operator="attention", cause="tiling", plant=_kv_tile),
    Fault(name="partial_sums_bf16", operator="out_proj", cause="cast", plant=_partial_sums),
    Fault(name="norm_cast", operator="input_norm", cause="cast", plant=_norm_cast),
    Fault(name="norm_eps", operator="input_norm", cause="hyper-parameter", plant=_norm_eps),
    Fault(name="rope_table_bf16", operator="rope", cause="cast", plant=_rope_table),
    Fault(name="rope_theta", operator="rope", cause="hyper-parameter", plant=_rope_theta),
    Fault(
        name="router_bf16", operator="router", cause="cast", plant=_router_bf16, needs_experts=True
    ),
    Fault(name="act_cast", operator="act", cause="cast", plant=_act_cast),
    Fault(name="kv_fp8", operator="kv", cause="quantisation", plant=_kv_fp8),
    Fault(
        name="attention_scale",
        operator="attention",
        cause="hyper-parameter",
        plant=lambda ground: _attention(ground, scale=1.02),
    ),
    Fault(
        name="mask_off_by_one",
        operator="attention",
        cause="mask",
        plant=lambda ground: _attention(ground, ahead=1),
    ),
    Fault(name="logprob_bf16", operator="logprob", cause="cast", plant=_softmax_bf16),
    Fault(name="temperature", operator="logprob", cause="sampling", plant=_temperature),
    Fault(name="top_p", operator="logprob", cause="sampling", plant=_top_p),
    Fault(
        name="padded_vocabulary", operator="logprob", cause="vocabulary", plant=_padded_vocabulary
    ),
    Fault(name="label_shift", operator="logprob", cause="tokens", plant=_label_shift),
    Fault(name="stale_layer", operator="out_proj", cause="weights", plant=_stale_layer),
    Fault(name="position_jump", operator="rope", cause="positions", plant=_position_jump),
    Fault(name="changed_token", operator="embed", cause="tokens", plant=_changed_token),
    Fault(
        name="window",
        operator="attention",
        cause="mask",
        plant=lambda ground: _attention(ground, window=128),
    ),
    Fault(name="logits_bf16", operator="head", cause="cast", plant=_logits_bf16),
    Fault(
        name="native_attention",
        operator="attention",
        cause="tiling",
        plant=_attention,
        also=("order",),
    ),
    Fault(name="float64_product", operator="out_proj", cause="order", plant=_float64_product),
)
"""The planted faults that the thresholds were chosen with."""
