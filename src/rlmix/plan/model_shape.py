"""The sizes of a model that memory and speed follow from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlmix.core.errors import PlanError

BYTES_PER_ELEMENT = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
"""nvfp4: half a byte and one E4M3 scale for each 16 elements. The scales of fp8 blocks (one
float32 for 128 x 128) are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Parameter counts and cache widths of a decoder."""

    name: str
    embedding: int
    """Parameters of the input embedding: held, hardly read."""
    head: int
    """Parameters of the output head, never quantised."""
    linear: int
    """Parameters of quantised layers that every token passes, attention above all."""
    other: int
    """Parameters that every token passes and that are never quantised: norms, routers."""
    expert: int
    """Parameters of one expert in one layer; 0 without experts."""
    expert_layers: int
    experts: int
    experts_per_token: int
    kv_elements: int
    """Elements that one token adds to the KV cache, all layers."""
    attention_flops: int
    """Operations of one new token for each token of its context."""
    state_elements: int = 0
    """Elements of the recurrent state of one request (linear attention), held in BF16."""

    @property
    def params(self) -> int:
        experts = self.expert * self.experts * self.expert_layers
        return self.embedding + self.head + self.linear + self.other + experts

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied by."""
        experts = self.expert * self.experts_per_token * self.expert_layers
        return self.head + self.linear + self.other + experts

    def weight_bytes(self, weights: str) -> float:
        """Size of one copy in a format."""
        quantised = self.linear + self.expert * self.experts * self.expert_layers
        plain = self.embedding + self.head + self.other
        return quantised * BYTES_PER_ELEMENT[weights] + plain * BYTES_PER_ELEMENT["bf16"]

    def request_bytes(self, kv: str, context_tokens: int) -> float:
        """What one running request holds: its KV cache and its recurrent state."""
        cache = self.kv_elements * context_tokens * BYTES_PER_ELEMENT[kv]
        return cache + self.state_elements * BYTES_PER_ELEMENT["bf16"]


def shape_from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    """Sizes from a Hugging Face `config.json` of the Qwen3-MoE kind.

    Raises:
        PlanError: a field is missing, so that sizes would be guesses.
    """
    try:
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        heads, kv_heads = int(config["num_attention_heads"]), int(config["num_key_value_heads"])
        vocab = int(config["vocab_size"])
        experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
        expert_width = int(config["moe_intermediate_size"]) if experts else 0
        width = 0 if experts else int(config["intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"model.path={name}: config.json has no usable {error}; rlmix plans decoders with "
            "hidden_size, num_hidden_layers, attention heads and vocab_size"
        ) from error
    head_dim = int(config.get("head_dim") or hidden // heads)
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embedding = vocab * hidden
    return ModelShape(
        name=name,
        embedding=embedding,
        head=embedding,
        linear=layers * (attention + 3 * hidden * width),
        other=layers * (2 * hidden + 2 * head_dim + hidden * experts) + hidden,
        expert=3 * hidden * expert_width,
        expert_layers=layers if experts else 0,
        experts=experts,
        experts_per_token=int(config.get("num_experts_per_tok") or 0),
        kv_elements=2 * layers * kv_heads * head_dim,
        attention_flops=4 * layers * heads * head_dim,
    )


QWEN36_35B_A3B = ModelShape(
    name="Qwen3.6-35B-A3B",
    embedding=508_559_360,
    head=508_559_360,
    linear=1_409_000_000,
    other=21_000_000,
    expert=3_145_728,
    expert_layers=40,
    experts=256,
    experts_per_token=8,
    kv_elements=10_240,
    attention_flops=163_840,
    state_elements=33_000_000,
)
"""The reference model at scale. Vocabulary 248,320 x 2,048 each way; 30 gated-delta-net and 10
attention layers and a shared expert that every token passes; state of 30 x 32 x 128 x 128
elements and the convolution's, twice because a step reads and writes it."""
