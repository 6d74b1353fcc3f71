"""Weight views: the tensors of one checkpoint in the format that a pool's engine loads.

`encode_view` turns BF16 weights into the tensors on disk, `decode_view` turns those into the
float32 values that an engine with that format multiplies by. Invariant: a matrix that the view does
not quantise keeps its bits. Each view is made from the BF16 weights, never from another view.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from rlmix.core.errors import DataError
from rlmix.numerics import bf16, fp8, nvfp4
from rlmix.numerics.checks import finite_amax
from rlmix.numerics.view_spec import SHARED_SCALE, ViewSpec, is_passed_through, parse_view

_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")

_SUFFIXES = {
    "blocks": ("", "_scale_inv"),
    "channels": ("", "_scale"),
    "modelopt": ("", "_scale", "_scale_2"),
    "compressed-tensors": ("_packed", "_scale", "_global_scale"),
}
"""Convention -> what follows `X.weight` in the names on disk, the codes first."""


def encode_view(state: Mapping[str, Tensor], view: str | ViewSpec) -> dict[str, Tensor]:
    """Tensors on disk for a view.

    Args:
        state: weights by Hugging Face name. Experts may be fused as Transformers holds them in
            memory (`experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I]); on disk
            they are one matrix each, as engines load them.
        view: a spec or its text, see `view_spec`. Names for a matrix X: fp8 `X.weight` and
            `X.weight_scale_inv` (channels: `X.weight_scale`); nvfp4 `X.weight`, `X.weight_scale`,
            `X.weight_scale_2` (compressed-tensors: `X.weight_packed`, `X.weight_scale`,
            `X.weight_global_scale`).
    Raises:
        DataError: unknown view; a weight holds NaN or Inf, or does not divide into blocks; nothing
            to quantise.
    """
    spec = parse_view(view)
    check_scope(split_names(state), spec)
    return encode_tensors(state, spec)


def check_scope(names: Iterable[str], spec: ViewSpec) -> None:
    """Raise DataError for a view of experts where no matrix is one; `names` as on disk."""
    if spec.scope == "experts" and not any(spec.quantises(name) for name in names):
        raise DataError(
            f"view {spec}: the model has no expert matrices (mlp.experts.N.*_proj); use "
            f"{spec.view} without `experts`"
        )


def encode_tensors(state: Mapping[str, Tensor], spec: ViewSpec) -> dict[str, Tensor]:
    """`encode_view` of some of a model's tensors: all of those that `shared_scales` names together,
    or none."""
    named = dict(split_experts(state))
    shared = _shared_amax(named, spec) if spec.view == "nvfp4" else {}
    encoded: dict[str, Tensor] = {}
    for name, tensor in named.items():
        if spec.quantises(name):
            parts = _ENCODERS[spec.convention](tensor, name, spec, shared.get(name))
            suffixes = _SUFFIXES[spec.convention]
            encoded |= {f"{name}{suffix}": p for suffix, p in zip(suffixes, parts, strict=True)}
        else:
            encoded[name] = bf16.cast(tensor, name=name)
    return encoded


def decode_view(tensors: Mapping[str, Tensor], view: str | ViewSpec) -> dict[str, Tensor]:
    """Float32 weights by plain name: what an engine computes with when it loads `tensors`.

    Raises:
        DataError: unknown view, a scale is missing, or a dtype or shape does not fit the view.
    """
    spec = parse_view(view)
    suffixes = _SUFFIXES.get(spec.convention, ("",))
    decoded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(("_scale", "_scale_2", "_scale_inv")):
            continue
        plain = name.removesuffix(suffixes[0]) if suffixes[0] else name
        if spec.quantises(plain):
            parts = [_part(tensors, f"{plain}{suffix}", view=spec.view) for suffix in suffixes]
            decoded[plain] = _DECODERS[spec.convention](parts, plain)
        else:
            if not tensor.is_floating_point() or tensor.dtype == torch.float8_e4m3fn:
                raise DataError(f"{spec.view} view: {name} has dtype {tensor.dtype}; expected bf16")
            decoded[name] = tensor.float()
    return decoded


def split_experts(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """`state` with fused expert tensors as one matrix per expert and projection (views). Those of
    multi-token prediction stay as they are."""
    for name, tensor in state.items():
        match = _FUSED_EXPERTS.fullmatch(name)
        if match is None or is_passed_through(name):
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


def split_names(state: Mapping[str, Tensor]) -> list[str]:
    """Names that `split_experts` gives."""
    return [name for name, _ in split_experts(state)]


def shared_scales(names: Collection[str]) -> Iterator[list[str]]:
    """Names of the matrices that share a tensor scale, group by group, of `names` as on disk."""
    for group in SHARED_SCALE:
        first = f"{group[0]}.weight"
        for name in names:
            if name.endswith(f".{first}"):
                stem = name.removesuffix(first)
                together = [f"{stem}{part}.weight" for part in group]
                yield [member for member in together if member in names]


def _shared_amax(named: Mapping[str, Tensor], spec: ViewSpec) -> dict[str, Tensor]:
    """Weight name -> largest magnitude over the projections that share its tensor scale."""
    shared: dict[str, Tensor] = {}
    for members in shared_scales(named):
        if spec.quantises(members[0]):
            amaxes = [
                finite_amax(named[member], name=member, convention="nvfp4") for member in members
            ]
            shared.update(dict.fromkeys(members, torch.stack(amaxes).amax()))
    return shared


def _encode_nvfp4(
    weight: Tensor, name: str, spec: ViewSpec, amax: Tensor | None
) -> tuple[Tensor, ...]:
    if weight.shape[-1] % nvfp4.BLOCK:
        raise DataError(
            f"nvfp4: {name} has {weight.shape[-1]} columns; a checkpoint needs a multiple of "
            f"{nvfp4.BLOCK}"
        )
    made = nvfp4.quantize(
        weight,
        amax=amax,
        name=name,
        convention=spec.convention,
        four_over_six=spec.four_over_six,
    )
    tensor_scale = made.tensor_scale_f32
    if spec.convention == "compressed-tensors":
        tensor_scale = tensor_scale.reshape(1)
    return made.packed_uint8, made.block_scale_e4m3, tensor_scale


def _encode_blocks(weight: Tensor, name: str, _: ViewSpec, __: Tensor | None) -> tuple[Tensor, ...]:
    made = fp8.quantize_blocks(weight, name=name)
    return made.data_e4m3, made.scale_inv_f32


def _encode_channels(
    weight: Tensor, name: str, _: ViewSpec, __: Tensor | None
) -> tuple[Tensor, ...]:
    made = fp8.quantize_channels(weight, name=name)
    return made.data_e4m3, made.scale_inv_f32


_ENCODERS: dict[str, Callable[[Tensor, str, ViewSpec, Tensor | None], tuple[Tensor, ...]]] = {
    "blocks": _encode_blocks,
    "channels": _encode_channels,
    "modelopt": _encode_nvfp4,
    "compressed-tensors": _encode_nvfp4,
}


def _decode_channels(parts: list[Tensor], name: str) -> Tensor:
    data, scale = parts
    return fp8.from_parts(data, scale, name=name, block=(1, data.shape[-1])).dequantize()


_DECODERS: dict[str, Callable[[list[Tensor], str], Tensor]] = {
    "blocks": lambda parts, name: fp8.from_parts(*parts, name=name).dequantize(),
    "channels": _decode_channels,
    "modelopt": lambda parts, name: nvfp4.from_parts(*parts, name=name).dequantize(),
    "compressed-tensors": lambda parts, name: nvfp4.from_parts(
        *parts, name=name, convention="compressed-tensors"
    ).dequantize(),
}


def _part(tensors: Mapping[str, Tensor], name: str, *, view: str) -> Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise DataError(f"{view} view: tensor {name} is missing from the checkpoint") from None
