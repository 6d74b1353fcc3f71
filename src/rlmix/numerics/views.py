"""Weight views: the tensors of one checkpoint in the format that a pool's engine loads.

`encode_view` turns BF16 weights into the tensors on disk, `decode_view` turns those into the
float32 values that an engine with that format multiplies by. Invariant: encoding quantises the
attention and MLP projections and nothing else; router, norms, embeddings and output head keep
their bits. Each view is made from the BF16 weights, never from another view.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlmix.core.errors import DataError
from rlmix.numerics import fp8, nvfp4
from rlmix.numerics.checks import finite_amax

VIEWS = ("bf16", "fp8", "nvfp4")

_LINEAR = re.compile(
    r".*\.(self_attn\.[qkvo]_proj|mlp\.(experts\.\d+\.)?(gate|up|down)_proj)\.weight"
)
_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")

SHARED_SCALE = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("gate_proj", "up_proj"),
)
"""Projections that an engine fuses into one matrix and that therefore share a tensor scale."""

UNQUANTISED = ("lm_head", "model.embed_tokens", "*.mlp.gate", "*norm*")
"""Module patterns that no view quantises, as checkpoint configs spell them."""


def is_quantised_linear(name: str) -> bool:
    """True for the weights that the fp8 and nvfp4 views store quantised."""
    return _LINEAR.fullmatch(name) is not None


def encode_view(state: Mapping[str, Tensor], view: str) -> dict[str, Tensor]:
    """Tensors on disk for a view.

    Args:
        state: weights by Hugging Face name. Experts may be fused as Transformers holds them in
            memory (`experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I]); on disk
            they are one matrix each, as engines load them.
        view: `bf16`; `fp8` (`X.weight` e4m3 and `X.weight_scale_inv`); `nvfp4` (`X.weight`
            uint8, `X.weight_scale` e4m3, `X.weight_scale_2`).
    Raises:
        DataError: unknown view; a weight holds NaN or Inf, or does not divide into blocks.
    """
    _check_view(view)
    named = dict(split_experts(state))
    shared = _shared_amax(named) if view == "nvfp4" else {}
    encoded: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if view == "bf16" or not is_quantised_linear(name):
            finite_amax(tensor, name=name, convention=f"{view} view")
            encoded[name] = tensor.to(torch.bfloat16).contiguous()
        elif view == "fp8":
            blocks = fp8.quantize_blocks(tensor, name=name)
            encoded[name] = blocks.data_e4m3
            encoded[f"{name}_scale_inv"] = blocks.scale_inv_f32
        else:
            if tensor.shape[-1] % nvfp4.BLOCK:
                raise DataError(
                    f"nvfp4: {name} has {tensor.shape[-1]} columns; a checkpoint needs a multiple "
                    f"of {nvfp4.BLOCK}"
                )
            quantised = nvfp4.quantize(tensor, amax=shared.get(name), name=name)
            encoded[name] = quantised.packed_uint8
            encoded[f"{name}_scale"] = quantised.block_scale_e4m3
            encoded[f"{name}_scale_2"] = quantised.tensor_scale_f32
    return encoded


def decode_view(tensors: Mapping[str, Tensor], view: str) -> dict[str, Tensor]:
    """Float32 weights by plain name: what an engine computes with when it loads `tensors`.

    Raises:
        DataError: unknown view, a scale is missing, or a dtype or shape does not fit the view.
    """
    _check_view(view)
    decoded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(("_scale", "_scale_2", "_scale_inv")):
            continue
        if view == "bf16" or not is_quantised_linear(name):
            if not tensor.is_floating_point() or tensor.dtype == torch.float8_e4m3fn:
                raise DataError(f"{view} view: {name} has dtype {tensor.dtype}; expected bf16")
            decoded[name] = tensor.float()
        elif view == "fp8":
            scale_inv = _part(tensors, f"{name}_scale_inv", view=view)
            decoded[name] = fp8.from_parts(tensor, scale_inv, name=name).dequantize()
        else:
            block_scale = _part(tensors, f"{name}_scale", view=view)
            tensor_scale = _part(tensors, f"{name}_scale_2", view=view)
            parts = nvfp4.from_parts(tensor, block_scale, tensor_scale, name=name)
            decoded[name] = parts.dequantize()
    return decoded


def quantization_config(view: str) -> dict[str, Any] | None:
    """The `quantization_config` section of a view folder's config.json; None for bf16."""
    _check_view(view)
    if view == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": list(UNQUANTISED),
        }
    if view == "nvfp4":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "config_groups": {
                "group_0": {
                    "weights": {"num_bits": 4, "type": "float", "group_size": nvfp4.BLOCK},
                    "targets": ["Linear"],
                }
            },
            "ignore": list(UNQUANTISED),
        }
    return None


def view_of_config(config: Mapping[str, Any]) -> str:
    """Which view a model folder's config.json declares.

    Raises:
        DataError: a quantisation that is none of ours.
    """
    section = config.get("quantization_config")
    if section is None:
        return "bf16"
    method, algo = section.get("quant_method"), section.get("quant_algo")
    if method == "fp8" and section.get("weight_block_size") == [128, 128]:
        return "fp8"
    if method == "modelopt" and algo == "NVFP4":
        return "nvfp4"
    raise DataError(
        f"config.json: quantization_config has quant_method={method!r}, quant_algo={algo!r}, "
        f"weight_block_size={section.get('weight_block_size')!r}; views are {', '.join(VIEWS)}"
    )


def split_experts(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`state` with fused expert tensors as one matrix per expert and projection (views)."""
    for name, tensor in state.items():
        match = _FUSED_EXPERTS.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        prefix, part = match.groups()
        for expert, matrix in enumerate(tensor):
            if part == "down_proj":
                yield f"{prefix}{expert}.down_proj.weight", matrix
            else:
                gate, up = matrix.chunk(2, dim=0)
                yield f"{prefix}{expert}.gate_proj.weight", gate
                yield f"{prefix}{expert}.up_proj.weight", up


def _shared_amax(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weight name -> largest magnitude over the projections that share its tensor scale."""
    shared: dict[str, Tensor] = {}
    for group in SHARED_SCALE:
        first = f"{group[0]}.weight"
        for name in named:
            if not (name.endswith(first) and is_quantised_linear(name)):
                continue
            stem = name.removesuffix(first)
            members = [f"{stem}{part}.weight" for part in group if f"{stem}{part}.weight" in named]
            amax = torch.stack([named[member].abs().amax() for member in members]).amax()
            shared.update(dict.fromkeys(members, amax))
    return shared


def _part(tensors: Mapping[str, Tensor], name: str, *, view: str) -> Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise DataError(f"{view} view: tensor {name} is missing from the checkpoint") from None


def _check_view(view: str) -> None:
    if view not in VIEWS:
        raise DataError(f"view {view!r} is unknown; views are {', '.join(VIEWS)}")
