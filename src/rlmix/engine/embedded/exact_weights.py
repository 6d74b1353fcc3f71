"""A view folder's tensors as the consistent operators take them: as in the checkpoint, no channel
reordered, no norm scaled, so that the engine multiplies what the trainer multiplies."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlmix.core.errors import WeightSyncError
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.shape import ModelShape
from rlmix.numerics.consistent.model import LayerTensors, ModelSpec, ModelTensors, tensors_of


def spec_of(shape: ModelShape, profile: Profile) -> ModelSpec:
    """The whole model's sizes, and what exact mode rounds activations to."""
    return ModelSpec(
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_eps=shape.rms_eps,
        top_k=shape.top_k if shape.num_experts else 0,
        norm_topk_prob=shape.norm_topk_prob,
        round_to=torch.bfloat16 if profile.rounds_to_bf16 else None,
    )


def exact_tensors(
    state: Mapping[str, Tensor], *, shape: ModelShape, profile: Profile
) -> ModelTensors:
    """float32 tensors of a checkpoint.

    Args:
        state: by Hugging Face name, experts one by one.
    Raises:
        WeightSyncError: a tensor is missing, has another shape, or holds NaN or Inf.
    """
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise WeightSyncError(f"weights: {name} holds NaN or Inf")
    spec = spec_of(shape, profile)
    try:
        tensors = tensors_of(state, spec)
    except KeyError as error:
        raise WeightSyncError(f"weights: tensor {error.args[0]} is missing") from error
    except RuntimeError as error:  # Parts that cannot be put together.
        raise WeightSyncError(f"weights: tensors of other shapes than expected: {error}") from error
    vocabulary = (shape.vocab_size, shape.hidden)
    _check("embedding", tensors.embedding, vocabulary)
    _check("head", tensors.head, vocabulary)
    for index, layer in enumerate(tensors.layers):
        _check_layer(index, layer, shape)
    return tensors


def _check_layer(index: int, layer: LayerTensors, shape: ModelShape) -> None:
    heads = shape.num_heads + 2 * shape.num_kv_heads
    inner = layer.down.shape[-1]
    experts = (shape.num_experts,) if index in shape.moe_layers else ()
    expected = {
        "qkv": (layer.qkv, (heads * shape.head_dim, shape.hidden)),
        "out": (layer.out, (shape.hidden, shape.num_heads * shape.head_dim)),
        "gate_up": (layer.gate_up, (*experts, 2 * inner, shape.hidden)),
        "down": (layer.down, (*experts, shape.hidden, inner)),
    }
    for part, (tensor, size) in expected.items():
        _check(f"{part} of layer {index}", tensor, size)


def _check(what: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise WeightSyncError(
            f"weights: {what} has shape {tuple(tensor.shape)}, expected {expected}"
        )
