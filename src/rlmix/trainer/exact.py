"""The policy computed with the consistent operators, as exact pools compute it.

The Transformers model keeps the parameters and is what is saved and published; its forward is only
asked once, when the policy is loaded, whether ours is the same function. Invariant: what a sampler
with the same weights reported for a token, over the vocabulary, its kept set or a head, comes out
of here bit for bit; docs/consistency.md says on which premise.
"""

# B rows, T padded length, P policy tokens, H hidden, V vocabulary, K slots, E experts, N = B * T

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlmix.algos.support import Support, kept_mask
from rlmix.batch.packing import MicroBatch
from rlmix.core.errors import TrainerError
from rlmix.numerics.consistent.contract import CPU_TILING
from rlmix.numerics.consistent.experts import choose_experts, expert_shares
from rlmix.numerics.consistent.head import VocabScores, kept_normaliser, vocab_scores
from rlmix.numerics.consistent.model import (
    ModelSpec,
    ModelTensors,
    Route,
    tensors_of,
    train_hidden,
)
from rlmix.numerics.consistent.pointwise import rope_table
from rlmix.numerics.consistent.selfcheck import check_model
from rlmix.trainer.policy import Policy, TokenLogprobs
from rlmix.trainer.routing import RoutingTally

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TYPES = ("qwen3", "qwen3_moe", "llama")

SAME_FUNCTION_TOKENS = 64
SAME_FUNCTION_FRAC = 0.03
"""Mean difference to Transformers' logprobs on that many tokens, as a share of their mean size. Two
BF16 forwards of the bundled policy differ by 0.006; another epsilon or normalisation by over 0.04.
"""


