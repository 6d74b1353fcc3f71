"""Loads a view folder into the layout that the forward multiplies with.

Invariant: loading never touches the weights in use. A folder that is incomplete, damaged or of
another format raises, and the old weights go on serving.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from rlmix.core.errors import ConfigError, DataError, WeightSyncError
from rlmix.engine.embedded.exact_weights import exact_tensors
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import ModelShape, read_shape
from rlmix.numerics import fp8, views
from rlmix.numerics.consistent.model import ModelTensors
from rlmix.numerics.view_config import spec_of_config
from rlmix.numerics.view_spec import ViewSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """One decoder layer, float32, each matrix [inputs, outputs] as the forward multiplies it.
    H hidden, D head_dim, E experts, I inner size."""

    attention_is_quantised: bool
    """Whether the view quantises `qkv` and `out`, so that their inputs may be quantised too."""
    mlp_is_quantised: bool
    scale_group: int | None
    """Elements of an input row that share an FP8 scale; None: the whole row, as goes with weights
    of one scale per channel."""
    input_norm: Tensor
    """[H], times sqrt(H); likewise every other norm."""
    qkv: Tensor
    """[H, (heads + 2 * kv_heads) * D]; within a query or key head, channel i sits beside channel
    i + D/2, so that rotary embedding is one complex multiplication."""
    qk_norm: Tensor
    """[heads + kv_heads, D]."""
    out: Tensor
    """[heads * D, H]."""
    post_norm: Tensor
    router: Tensor | None
    """[H, E]; None in a dense layer."""
    gate_up: Tensor
    """[E, H, 2 * I], an expert's gates before its ups; E = 1 in a dense layer."""
    down: Tensor
    """[E, I, H]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """A model ready to serve, and the checkpoint that it was made of."""

    checksum: str
    """xxh3-128 of the tensors as they were on disk; equal for equal checkpoints."""
    num_bytes: int
    """Of the checkpoint."""
    spec: ViewSpec
    raw: Mapping[str, Tensor]
    """The tensors as they were on disk, by name: what a push replaces some of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeWeights(ModelWeights):
    """In the layout of `Forward`."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Tensor
    """[H, V]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactWeights(ModelWeights):
    """In that of `ExactForward`."""

    tensors: ModelTensors


def read_config(folder: Path) -> dict[str, object]:
    """config.json of a model folder.

    Raises:
        WeightSyncError: no such folder or file, or not JSON.
    """
    try:
        return dict(json.loads((folder / "config.json").read_bytes()))
    except OSError as error:
        raise WeightSyncError(f"weights: {folder} has no readable config.json: {error}") from error
    except ValueError as error:
        raise WeightSyncError(f"weights: {folder}/config.json is not JSON: {error}") from error


def load_weights(
    folder: Path, *, shape: ModelShape, profile: Profile, served: ViewSpec | None = None
) -> ModelWeights:
    """Weights of a view folder.

    Args:
        served: the view that the engine serves already and has told others of; None: any of the
            profile's format.
    Raises:
        WeightSyncError: the folder is another model or another view than the engine serves, or a
            tensor is missing or damaged.
    """
    config = read_config(folder)
    try:
        spec = spec_of_config(config)
        if spec.view != profile.weights:
            raise WeightSyncError(
                f"weights: {folder} is the {spec.view} view; this replica serves {profile.weights}"
            )
        if served is not None and spec != served:
            raise WeightSyncError(
                f"weights: {folder} is the {spec} view; this replica serves {served}"
            )
        if read_shape(config) != shape:
            raise WeightSyncError(f"weights: {folder} is a model of another shape")
        raw = _read_tensors(folder)
        return _build(raw, spec=spec, shape=shape, profile=profile)
    except (DataError, ConfigError, KeyError) as error:
        raise WeightSyncError(f"weights: {folder}: {error}") from error


