"""Faults that were made after the thresholds were frozen; see `faults`."""

# T rows, N query heads, G key heads, D head dim, K experts per token

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.diff.exact_side import expert_products
from rlmix.diff.faults import Fault, Ground, _attention, _bf16, _round, position_fault
from rlmix.diff.program import Operator, Registers
from rlmix.numerics import fp8, nvfp4


def _int_rows(x: Tensor, levels: int) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / levels
    return (x / scale).round() * scale


def _nvfp4(weight: Tensor) -> Tensor:
    return nvfp4.quantize(weight.bfloat16(), name="fault").dequantize()


def _gate_up(ground: Ground, change: Callable[[Tensor], Tensor]) -> Operator:
    """Gate and up matrices changed, all experts' or the dense layer's."""
    changed = []
    for layer in ground.tensors.layers:
        weight = layer.gate_up
        changed.append(change(weight) if weight.ndim == 3 else change(weight[None])[0])

    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        weight = changed[layer]
        if "experts" not in r:
            return {"gate_up": _round(ground, F.linear(r["normed"], weight))}
        rows = r["normed"][:, None].expand(-1, ground.spec.top_k, -1)
        return {"gate_up": _round(ground, expert_products(rows, r["experts"], weight))}

    return run


def _nvfp4_experts(ground: Ground) -> Operator:
    def change(weight: Tensor) -> Tensor:
        halves = [torch.cat([_nvfp4(half) for half in one.chunk(2)]) for one in weight]
        return torch.stack(halves)

    return _gate_up(ground, change)


def _swapped_experts(ground: Ground) -> Operator:
    return _gate_up(ground, lambda weight: weight[[1, 0, *range(2, len(weight))]])


def _down(
    ground: Ground,
    *,
    weight: Callable[[Tensor], Tensor] = lambda w: w,
    inputs: Callable[[Tensor], Tensor] = lambda x: x,
) -> Operator:
    changed = [weight(layer.down) for layer in ground.tensors.layers]

    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        inner = inputs(r["inner"])
        if "experts" not in r:
            return {"hidden": _round(ground, F.linear(inner, changed[layer]) + r["hidden"])}
        return {"outputs": expert_products(inner, r["experts"], changed[layer])}

    return run


def _fp8_inputs(ground: Ground) -> Operator:
    return _down(ground, inputs=lambda x: fp8.fake_quantize_activations(x.clone(), "fp32"))


def _int4_down(ground: Ground) -> Operator:
    return _down(ground, weight=lambda w: _int_rows(w, 7))


def _one_plus_norm(ground: Ground) -> Operator:
    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        x = r["hidden"]
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + ground.spec.rms_eps)
        return {"normed": _round(ground, normed * (1 + ground.tensors.layers[layer].post_norm))}

    return run


def _unnormalised_shares(ground: Ground) -> Operator:
    original = ground.original("route")

    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        chosen = original(layer, r)["experts"]
        return {"experts": chosen, "shares": r["router"].softmax(-1).gather(1, chosen)}

    return run


def _experts_by_id(ground: Ground) -> Operator:
    original = ground.original("route")

    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        found = original(layer, r)
        experts, order = found["experts"].sort(dim=1)
        return {"experts": experts, "shares": found["shares"].gather(1, order)}

    return run


def _cached(ground: Ground, change: Callable[[Tensor], Tensor]) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        count = ground.spec.num_heads
        return {"heads": torch.cat((r["heads"][:, :count], change(r["heads"][:, count:])), dim=1)}

    return run


def _kv_scale(ground: Ground) -> Operator:
    return _cached(ground, lambda cached: cached * 0.5)


def _kv_int8(ground: Ground) -> Operator:
    return _cached(ground, lambda cached: _int_rows(cached, 127))


def _stale_prefix(ground: Ground) -> Operator:
    """Keys and values that older weights left in a prefix cache."""

    def change(cached: Tensor) -> Tensor:
        old = cached.clone()
        old[:32] = _bf16(0.97 * cached[:32] + 0.03 * cached[1:33])
        return old

    return _cached(ground, change)