class ExactPolicy(Policy):
    """A policy whose every number comes from operators with one order of additions."""

    def __init__(
        self,
        model: "PreTrainedModel",
        *,
        replays_routing: bool = False,
        round_to: torch.dtype | None = torch.bfloat16,
    ) -> None:
        """
        Args:
            round_to: what activations, keys and values are rounded to; None: they stay float32.
        Raises:
            TrainerError: the operators do not compute this model, or this machine breaks what
                they rely on.
        """
        config = model.config.get_text_config()
        name = type(model).__name__
        variants = list(_unknown_variants(config))
        if variants:
            raise TrainerError(
                f"trainer: numerics.consistency=exact computes {', '.join(MODEL_TYPES)} with silu, "
                f"no biases, full attention and plain rope; {name} has {', '.join(variants)}: set "
                "numerics.consistency=native"
            )
        self._spec = spec_of(config, round_to=round_to)
        self._theta = _rope(config)["rope_theta"]
        self._table = torch.empty(2, 0, 0)
        super().__init__(model, replays_routing=replays_routing)
        with torch.no_grad():
            self._check_names()
            self._check_machine()
            self._check_function(name)

    def hidden(self, ids_BT: Tensor, starts: np.ndarray | None = None) -> Tensor:
        assert starts is None, "exact mode packs rows"
        return self._hidden(self._tensors(), ids_BT, None)

    def next_logprobs(
        self, ids_BT: Tensor, lengths: Sequence[int], *, temperature: float
    ) -> list[Tensor]:
        tensors = self._tensors()
        hidden_BTH = self._hidden(tensors, ids_BT, None)
        found = []
        for row, length in enumerate(lengths):
            ids_P1 = ids_BT[row, 1:length, None]
            scores = vocab_scores(
                hidden_BTH[row, : length - 1], tensors.head, ids_P1, temperature=temperature
            )
            found.append(scores.scores_PK[:, 0] - scores.normaliser_P)
        return found

    def token_logprobs(
        self, batch: MicroBatch, *, temperature: float, replay: bool
    ) -> TokenLogprobs:
        tensors = self._tensors()
        hidden_BTH, tally = self._replayed(tensors, batch)
        assert batch.starts is None, "exact mode packs rows"
        rows_P, cols_P = torch.from_numpy(batch.rows_P), torch.from_numpy(batch.cols_P)
        hidden_PH = hidden_BTH[rows_P, cols_P - 1]
        ids_PK = torch.from_numpy(batch.sampled_P)[:, None]
        if batch.kept_ids_PK is not None:
            ids_PK = torch.cat((ids_PK, torch.from_numpy(batch.kept_ids_PK)), dim=1)
        scores = vocab_scores(hidden_PH, tensors.head, ids_PK, temperature=temperature)
        head = self._recorded_head(tensors, hidden_PH, batch, temperature=temperature)
        trainer_P, support = _on_support(scores, batch, replay=replay)
        return TokenLogprobs(trainer_P, support, scores.entropy_P, tally, head)

    def products(self) -> AbstractContextManager[Any]:
        """Its operators have an order of their own."""
        return nullcontext()

    def computed_otherwise(self, *, num_tokens: int) -> AbstractContextManager[None]:
        """There is no other order; another packing must change nothing."""
        return nullcontext()

    def _tensors(self) -> ModelTensors:
        return tensors_of(dict(self.model.named_parameters()), self._spec)

    def _hidden(self, tensors: ModelTensors, ids_BT: Tensor, route: Route | None) -> Tensor:
        length = ids_BT.shape[1]
        if self._table.shape[1] < length:
            self._table = rope_table(length, head_dim=self._spec.head_dim, theta=self._theta)
        return train_hidden(
            tensors, self._spec, ids_BT, self._table, tiling=CPU_TILING, route=route
        )

    def _replayed(
        self, tensors: ModelTensors, batch: MicroBatch
    ) -> tuple[Tensor, RoutingTally | None]:
        ids_BT = torch.from_numpy(batch.ids_BT)
        if self._routers is None:
            return self._hidden(tensors, ids_BT, None), None
        tally = self._routers.empty_tally(batch.ids_BT.shape)
        if batch.experts_BTLK is None:
            return self._hidden(tensors, ids_BT, None), tally
        recorded_NLK = torch.from_numpy(batch.experts_BTLK).flatten(0, 1).long()
        route = _Replay(self._spec, recorded_NLK, tally)
        return self._hidden(tensors, ids_BT, route), tally

    @torch.no_grad()
    def _recorded_head(
        self, tensors: ModelTensors, hidden_PH: Tensor, batch: MicroBatch, *, temperature: float
    ) -> Support | None:
        """Both sides' full-vocabulary logprobs of the heads beside kept sets."""
        if batch.head_tokens_H is None or batch.head_ids_HK is None:
            return None
        assert batch.head_logprobs_HK is not None
        sampler_HK = torch.from_numpy(batch.head_logprobs_HK)
        scores = vocab_scores(
            hidden_PH[torch.from_numpy(batch.head_tokens_H)],
            tensors.head,
            torch.from_numpy(batch.head_ids_HK),
            temperature=temperature,
        )
        trainer_HK = _on_slots(scores.scores_PK, scores.normaliser_P, kept_mask(sampler_HK))
        return Support(trainer_HK, sampler_HK, is_exact=False)

    def _check_names(self) -> None:
        """Every parameter must have a place in our forward: one without would never learn."""
        seen = _Seen(dict(self.model.named_parameters()))
        try:
            tensors_of(seen, self._spec)
        except KeyError as error:
            raise TrainerError(
                f"trainer: numerics.consistency=exact needs a tensor {error}, which the model "
                "lacks; set numerics.consistency=native"
            ) from error
        left = sorted(set(seen) - seen.taken)
        if left or self._head.bias is not None:
            raise TrainerError(
                "trainer: numerics.consistency=exact does not compute "
                f"{', '.join(left[:3]) or 'a bias of the head'}; set numerics.consistency=native"
            )

    def _check_machine(self) -> None:
        try:
            found = check_model(self._tensors(), self._spec, tiling=CPU_TILING)
        except ValueError as error:
            raise TrainerError(
                f"trainer: numerics.consistency=exact: {error}; set numerics.consistency=native"
            ) from error
        if not found.is_exact:
            fewer = "trainer.threads=1 or " if found.threads > 1 else ""
            raise TrainerError(
                f"trainer: {found.refusal()}; set {fewer}numerics.consistency=native"
            )

    def _check_function(self, name: str) -> None:
        num_ids = self._head.weight.shape[0]
        ids_BT = (torch.arange(SAME_FUNCTION_TOKENS)[None] * 7 + 1) % num_ids
        (ours_P,) = self.next_logprobs(ids_BT, [SAME_FUNCTION_TOKENS], temperature=1.0)
        theirs_PV = self.model(input_ids=ids_BT, use_cache=False).logits[0, :-1].float()
        theirs_P = theirs_PV.log_softmax(-1).gather(1, ids_BT[0, 1:, None])[:, 0]
        gap = float((ours_P - theirs_P).abs().mean() / theirs_P.abs().mean())
        if not gap <= SAME_FUNCTION_FRAC:
            raise TrainerError(
                f"trainer: logprobs of the consistent operators and of {name} differ by {gap:.3g} "
                f"of their size, allowed {SAME_FUNCTION_FRAC}; they do not compute this model: set "
                "numerics.consistency=native"
            )