def replace_tensors(
    weights: ModelWeights, pushed: Mapping[str, Tensor], *, shape: ModelShape, profile: Profile
) -> ModelWeights:
    """The weights with some tensors changed, which came by name in the view's own format. Float
    tensors of another float type than the checkpoint's are cast to it, as SGLang does.

    Raises:
        WeightSyncError: a name that the checkpoint does not have, another shape, NaN or Inf.
    """
    raw = dict(weights.raw)
    for name, tensor in pushed.items():
        old = raw.get(name)
        if old is None:
            raise WeightSyncError(f"weights: tensor {name} was pushed; the model has none so named")
        if old.shape != tensor.shape:
            raise WeightSyncError(
                f"weights: {name} was pushed with shape {tuple(tensor.shape)}, expected "
                f"{tuple(old.shape)}"
            )
        if old.dtype == torch.bfloat16 and tensor.is_floating_point():
            tensor = tensor.to(old.dtype)
        if old.dtype != tensor.dtype:
            raise WeightSyncError(
                f"weights: {name} was pushed as {tensor.dtype}; the {weights.spec} view holds "
                f"{old.dtype}"
            )
        raw[name] = tensor
    try:
        return _build(raw, spec=weights.spec, shape=shape, profile=profile)
    except (DataError, KeyError) as error:
        raise WeightSyncError(f"weights: pushed tensors: {error}") from error


def _build(
    raw: dict[str, Tensor], *, spec: ViewSpec, shape: ModelShape, profile: Profile
) -> ModelWeights:
    stored = _with_bf16_scales(raw) if profile.is_marlin else raw
    state = dict(views.split_experts(views.decode_view(stored, spec)))
    if profile.is_exact:
        tensors = exact_tensors(state, shape=shape, profile=profile)
        return ExactWeights(tensors=tensors, **_facts(raw, spec))
    if spec.convention == "blocks":
        _requantise(state, spec, profile)
        if profile.is_marlin:  # It multiplies a block's scale with its weights, in BF16.
            for name in filter(spec.quantises, list(state)):
                state[name] = state[name].bfloat16().float()
    return _assemble(state, raw, spec=spec, shape=shape, profile=profile)


