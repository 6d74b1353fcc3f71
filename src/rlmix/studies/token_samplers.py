"""Which fleets sample in the token study, and the weights that each of their pools holds.

Formats come from `rlmix.numerics`, bit for bit those of a real run's views; every matrix of the
policy is in the pool's format (a real view leaves embeddings and head alone, but here they are
half of the model). INT3 is no format of a sampler: it is there because its error is of the size
that decides the question, and is labelled so wherever it appears.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.numerics import fp8, nvfp4
from rlmix.studies.token_policy import EXACT, Kernel, Weights

INT3_MAX = 3
"""Largest code of a signed 3-bit integer without its lowest, which has no mirror image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolKind:
    name: str
    weights: str
    """A key of `FORMATS`."""
    kernel: Kernel


def _int3(weight: Tensor) -> Tensor:
    """Each row rounded to seven levels between plus and minus its largest magnitude."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / INT3_MAX).clamp(min=1e-12)
    return (weight / scale).round() * scale


FORMATS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "fp32": lambda weight: weight.clone(),
    "bf16": lambda weight: weight.bfloat16().float(),
    "fp8": lambda weight: fp8.quantize_blocks(weight).dequantize().float(),
    "nvfp4": lambda weight: nvfp4.quantize(weight).dequantize().float(),
    "int3": _int3,
}


def _kernel(tile: int, *, activations: str = "bf16", kv: str = "bf16") -> Kernel:
    return Kernel(rounds_to_bf16=True, tile=tile, activations=activations, kv=kv)


FLEETS: Mapping[str, tuple[PoolKind, ...]] = {
    "exact": (PoolKind(name="exact", weights="fp32", kernel=EXACT),),
    "bf16": (PoolKind(name="bf16", weights="bf16", kernel=_kernel(32)),),
    "nvfp4": (PoolKind(name="nvfp4", weights="nvfp4", kernel=_kernel(32, kv="fp8")),),
    "mixed": (
        PoolKind(name="b300", weights="nvfp4", kernel=_kernel(64, kv="fp8")),
        PoolKind(name="b200", weights="nvfp4", kernel=_kernel(32, kv="fp8")),
        PoolKind(name="h200", weights="fp8", kernel=_kernel(32, activations="fp8", kv="fp8")),
        PoolKind(name="h100", weights="fp8", kernel=_kernel(16, activations="fp8", kv="fp8")),
        PoolKind(name="a100", weights="bf16", kernel=_kernel(16)),
        PoolKind(name="rtx_pro_6000", weights="bf16", kernel=_kernel(8)),
    ),
    "int3": (PoolKind(name="int3", weights="int3", kernel=_kernel(32)),),
}
"""Fleet to its pools; sessions are spread evenly over the pools of a fleet."""


def pool_weights(weights: Weights, kind: PoolKind) -> dict[str, Tensor]:
    """What a pool of this kind holds of the trainer's weights."""
    encode = FORMATS[kind.weights]
    with torch.no_grad():
        return {name: encode(weight.detach()) for name, weight in weights.items()}