def _on_support(
    scores: VocabScores, batch: MicroBatch, *, replay: bool
) -> tuple[Tensor, Support | None]:
    """Logprobs of the sampled ids, and of their candidates where these are a support."""
    sampled_P, candidates_PK = scores.scores_PK[:, 0], scores.scores_PK[:, 1:]
    full_P = sampled_P - scores.normaliser_P
    if not batch.has_support(replay=replay):
        return full_P, None
    sampler_PK = torch.from_numpy(batch.kept_logprobs_PK)
    kept_PK = kept_mask(sampler_PK)
    if not batch.kept_exact:
        trainer_PK = _on_slots(candidates_PK, scores.normaliser_P, kept_PK)
        return full_P, Support(trainer_PK, sampler_PK, is_exact=False)
    normaliser_P = kept_normaliser(candidates_PK, kept_PK)
    trainer_PK = _on_slots(candidates_PK, normaliser_P, kept_PK)
    return sampled_P - normaliser_P, Support(trainer_PK, sampler_PK, is_exact=True)


def _on_slots(scores_PK: Tensor, normaliser_P: Tensor, is_slot_PK: Tensor) -> Tensor:
    """Logprobs of candidates, -inf in padded slots."""
    return (scores_PK - normaliser_P[:, None]).masked_fill(~is_slot_PK, float("-inf"))


@dataclass(frozen=True, slots=True)
class _Replay:
    """`Route` that takes recorded experts where there are any, and counts."""

    spec: ModelSpec
    recorded_NLK: Tensor
    """int64, -1 where nothing was recorded."""
    tally: RoutingTally

    def __call__(self, layer: int, logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        recorded_NK = self.recorded_NLK[:, layer]
        own_NK = choose_experts(logits_NE, top_k=self.spec.top_k)
        is_recorded_N = recorded_NK[:, 0] >= 0
        chosen_NK = torch.where(is_recorded_N[:, None], recorded_NK, own_NK)
        same_set_N = (chosen_NK.sort(-1).values == own_NK.sort(-1).values).all(-1)
        self.tally.replayed_BT.view(-1).add_(is_recorded_N)
        self.tally.agreed_BT.view(-1).add_(is_recorded_N & same_set_N)
        shares = expert_shares(logits_NE, chosen_NK, renormalise=self.spec.norm_topk_prob)
        return chosen_NK, shares


class _Seen(Mapping[str, Tensor]):
    """Parameters by name, with a note of which were asked for."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter]) -> None:
        self._parameters = parameters
        self.taken: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        found = self._parameters[name]
        self.taken.add(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def spec_of(config: Any, *, round_to: torch.dtype | None) -> ModelSpec:
    """Sizes and choices out of a Transformers text configuration."""
    heads = int(config.num_attention_heads)
    has_experts = config.model_type == "qwen3_moe"
    return ModelSpec(
        num_layers=int(config.num_hidden_layers),
        num_heads=heads,
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        rms_eps=float(config.rms_norm_eps),
        top_k=int(config.num_experts_per_tok) if has_experts else 0,
        norm_topk_prob=bool(getattr(config, "norm_topk_prob", False)),
        round_to=round_to,
    )


def _rope(config: Any) -> dict[str, Any]:
    found: Any = getattr(config, "rope_parameters", None) or {}
    theta = found.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0
    return {"rope_type": "default", **found, "rope_theta": float(theta)}


def _unknown_variants(config: Any) -> Iterator[str]:
    """What of a configuration the consistent operators do not compute."""
    if config.model_type not in MODEL_TYPES:
        yield f"model_type={config.model_type}"
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if getattr(config, key, False):
            yield f"{key}=true"
    if getattr(config, "hidden_act", "silu") not in ("silu", "swish"):
        yield f"hidden_act={config.hidden_act}"
    rope = _rope(config)
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"rope_type={rope['rope_type']}"
