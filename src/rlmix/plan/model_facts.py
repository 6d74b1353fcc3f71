"""The sizes of a model that memory, speed and tensor-parallel limits follow from.

Read from a Hugging Face `config.json`, never from weights. Invariant: the counts of a class that
Transformers has are those of the class itself; tests build such models on the meta device.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from rlmix.core.errors import PlanError
from rlmix.numerics.view_spec import parse_view

ELEMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
FP8_BLOCK = 128
FP8_BYTES = 1.0 + 4.0 / FP8_BLOCK**2
"""One byte an element, and a float32 scale for each block of 128 x 128."""
NVFP4_BYTES = 0.5 + 1.0 / 16
"""Half a byte, and an E4M3 scale for each 16 elements."""
VIEW_BYTES = {"bf16": 2.0, "fp8": FP8_BYTES, "nvfp4": NVFP4_BYTES}
"""View -> bytes of an element that it quantises."""

REFERENCE = "Qwen/Qwen3.6-35B-A3B"
"""The model that accelerators are compared with."""
BUNDLED = {REFERENCE: "qwen36_35b_a3b.json", "Qwen/Qwen3.5-35B-A3B": "qwen36_35b_a3b.json"}
"""Model id -> sizes that ship with rlmix, so that a plan needs no network and no files."""

SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "vocab_size", "max_position_embeddings", "full_attention_interval",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_conv_kernel_dim", "moe_intermediate_size",
    "num_experts_per_tok", "depth", "patch_size", "temporal_patch_size", "spatial_merge_size",
    "num_position_embeddings", "out_hidden_size", "in_channels",
)  # fmt: skip
"""Fields of `config.json` that are whole numbers of 1 or more where they are given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Parameters by part, and the widths of caches."""

    name: str
    embedding: int
    """Input embedding: held, hardly read. 0 where it is tied to the head."""
    head: int
    """Output head, never quantised."""
    attention: int
    """Projections of the full-attention layers."""
    linear_attention: int
    """Large projections of the gated-delta-net layers."""
    mlp: int
    """MLPs of layers without experts."""
    shared_expert: int
    """Experts that every token passes."""
    other: int
    """What every token passes and nothing quantises: norms, routers, convolutions, gates."""
    expert: int
    """One expert in one layer; 0 without experts."""
    expert_layers: int
    experts: int
    experts_per_token: int
    expert_width: int
    """Intermediate size of one expert; 0 without experts."""
    vision: int
    """Vision tower: held by engines that load the whole checkpoint, not read for text."""
    mtp: int
    """Multi-token-prediction layers of the checkpoint; engines load them only to speculate."""
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    attention_layers: int
    kv_elements: int
    """Elements that one token adds to the KV cache, all attention layers."""
    attention_flops: int
    """Operations of one new token for each token of its context."""
    state_elements: int
    """Recurrent state of one request, all gated-delta-net layers."""
    conv_elements: int
    """Convolution state of one request, held in BF16."""
    linear_heads: int
    """Key heads of linear attention, which tensor parallelism splits; 0 without."""
    max_context_tokens: int | None

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @property
    def is_hybrid(self) -> bool:
        return self.state_elements > 0

    @property
    def routed(self) -> int:
        """Parameters of all routed experts."""
        return self.expert * self.experts * self.expert_layers

    @property
    def dense_linears(self) -> int:
        """Matrices that every token passes and that a view may quantise."""
        return self.attention + self.linear_attention + self.mlp + self.shared_expert

    @property
    def params(self) -> int:
        """Parameters of the text model."""
        return self.embedding + self.head + self.dense_linears + self.other + self.routed

    @property
    def active_params(self) -> int:
        """Parameters that one token is multiplied by."""
        experts = self.expert * self.experts_per_token * self.expert_layers
        return self.head + self.dense_linears + self.other + experts

    @property
    def checkpoint_params(self) -> int:
        """Parameters in the published files."""
        return self.params + self.vision + self.mtp

    def dense_bytes(self, view: str) -> float:
        """Bytes that a token reads besides experts and embedding."""
        plain = (self.head + self.other) * 2.0
        spec = parse_view(view)
        width = 2.0 if spec.scope == "experts" else VIEW_BYTES[spec.view]
        return plain + self.dense_linears * width

    def expert_bytes(self, view: str) -> float:
        """Bytes of one expert in one layer."""
        return self.expert * VIEW_BYTES[parse_view(view).view]

    def weight_bytes(self, view: str) -> float:
        """Size of one copy in a weight view, the vision tower in BF16 included.

        Args:
            view: as `numerics.view_spec` reads it: `bf16`, `fp8`, `nvfp4` (every large matrix),
                `nvfp4:experts` (those of routed experts).
        """
        held = (self.embedding + self.vision) * 2.0
        experts = self.expert_bytes(view) * self.experts * self.expert_layers
        return held + self.dense_bytes(view) + experts

    def kv_bytes_per_token(self, kv: str) -> float:
        return self.kv_elements * ELEMENT_BYTES[kv]

    def state_bytes(self, state: str) -> float:
        """One slot of recurrent state with its convolution's; 0 without linear attention."""
        if not self.is_hybrid:
            return 0.0
        return self.state_elements * ELEMENT_BYTES[state] + self.conv_elements * 2.0

    def tp_sizes(self, view: str) -> list[int]:
        """Tensor-parallel sizes that split the model evenly, 1 to 16.

        Heads divide, or KV heads are copied; blocks of FP8 stay whole in every expert's slice.
        """
        sizes = []
        for tp in (1, 2, 4, 8, 16):
            heads = self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0)
            linear = self.linear_heads % tp == 0
            if heads and linear and (view != "fp8" or self.fp8_blocks_divide(tp)):
                sizes.append(tp)
        return sizes

    def fp8_blocks_divide(self, tp: int) -> bool:
        width = self.expert_width
        return width % (tp * FP8_BLOCK) == 0 or (tp == 1 and width == 0) or not self.is_moe


