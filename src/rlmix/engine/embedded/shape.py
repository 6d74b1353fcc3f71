"""What the forward needs to know of a checkpoint's config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlmix.core.errors import ConfigError

MODEL_TYPES = ("qwen3_moe", "qwen3")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """Sizes of a Qwen3 or Qwen3-MoE model."""

    vocab_size: int
    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    """0 in a dense model."""
    top_k: int
    """Experts per token."""
    norm_topk_prob: bool
    moe_layers: frozenset[int]
    """Layers with experts; the others have one dense MLP."""
    rms_eps: float
    rope_theta: float
    tie_embeddings: bool
    context_length: int
    eos_ids: tuple[int, ...]

    @property
    def num_query_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape in a config.json.

    Raises:
        ConfigError: another architecture, or a variant that the forward does not compute.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ConfigError(
            f"embedded engine: model_type={model_type!r}; it computes {', '.join(MODEL_TYPES)}. "
            "Use engine=sglang for other models"
        )
    _check_variant(config)
    heads = int(config["num_attention_heads"])
    layers = int(config["num_hidden_layers"])
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if model_type == "qwen3":
        experts = 0
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    eos = config.get("eos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
    return ModelShape(
        vocab_size=int(config["vocab_size"]),
        hidden=int(config["hidden_size"]),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        num_experts=experts,
        top_k=int(config.get("num_experts_per_tok") or 0),
        norm_topk_prob=bool(config.get("norm_topk_prob", False)),
        moe_layers=_moe_layers(config, num_layers=layers) if experts else frozenset(),
        rms_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(theta),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        context_length=int(config["max_position_embeddings"]),
        eos_ids=eos_ids,
    )


def _moe_layers(config: Mapping[str, Any], *, num_layers: int) -> frozenset[int]:
    dense = set(config.get("mlp_only_layers") or ())
    every = int(config.get("decoder_sparse_step") or 1)
    return frozenset(
        layer for layer in range(num_layers) if layer not in dense and (layer + 1) % every == 0
    )


def _check_variant(config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    refused = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "attention_bias": bool(config.get("attention_bias")),
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "rope_type": kind != "default",
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0) != 1.0,
    }
    found = [name for name, is_refused in refused.items() if is_refused]
    if found:
        raise ConfigError(
            f"embedded engine: config.json sets {', '.join(found)} to a variant that it does not "
            "compute (silu, no bias, full attention, default rope only)"
        )
