"""Where the memory of one trainer rank goes, and how long a token takes. Computed, never measured.

Widths are counted by hand from what the forward pass keeps for the backward one, in elements a
token. What is held all the time and the most that is held for a moment are told apart, because the
first is divided by ranks and the second is not. `scripts/check_trainer_memory.py` compares the sum
with measured peaks of small models.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass

from rlmix.plan.model_facts import ModelFacts

MOMENT_BYTES = {"adamw": 8, "sgd": 0}
"""Of a parameter: two float32 moments."""
BLOCK_BYTES = 2 * 4 * 512 * 2048
"""Two blocks of scores, `algos.chunked_head`."""
FLOPS_REACHED_FRAC = 0.4
"""Share of the peak matrix rate that training reaches."""
MOVING_FRAC = 0.5
"""Gradients of activations on their way through a layer, as a share of what it keeps."""
MIXER_COPIES = 2.5
NORM_COPIES = 8
"""Two norms: input and output, and the input in float32, each in BF16 elements."""
GATHERED_LAYERS = 2
"""FSDP2 holds the layer that computes and the one that it fetches ahead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Bytes of one rank at its peak, in the backward pass of one micro-batch."""

    weights_bytes: float
    """BF16 copies that are computed with: the whole model on one rank; on several what lies outside
    the layers, and two layers."""
    master_bytes: float
    gradient_bytes: float
    """Float32 sums, and the BF16 gradients that are on the way into them."""
    optimizer_bytes: float
    kept_bytes: float
    """Activations kept for the backward pass: the inputs of layers, or all of them."""
    layer_bytes: float
    """Of one layer while it is computed again or backward."""
    loss_bytes: float
    """Hidden states of the policy's tokens and their gradient, the head's gradient, blocks."""

    @property
    def total_bytes(self) -> float:
        return sum(asdict(self).values())

    @property
    def state_bytes(self) -> float:
        """What does not depend on tokens."""
        return self.weights_bytes + self.master_bytes + self.gradient_bytes + self.optimizer_bytes

    def parts(self) -> dict[str, float]:
        return {name.removesuffix("_bytes"): size for name, size in asdict(self).items()}


def trainer_memory(
    facts: ModelFacts,
    *,
    tokens: int,
    policy_tokens: int,
    ranks: int,
    optimizer: str,
    recomputes: bool,
    offloads: bool,
) -> TrainerMemory:
    """The peak of one rank.

    Args:
        tokens: of one micro-batch.
        policy_tokens: of these, the ones that the policy sampled.
        recomputes: keep only the inputs of layers.
        offloads: masters, gradients and moments lie in main memory.
    """
    params = float(facts.params)
    outside = float(facts.embedding + facts.head)
    layer = (params - outside) / facts.layers
    held = 0.0 if offloads else 1.0 / ranks
    if ranks == 1:
        weights = 2.0 * params
        passing = 2.0 * max(outside / 2, layer / 4)
    else:
        weights = 2.0 * (outside + GATHERED_LAYERS * layer)
        passing = (2.0 + 4.0) * (outside + layer)
    saved = saved_width(facts)
    layers_kept = facts.layers - 1 if not recomputes else 0
    return TrainerMemory(
        weights_bytes=weights,
        master_bytes=4.0 * params * held,
        gradient_bytes=4.0 * params * held + passing,
        optimizer_bytes=MOMENT_BYTES[optimizer] * params * held,
        kept_bytes=2.0 * tokens * (facts.hidden * facts.layers + saved * layers_kept),
        layer_bytes=2.0 * tokens * saved * (1.0 + MOVING_FRAC),
        loss_bytes=8.0 * policy_tokens * facts.hidden + 6.0 * facts.head + BLOCK_BYTES,
    )


def saved_width(facts: ModelFacts) -> float:
    """BF16 elements a token that the largest kind of layer keeps for its own backward pass."""
    hidden = facts.hidden
    linear_layers = facts.layers - facts.attention_layers
    # Outputs of the projections, the same after convolution or norm and rotation, and what comes
    # out of attention, before and after its gate.
    mixers = [
        MIXER_COPIES * part / (hidden * count)
        for part, count in (
            (facts.attention, facts.attention_layers),
            (facts.linear_attention, linear_layers),
        )
        if count
    ]
    # Gate, up, activation and product, of the MLP and of experts that every token passes.
    inner = (facts.mlp + facts.shared_expert) / (3 * hidden * facts.layers)
    # For each expert a copy of the input, its output, the weighted output, and the same four.
    routed = facts.experts_per_token * (3 * hidden + 4 * facts.expert_width)
    return NORM_COPIES * hidden + max(mixers, default=0.0) + 4 * inner + routed * facts.is_moe


def most_that_fit(memory: Callable[[int], TrainerMemory], room_bytes: float) -> int:
    """The most tokens of a micro-batch that a rank of `room_bytes` holds; 0 for none. Memory grows
    with tokens on a straight line."""
    none, many = memory(0).total_bytes, memory(1 << 20).total_bytes
    return max(int((room_bytes - none) / ((many - none) / (1 << 20))), 0)


def trained_tokens_per_s(
    facts: ModelFacts, *, tflops: float, session_tokens: int, recomputes: bool
) -> float:
    """Tokens a second through forward and backward.

    Args:
        tflops: BF16 peak of all ranks together.
        session_tokens: a token's context is half of that on average.
    """
    # Forward once, backward twice as much, and the forward again where it is recomputed.
    passes = 4.0 if recomputes else 3.0
    flops = 2.0 * facts.active_params + facts.attention_flops * session_tokens / 2
    return FLOPS_REACHED_FRAC * tflops * 1e12 / (passes * flops)