def _top_k(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        scores = r["logits"] / ground.temperature
        kept = torch.zeros_like(scores, dtype=torch.bool)
        kept.scatter_(1, scores.topk(20, dim=-1).indices, True)
        kept.scatter_(1, r["targets"][:, None], True)
        mass = scores.masked_fill(~kept, float("-inf")).logsumexp(-1)
        return {"logprobs": scores.gather(1, r["targets"][:, None])[:, 0] - mass}

    return run


def _gelu(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        gate, up = r["gate_up"].chunk(2, dim=-1)
        return {"inner": _round(ground, F.gelu(gate) * up)}

    return run


def _clamped_act(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        gate, up = r["gate_up"].chunk(2, dim=-1)
        return {"inner": _round(ground, F.silu(gate.clamp(max=1.0)) * up.clamp(-1.0, 1.0))}

    return run


def _softcap(ground: Ground) -> Operator:
    original = ground.original("head")
    return lambda layer, r: {"logits": 30 * (original(layer, r)["logits"] / 30).tanh()}


def _interleaved(ground: Ground) -> Operator:
    original = ground.original("rope")
    count = ground.spec.num_heads + ground.spec.num_kv_heads

    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        rotated, values = r["heads"][:, :count], r["heads"][:, count:]
        halved = rotated.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        found = original(layer, {**r, "heads": torch.cat((halved, values), dim=1)})["heads"]
        paired = found[:, :count].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return {"heads": torch.cat((paired, found[:, count:]), dim=1)}

    return run


def _scaled_embedding(ground: Ground) -> Operator:
    original = ground.original("embed")

    def run(layer: int, r: Registers) -> dict[str, Tensor]:
        hidden = original(layer, r)["hidden"]
        return {"hidden": _round(ground, hidden * hidden.shape[-1] ** 0.5)}

    return run


def _combine_bf16(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        weighted = _bf16(r["outputs"] * r["shares"][:, :, None])
        return {"hidden": _round(ground, _bf16(weighted.sum(1)) + r["hidden"])}

    return run


def _no_qk_norm(ground: Ground) -> Operator:
    return lambda _, r: {"heads": r["heads"]}


def _reversed_head(ground: Ground) -> Operator:
    flipped = ground.tensors.head.flip(1).contiguous()
    return lambda _, r: {"logits": F.linear(r["normed"].flip(1).contiguous(), flipped)}


def _biased(ground: Ground) -> Operator:
    original = ground.original("qkv")
    return lambda layer, r: {"heads": original(layer, r)["heads"] + 0.01}


def _probabilities_bf16(ground: Ground) -> Operator:
    def run(_: int, r: Registers) -> dict[str, Tensor]:
        spec, heads = ground.spec, r["heads"]
        queries = heads[:, : spec.num_heads].transpose(0, 1)
        keys, values = heads[:, spec.num_heads :].transpose(0, 1).chunk(2, dim=0)
        groups = spec.num_heads // spec.num_kv_heads
        keys, values = (part.repeat_interleave(groups, dim=0) for part in (keys, values))
        scores = queries @ keys.transpose(1, 2) * spec.head_dim**-0.5
        ahead = torch.ones(len(heads), len(heads), dtype=torch.bool).triu(1)
        shares = _bf16(scores.masked_fill(ahead, float("-inf")).softmax(-1))
        out = (shares @ values).transpose(0, 1).reshape(len(heads), -1)
        return {"attended": _round(ground, out)}

    return run


LATER: tuple[Fault, ...] = (
    Fault(name="interleaved_rope", operator="rope", cause="hyper-parameter", plant=_interleaved),
    Fault(name="nvfp4_experts", operator="gate_up", cause="quantisation", plant=_nvfp4_experts),
    Fault(name="fp8_inputs", operator="down", cause="quantisation", plant=_fp8_inputs),
    Fault(name="int4_down", operator="down", cause="quantisation", plant=_int4_down),
    Fault(
        name="one_plus_norm", operator="post_norm", cause="hyper-parameter", plant=_one_plus_norm
    ),
    Fault(
        name="unnormalised_shares",
        operator="route",
        cause="router",
        plant=_unnormalised_shares,
        needs_experts=True,
    ),
    Fault(
        name="experts_by_id",
        operator="route",
        cause="router",
        plant=_experts_by_id,
        needs_experts=True,
    ),
    Fault(
        name="swapped_experts",
        operator="gate_up",
        cause="weights",
        plant=_swapped_experts,
        needs_experts=True,
    ),
    Fault(
        name="combine_bf16",
        operator="combine",
        cause="cast",
        plant=_combine_bf16,
        needs_experts=True,
    ),
    Fault(name="kv_scale", operator="kv", cause="cache", plant=_kv_scale),
    Fault(name="kv_int8", operator="kv", cause="quantisation", plant=_kv_int8),
    Fault(name="stale_prefix", operator="kv", cause="cache", plant=_stale_prefix),
    Fault(name="top_k", operator="logprob", cause="sampling", plant=_top_k),
    Fault(name="gelu", operator="act", cause="hyper-parameter", plant=_gelu),
    Fault(name="clamped_act", operator="act", cause="hyper-parameter", plant=_clamped_act),
    Fault(name="softcap", operator="head", cause="hyper-parameter", plant=_softcap),
    Fault(
        name="positions_from_one",
        operator="rope",
        cause="positions",
        plant=lambda ground: position_fault(ground, lambda p: p + 1),
    ),
    Fault(
        name="first_key_hidden",
        operator="attention",
        cause="mask",
        plant=lambda ground: _attention(ground, hides_first=True),
    ),
    Fault(
        name="scaled_embedding",
        operator="embed",
        cause="hyper-parameter",
        plant=_scaled_embedding,
    ),
    Fault(name="no_qk_norm", operator="qk_norm", cause="hyper-parameter", plant=_no_qk_norm),
    Fault(name="reversed_head", operator="head", cause="order", plant=_reversed_head),
    Fault(name="qkv_bias", operator="qkv", cause="weights", plant=_biased),
    Fault(name="probabilities_bf16", operator="attention", cause="cast", plant=_probabilities_bf16),
)
"""Made after conf/diff/default.yaml was frozen; none of its limits was changed for them."""

PAIRS: tuple[tuple[str, str], ...] = (
    ("kv_fp8", "temperature"),
    ("split_k", "norm_eps"),
    ("rope_theta", "stale_layer"),
    ("mask_off_by_one", "act_cast"),
    ("changed_token", "top_p"),
    ("nvfp4_experts", "logits_bf16"),
    ("stale_prefix", "gelu"),
)
"""Names of faults that are planted together; both are to be named."""