def facts_from_file(name: str, path: Path) -> ModelFacts:
    """Sizes from a `config.json` on disk.

    Raises:
        PlanError: the file is no JSON object, or `facts_from_config` refuses it.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(
            f"model.path={name}: {path} cannot be read as JSON ({error}); copy it from the model "
            "again"
        ) from error
    if not isinstance(config, dict):
        raise PlanError(
            f"model.path={name}: {path} holds a {type(config).__name__}; a config.json is an "
            "object with the sizes of the model"
        )
    return facts_from_config(name, config)


def facts_from_config(name: str, config: Mapping[str, Any]) -> ModelFacts:
    """Sizes from a `config.json`: dense, MoE, or hybrid with gated-delta-net layers, at the top
    or nested in `text_config`.

    Raises:
        PlanError: a field is missing, or the model is of a kind whose sizes would be guesses.
    """
    text: Mapping[str, Any] = config.get("text_config") or config
    faults = [*_size_faults(text), *_size_faults(config.get("vision_config") or {})]
    if faults:
        raise PlanError(
            f"model.path={name}: config.json has {', '.join(faults)}; sizes are whole numbers of 1 "
            "or more"
        )
    if text.get("kv_lora_rank"):
        raise PlanError(
            f"model.path={name}: config.json describes multi-head latent attention (kv_lora_rank); "
            "rlmix plans models with ordinary, grouped or gated attention"
        )
    try:
        return _facts(name, config, text)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"model.path={name}: config.json has no usable {error}; rlmix plans decoders with "
            "hidden_size, num_hidden_layers, attention heads and vocab_size"
        ) from error


def _size_faults(part: Any) -> list[str]:
    """`hidden_size='abc'`, for every field of `SIZES` that is there and no size."""
    if not isinstance(part, Mapping):
        return [f"a {type(part).__name__} in place of an object"]
    given = {field: part[field] for field in SIZES if part.get(field) is not None}
    return [
        f"{field}={value!r}"
        for field, value in given.items()
        if isinstance(value, bool) or not isinstance(value, int) or value < 1
    ]


def _facts(name: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> ModelFacts:
    hidden, layers = int(text["hidden_size"]), int(text["num_hidden_layers"])
    heads, kv_heads = int(text["num_attention_heads"]), int(text["num_key_value_heads"])
    head_dim = int(text.get("head_dim") or hidden // heads)
    kinds = _layer_kinds(text, layers)
    num_full, num_linear = kinds.count("full_attention"), kinds.count("linear_attention")
    if num_full + num_linear != layers:
        strange = sorted(set(kinds) - {"full_attention", "linear_attention"})
        raise ValueError(f"layer_types (got {', '.join(strange)})")
    attention, attention_other = _attention(text, hidden, heads, kv_heads, head_dim)
    linear = _LinearAttention.read(text, hidden) if num_linear else _LinearAttention()
    moe = _Experts.read(text, hidden, layers)
    mlp = 3 * hidden * int(text["intermediate_size"]) if moe.layers < layers else 0
    vocab = int(text["vocab_size"])
    is_tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False)))
    other = num_full * attention_other + num_linear * linear.other
    other += layers * 2 * hidden + hidden + moe.layers * moe.router
    return ModelFacts(
        name=name,
        embedding=0 if is_tied else vocab * hidden,
        head=vocab * hidden,
        attention=num_full * attention,
        linear_attention=num_linear * linear.projections,
        mlp=(layers - moe.layers) * mlp,
        shared_expert=moe.layers * moe.shared,
        other=other,
        expert=moe.expert,
        expert_layers=moe.layers,
        experts=moe.count,
        experts_per_token=moe.per_token,
        expert_width=moe.width,
        vision=_vision(config.get("vision_config")),
        mtp=_mtp(text, hidden, attention + attention_other, moe, mlp),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        attention_layers=num_full,
        kv_elements=2 * num_full * kv_heads * head_dim,
        attention_flops=4 * num_full * heads * head_dim,
        state_elements=num_linear * linear.state,
        conv_elements=num_linear * linear.conv_state,
        linear_heads=linear.heads,
        max_context_tokens=text.get("max_position_embeddings"),
    )


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    if kinds := text.get("layer_types"):
        # A sliding window bounds the cache but not the parameters; planned as full attention.
        return ["full_attention" if k == "sliding_attention" else str(k) for k in kinds]
    interval = text.get("full_attention_interval")
    if interval and text.get("linear_num_value_heads"):
        return [
            "linear_attention" if (index + 1) % int(interval) else "full_attention"
            for index in range(layers)
        ]
    return ["full_attention"] * layers


def _attention(
    text: Mapping[str, Any], hidden: int, heads: int, kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Projections of one layer, and its norms and biases."""
    kind = str(text.get("model_type", ""))
    is_gated = bool(text.get("attn_output_gate", kind.startswith(("qwen3_next", "qwen3_5"))))
    queries = heads * (2 if is_gated else 1)
    projections = hidden * head_dim * (queries + heads + 2 * kv_heads)
    other = 2 * head_dim if kind.startswith("qwen3") else 0
    if text.get("attention_bias", kind.startswith("qwen2")):
        other += head_dim * (queries + 2 * kv_heads) + (0 if kind.startswith("qwen2") else hidden)
    return projections, other