def _with_bf16_scales(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As Marlin holds quantised weights: it rounds the float32 scale of an NVFP4 tensor and those
    of FP8 blocks and channels to BF16 when it loads them.

    Source: SGLang 0.5.23, `marlin_utils_fp4` and `marlin_utils_fp8`.
    """
    stored = dict(raw)
    for name, tensor in raw.items():
        if name.endswith("_global_scale"):  # The inverse of what Marlin multiplies by.
            stored[name] = 1 / (1 / tensor).bfloat16().float()
        elif name.endswith(("_scale", "_scale_2", "_scale_inv")) and tensor.dtype == torch.float32:
            stored[name] = tensor.bfloat16().float()
    return stored


def _requantise(state: dict[str, Tensor], spec: ViewSpec, profile: Profile) -> None:
    """Give FP8 weights power-of-two scales where the engine's kernels take no others."""
    for name in filter(spec.quantises, list(state)):
        is_expert = ".mlp.experts." in name
        scales = profile.expert_fp8_scales if is_expert else profile.fp8_scales
        if scales == "ue8m0":
            blocks = fp8.quantize_blocks(state[name].bfloat16(), scales=scales, name=name)
            state[name] = blocks.dequantize()


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise WeightSyncError(f"weights: {folder} has no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightSyncError(f"weights: {file} cannot be read: {error}") from error
    return tensors


def _assemble(
    state: dict[str, Tensor],
    raw: dict[str, Tensor],
    *,
    spec: ViewSpec,
    shape: ModelShape,
    profile: Profile,
) -> NativeWeights:
    reader = _Reader(state, profile)
    embedding = reader.get("model.embed_tokens.weight", (shape.vocab_size, shape.hidden), "H")
    head = embedding
    if not shape.tie_embeddings:
        head = reader.get("lm_head.weight", (shape.vocab_size, shape.hidden), "H")
    return NativeWeights(
        embedding=embedding,
        layers=tuple(_layer(reader, index, shape, spec) for index in range(shape.num_layers)),
        final_norm=_norm(reader, "model.norm.weight", shape.hidden),
        head=head.t(),
        **_facts(raw, spec),
    )


def _facts(raw: dict[str, Tensor], spec: ViewSpec) -> dict[str, Any]:
    """What all served weights say of their checkpoint."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in raw.values())
    return {"checksum": _checksum(raw), "num_bytes": num_bytes, "spec": spec, "raw": raw}


class _Reader:
    """Takes tensors out of a state dict with their channels in the profile's order."""

    def __init__(self, state: dict[str, Tensor], profile: Profile) -> None:
        self._state = state
        self._profile = profile
        self._orders: dict[int, Tensor | None] = {}

    def get(self, name: str, expected: tuple[int, ...] | None, axes: str) -> Tensor:
        """The tensor, its last axes reordered: `H` for hidden or inner channels, `.` as it is."""
        try:
            tensor = self._state[name]
        except KeyError:
            raise WeightSyncError(f"weights: tensor {name} is missing") from None
        if expected is not None and tuple(tensor.shape) != expected:
            raise WeightSyncError(
                f"weights: {name} has shape {tuple(tensor.shape)}, expected {expected}"
            )
        if not torch.isfinite(tensor).all():
            raise WeightSyncError(f"weights: {name} holds NaN or Inf")
        for back, axis in enumerate(reversed(axes)):
            dim = tensor.ndim - 1 - back
            order = self._order(tensor.shape[dim]) if axis == "H" else None
            if order is not None:
                tensor = tensor.index_select(dim, order)
        return tensor

    def _order(self, num_channels: int) -> Tensor | None:
        if num_channels not in self._orders:
            self._orders[num_channels] = self._profile.channel_order(num_channels)
        return self._orders[num_channels]


def _norm(reader: _Reader, name: str, size: int) -> Tensor:
    """A norm's weight times sqrt(size): the forward divides by the length, not by the RMS."""
    return reader.get(name, (size,), "H") * size**0.5


def _layer(reader: _Reader, index: int, shape: ModelShape, spec: ViewSpec) -> LayerWeights:
    prefix = f"model.layers.{index}."
    attention = prefix + "self_attn."
    hidden, head_dim = shape.hidden, shape.head_dim
    pairs = torch.arange(head_dim).view(2, -1).t().reshape(-1)

    def projection(part: str, num_heads: int, *, is_rotated: bool) -> Tensor:
        name = f"{attention}{part}_proj.weight"
        weight = reader.get(name, (num_heads * head_dim, hidden), ".H")
        if is_rotated:
            weight = weight.view(num_heads, head_dim, hidden)[:, pairs].reshape(-1, hidden)
        return weight

    norms = [
        reader.get(f"{attention}{part}_norm.weight", (head_dim,), ".")[pairs].expand(heads, -1)
        for part, heads in (("q", shape.num_heads), ("k", shape.num_kv_heads))
    ]
    out = reader.get(f"{attention}o_proj.weight", (hidden, shape.num_heads * head_dim), "H.")
    router, gate_up, down = _mlp(reader, index, shape)
    in_mlp = "mlp.experts.0." if router is not None else "mlp."
    return LayerWeights(
        attention_is_quantised=spec.quantises(f"{attention}q_proj.weight"),
        mlp_is_quantised=spec.quantises(f"{prefix}{in_mlp}down_proj.weight"),
        scale_group=None if spec.convention == "channels" else fp8.GROUP,
        input_norm=_norm(reader, prefix + "input_layernorm.weight", hidden),
        qkv=torch.cat(
            (
                projection("q", shape.num_heads, is_rotated=True),
                projection("k", shape.num_kv_heads, is_rotated=True),
                projection("v", shape.num_kv_heads, is_rotated=False),
            )
        ).t(),
        qk_norm=torch.cat(norms).mul_(head_dim**0.5),
        out=out.t().contiguous(),
        post_norm=_norm(reader, prefix + "post_attention_layernorm.weight", hidden),
        router=None if router is None else router.t(),
        gate_up=gate_up,
        down=down,
    )


def _mlp(reader: _Reader, index: int, shape: ModelShape) -> tuple[Tensor | None, Tensor, Tensor]:
    prefix = f"model.layers.{index}.mlp."
    router = None
    stems = [prefix]
    if index in shape.moe_layers:
        router = reader.get(prefix + "gate.weight", (shape.num_experts, shape.hidden), ".H")
        stems = [f"{prefix}experts.{expert}." for expert in range(shape.num_experts)]
    gates = [reader.get(stem + "gate_proj.weight", None, "HH") for stem in stems]
    inner = gates[0].shape[0]
    ups = [reader.get(stem + "up_proj.weight", (inner, shape.hidden), "HH") for stem in stems]
    downs = [reader.get(stem + "down_proj.weight", (shape.hidden, inner), "HH") for stem in stems]
    gate_up = [torch.cat(pair).t() for pair in zip(gates, ups, strict=True)]
    return router, torch.stack(gate_up), torch.stack([down.t() for down in downs])


def _checksum(tensors: dict[str, Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
