"""The Transformers model of the trainer cut into named operators, for comparisons with engines.

Operators call the model's own modules on BF16 tensors and give float32 tensors of the same
numbers. Nothing here runs in training. Experts are multiplied one by one, which gives the bits of
the grouped product on a CPU. Models: qwen3, qwen3_moe, llama.
"""

# T rows, N query heads, G key heads, D head dim, K experts per token

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.core.errors import TrainerError
from rlmix.trainer.policy import Policy

Registers = Mapping[str, Tensor]
MODEL_TYPES = ("qwen3", "qwen3_moe", "llama")


def _held(x: Tensor) -> Tensor:
    return x.bfloat16()


class TransformersOperators:
    """Operators of a loaded policy, one text at a time."""

    def __init__(self, policy: Policy, *, temperature: float) -> None:
        """
        Raises:
            TrainerError: another model class than those above.
        """
        model: Any = policy.model
        config = model.config.get_text_config()
        if config.model_type not in MODEL_TYPES:
            raise TrainerError(
                f"diff: operators of model_type={config.model_type} are not known; they are of "
                f"{', '.join(MODEL_TYPES)}"
            )
        self._policy, self._temperature = policy, temperature
        self._model: Any = model.base_model
        self._config = config
        self._code: Any = sys.modules[type(self._model.layers[0].self_attn).__module__]

    def table(self) -> dict[str, Callable[[int, Registers], dict[str, Tensor]]]:
        """Operator name -> operator."""
        names = (
            "embed", "input_norm", "qkv", "qk_norm", "rope", "kv", "attention", "out_proj",
            "post_norm", "router", "route", "gate_up", "act", "down", "combine", "final_norm",
            "head", "logprob",
        )  # fmt: skip
        return {name: self._as_in_training(getattr(self, name)) for name in names}

    def _as_in_training(
        self, operator: Callable[[int, Registers], dict[str, Tensor]]
    ) -> Callable[[int, Registers], dict[str, Tensor]]:
        def run(layer: int, registers: Registers) -> dict[str, Tensor]:
            with self._policy.products():
                return operator(layer, registers)

        return run

    def _counts(self) -> tuple[int, int]:
        return int(self._config.num_attention_heads), int(self._config.num_key_value_heads)

    def _attention(self, layer: int) -> Any:
        return self._model.layers[layer].self_attn

    def _split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys = self._counts()
        parts = heads.split((queries, keys, keys), dim=1)
        return parts[0], parts[1], parts[2]

    def embed(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"hidden": self._model.embed_tokens(r["ids"]).float()}

    def input_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        return {"normed": self._model.layers[layer].input_layernorm(_held(r["hidden"])).float()}

    def post_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        norm = self._model.layers[layer].post_attention_layernorm
        return {"normed": norm(_held(r["hidden"])).float()}

    def final_norm(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"normed": self._model.norm(_held(r["hidden"])).float()}

    def qkv(self, layer: int, r: Registers) -> dict[str, Tensor]:
        module, x = self._attention(layer), _held(r["normed"])
        parts = [module.q_proj(x), module.k_proj(x), module.v_proj(x)]
        heads = [part.view(len(x), -1, module.head_dim) for part in parts]
        return {"heads": torch.cat(heads, dim=1).float()}

    def qk_norm(self, layer: int, r: Registers) -> dict[str, Tensor]:
        module = self._attention(layer)
        queries, keys, values = self._split(_held(r["heads"]))
        parts = (module.q_norm(queries), module.k_norm(keys), values)
        return {"heads": torch.cat(parts, dim=1).float()}

    def rope(self, _: int, r: Registers) -> dict[str, Tensor]:
        queries, keys, values = self._split(_held(r["heads"]))
        cos, sin = self._model.rotary_emb(values[None], r["positions"][None])
        turned = self._code.apply_rotary_pos_emb(
            queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], cos, sin
        )
        rotated = [part[0].transpose(0, 1) for part in turned]
        return {"heads": torch.cat((*rotated, values), dim=1).float()}

    def kv(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"heads": r["heads"]}

    def attention(self, layer: int, r: Registers) -> dict[str, Tensor]:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        module, rows = self._attention(layer), len(r["heads"])
        queries, keys, values = (
            part.transpose(0, 1)[None] for part in self._split(_held(r["heads"]))
        )
        used = self._config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(used, self._code.eager_attention_forward)
        mask = None
        if used == "eager":
            lowest = torch.finfo(torch.bfloat16).min
            ahead = torch.ones(rows, rows, dtype=torch.bool).triu(1)
            mask = torch.zeros(rows, rows, dtype=torch.bfloat16).masked_fill(ahead, lowest)
            mask = mask[None, None]
        found, _ = attend(module, queries, keys, values, mask, dropout=0.0, scaling=module.scaling)
        return {"attended": found.reshape(rows, -1).float()}

    def out_proj(self, layer: int, r: Registers) -> dict[str, Tensor]:
        added = self._attention(layer).o_proj(_held(r["attended"]))
        return {"hidden": (_held(r["hidden"]) + added).float()}

    def router(self, layer: int, r: Registers) -> dict[str, Tensor]:
        weight = self._model.layers[layer].mlp.gate.weight
        return {"router": F.linear(_held(r["normed"]), weight).float()}

    def route(self, _: int, r: Registers) -> dict[str, Tensor]:
        shares = _held(r["router"]).float().softmax(-1)
        shares, experts = torch.topk(shares, int(self._config.num_experts_per_tok), dim=-1)
        if getattr(self._config, "norm_topk_prob", False):
            shares = shares / shares.sum(-1, keepdim=True)
        return {"experts": experts, "shares": _held(shares).float()}

    def gate_up(self, layer: int, r: Registers) -> dict[str, Tensor]:
        mlp, x = self._model.layers[layer].mlp, _held(r["normed"])
        if "experts" not in r:
            return {"gate_up": torch.cat((mlp.gate_proj(x), mlp.up_proj(x)), dim=-1).float()}
        rows = x[:, None].expand(-1, r["experts"].shape[1], -1)
        return {"gate_up": _by_expert(rows, r["experts"], mlp.experts.gate_up_proj).float()}

    def act(self, layer: int, r: Registers) -> dict[str, Tensor]:
        mlp = self._model.layers[layer].mlp
        gate, up = _held(r["gate_up"]).chunk(2, dim=-1)
        act: Any = mlp.experts.act_fn if "experts" in r else mlp.act_fn
        return {"inner": (act(gate) * up).float()}

    def down(self, layer: int, r: Registers) -> dict[str, Tensor]:
        mlp, inner = self._model.layers[layer].mlp, _held(r["inner"])
        if "experts" not in r:
            return {"hidden": (_held(r["hidden"]) + mlp.down_proj(inner)).float()}
        return {"outputs": _by_expert(inner, r["experts"], mlp.experts.down_proj).float()}

    def combine(self, _: int, r: Registers) -> dict[str, Tensor]:
        weighted = _held(r["outputs"]) * _held(r["shares"]).unsqueeze(-1)
        return {"hidden": (_held(r["hidden"]) + weighted.sum(dim=1)).float()}

    def head(self, _: int, r: Registers) -> dict[str, Tensor]:
        return {"logits": self._policy.logits(_held(r["normed"]))}

    def logprob(self, _: int, r: Registers) -> dict[str, Tensor]:
        scores = r["logits"].float() / self._temperature
        picked = scores.gather(1, r["targets"][:, None])[:, 0]
        return {"logprobs": picked - scores.logsumexp(-1)}


def _by_expert(rows_TKI: Tensor, ids_TK: Tensor, weight_EOI: Tensor) -> Tensor:
    out = rows_TKI.new_empty(*ids_TK.shape, weight_EOI.shape[1])
    for expert in ids_TK.unique().tolist():
        is_chosen = ids_TK == expert
        out[is_chosen] = F.linear(rows_TKI[is_chosen], weight_EOI[expert])
    return out