@dataclass(frozen=True, slots=True)
class _LinearAttention:
    """One gated-delta-net layer."""

    heads: int = 0
    projections: int = 0
    other: int = 0
    state: int = 0
    conv_state: int = 0

    @staticmethod
    def read(text: Mapping[str, Any], hidden: int) -> "_LinearAttention":
        key_heads, value_heads = (
            int(text["linear_num_key_heads"]),
            int(text["linear_num_value_heads"]),
        )
        key_dim, value_dim = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
        kernel = int(text["linear_conv_kernel_dim"])
        keys, values = key_heads * key_dim, value_heads * value_dim
        channels = 2 * keys + values
        return _LinearAttention(
            heads=key_heads,
            projections=hidden * (channels + values) + values * hidden,
            # Two small projections, the convolution, A_log and dt_bias, one norm.
            other=2 * hidden * value_heads + channels * kernel + 2 * value_heads + value_dim,
            state=value_heads * key_dim * value_dim,
            conv_state=channels * (kernel - 1),
        )


@dataclass(frozen=True, slots=True)
class _Experts:
    layers: int = 0
    count: int = 0
    per_token: int = 0
    width: int = 0
    expert: int = 0
    shared: int = 0
    router: int = 0

    @staticmethod
    def read(text: Mapping[str, Any], hidden: int, layers: int) -> "_Experts":
        count = int(text.get("num_local_experts") or text.get("num_experts") or 0)
        if not count:
            return _Experts()
        step = int(text.get("decoder_sparse_step") or 1)
        dense = set(text.get("mlp_only_layers") or ())
        width = int(text.get("moe_intermediate_size") or text["intermediate_size"])
        shared_width = int(text.get("shared_expert_intermediate_size") or 0)
        return _Experts(
            layers=sum((i + 1) % step == 0 and i not in dense for i in range(layers)),
            count=count,
            per_token=int(text["num_experts_per_tok"]),
            width=width,
            expert=3 * hidden * width,
            shared=3 * hidden * shared_width,
            router=hidden * count + (hidden if shared_width else 0),
        )


def _mtp(text: Mapping[str, Any], hidden: int, attention: int, moe: _Experts, mlp: int) -> int:
    """Layers like the model's own, each behind a projection of twice the width."""
    count = int(text.get("mtp_num_hidden_layers") or 0)
    if not count:
        return 0
    block = moe.expert * moe.count + moe.shared + moe.router if moe.count else mlp
    return count * (attention + block + 2 * hidden) + 2 * hidden * hidden + 3 * hidden


def _vision(config: Mapping[str, Any] | None) -> int:
    """A vision transformer of the Qwen-VL kind with its patch merger; 0 without one."""
    if not config:
        return 0
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    patch = int(config["in_channels"]) * int(config["temporal_patch_size"])
    patch *= int(config["patch_size"]) ** 2
    merged = width * int(config["spatial_merge_size"]) ** 2
    out = int(config["out_hidden_size"])
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    stem = patch * width + width + int(config["num_position_embeddings"]) * width
    merger = 2 * width + merged * merged + merged + merged * out + out
    return int(config["depth"]) * block + stem + merger


@functools.cache
def bundled_facts(name: str) -> ModelFacts:
    """Sizes that ship with rlmix.

    Raises:
        KeyError: `name` is not in `BUNDLED`.
    """
    folder = resources.files("rlmix.plan").joinpath("models")
    return facts_from_config(name, json.loads(folder.joinpath(BUNDLED[name]).read_text()))
