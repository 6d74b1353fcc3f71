"""Two sides of a small random model that agree to the bit: a fault is their only difference."""

import torch

from rlmix.diff.exact_side import exact_side
from rlmix.diff.faults import Ground
from rlmix.diff.program import Side, Text
from rlmix.diff.reference_side import reference_side
from rlmix.numerics.consistent.model import LayerTensors, ModelSpec, ModelTensors

HIDDEN, INNER, VOCAB, LAYERS = 128, 128, 400, 2
HEADS, KV_HEADS, DIM = 4, 2, 32
EXPERTS, TOP_K = 8, 2
THETA = 10000.0


def random_tensors(*, is_moe: bool, seed: int = 0) -> ModelTensors:
    """BF16 numbers; norms far from 1, so that every rounding shows."""
    draws = torch.Generator().manual_seed(seed)

    def matrix(*shape: int, size: float = 0.12) -> torch.Tensor:
        return (torch.randn(shape, generator=draws) * size).bfloat16().float()

    def norm(*shape: int) -> torch.Tensor:
        return (1 + 0.3 * torch.randn(shape, generator=draws)).bfloat16().float()

    experts = (EXPERTS,) if is_moe else ()
    layers = tuple(
        LayerTensors(
            input_norm=norm(HIDDEN),
            qkv=matrix((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            qk_norm=norm(HEADS + KV_HEADS, DIM),
            out=matrix(HIDDEN, HEADS * DIM),
            post_norm=norm(HIDDEN),
            router=matrix(EXPERTS, HIDDEN) if is_moe else None,
            gate_up=matrix(*experts, 2 * INNER, HIDDEN),
            down=matrix(*experts, HIDDEN, INNER),
        )
        for _ in range(LAYERS)
    )
    return ModelTensors(
        embedding=matrix(VOCAB, HIDDEN, size=1.0),
        layers=layers,
        final_norm=norm(HIDDEN),
        head=matrix(VOCAB, HIDDEN),
    )


def random_spec(*, is_moe: bool) -> ModelSpec:
    return ModelSpec(
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        rms_eps=1e-6,
        top_k=TOP_K if is_moe else 0,
        norm_topk_prob=True,
        round_to=torch.bfloat16,
    )


def ground(*, is_moe: bool, seed: int = 0, temperature: float = 1.0) -> Ground:
    tensors, spec = random_tensors(is_moe=is_moe, seed=seed), random_spec(is_moe=is_moe)
    side = exact_side(tensors, spec, name="pool", theta=THETA, temperature=temperature)
    return Ground(side=side, tensors=tensors, spec=spec, theta=THETA, temperature=temperature)


def sides(found: Ground) -> tuple[Side, Side]:
    """(trainer, float64)."""
    trainer = exact_side(
        found.tensors, found.spec, name="trainer", theta=found.theta, temperature=found.temperature
    )
    reference = reference_side(
        found.tensors, found.spec, like=trainer, theta=found.theta, temperature=found.temperature
    )
    return trainer, reference


def text(*, tokens: int = 200, seed: int = 0) -> Text:
    draws = torch.Generator().manual_seed(seed)
    return Text.of(torch.randint(0, VOCAB, (tokens,), generator=draws))
