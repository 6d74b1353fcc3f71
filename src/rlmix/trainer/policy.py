"""The policy as the trainer sees it: a Transformers causal LM in BF16.

Invariants: every parameter of the checkpoint is accounted for, or loading fails; the head runs only
where the policy sampled a token, and there is never a tensor that grows with tokens times
vocabulary; logits, softmax and logprobs are float32 whatever the model's dtype; dropout is off,
because the ratio to the sampler would otherwise contain it.
"""

# B rows, T padded length, P policy tokens, H hidden size, V vocabulary, K kept-set slots

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.algos.chunked_head import KEPT_SCORES, HeadScores, head_scores
from rlmix.algos.corrections import in_compute_dtype
from rlmix.algos.support import Support, kept_mask, on_kept_set, on_vocabulary
from rlmix.batch.packing import MicroBatch
from rlmix.core.errors import TrainerError
from rlmix.trainer.documents import (
    DOCUMENTS_ATTENTION,
    FLASH_ATTENTION,
    add_documents_attention,
    check_no_leak,
    documents_arguments,
    reset_states,
)
from rlmix.trainer.parts import Place, PolicyParts
from rlmix.trainer.products import wide_products
from rlmix.trainer.recompute import no_contexts, recompute_layers
from rlmix.trainer.routing import Routers, RoutingTally
from rlmix.trainer.sharded import decoder_layers, shard_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")

LONG_ATTENTION = "sdpa"
SHORT_ATTENTION = "eager"
SHORT_CONTEXT_TOKENS = 1024
"""Models that see no more than this get the plain attention: on the CPU a step is 21 % faster
than with sdpa at 220 tokens, and closer to float64. Its memory grows with the square of the
length, so longer models get sdpa. Numbers in docs/trainer.md."""

OTHER_ATTENTION = {
    SHORT_ATTENTION: LONG_ATTENTION,
    LONG_ATTENTION: SHORT_ATTENTION,
    DOCUMENTS_ATTENTION: SHORT_ATTENTION,
}
"""The same function with sums in another order, for a second look at one sample."""

EXPERTS = "grouped_mm"
"""On the CPU 10 % faster than one matrix product per expert, with the same logprobs; batched_mm,
which copies each token's experts, is nine times slower."""

HEAD_TOLERANCE = 0.05
"""Nats of logit between our head (float32) and the model's own (BF16, 8 bits of mantissa), as a
share of the largest logit. A scaled or capped head is off by far more."""


def default_attention(text_config: Any) -> str:
    """The attention implementation for a model's longest context, see `SHORT_CONTEXT_TOKENS`."""
    longest = getattr(text_config, "max_position_embeddings", None)
    is_short = longest is not None and longest <= SHORT_CONTEXT_TOKENS
    return SHORT_ATTENTION if is_short else LONG_ATTENTION


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The trainer's view of a micro-batch's policy tokens, at the sampling temperature."""

    trainer_P: Tensor
    """float32 [P], differentiable."""
    support: Support | None
    entropy_P: Tensor
    """float32 [P], detached; of the whole vocabulary, not of the kept set."""
    routing: RoutingTally | None
    """What was replayed; None when the policy was not loaded to replay routes."""
    head: Support | None
    """Detached, [H, K] full-vocabulary logprobs of the tokens `MicroBatch.head_tokens_H`; None
    when the micro-batch recorded no head beside its kept sets."""


class Policy:
    """A loaded model and the few things the trainer asks of it."""

    def __init__(self, model: "PreTrainedModel", *, replays_routing: bool = False) -> None:
        """`replays_routing`: take the experts that a batch recorded, see `trainer.routing`."""
        self.model = model.eval()
        head = model.get_output_embeddings()
        if head is None:
            raise TrainerError(f"trainer: {type(model).__name__} has no language-model head")
        self._head: Any = head
        self._is_sharded = False
        self._places: Sequence[Place] | None = None
        self._device = torch.device("cpu")
        self._check_head()
        self._routers = Routers(model) if replays_routing else None

    @property
    def device(self) -> torch.device:
        """Where the forward runs."""
        return self._device

    def put(self, array: np.ndarray) -> Tensor:
        """A micro-batch's array where the forward runs."""
        return torch.from_numpy(array).to(self._device)

    def move(self, device: torch.device) -> None:
        """The whole model to one device; `shard` does it piece by piece instead."""
        self.model.to(device)  # type: ignore[arg-type]
        self._device = device

    def take_documents(self) -> None:
        """Prepare for micro-batches of packed documents; raises TrainerError where they would see
        each other."""
        if self.model.config._attn_implementation not in FLASH_ATTENTION:
            add_documents_attention()
            self.model.set_attn_implementation(DOCUMENTS_ATTENTION)
        reset_states(decoder_layers(self.model))
        check_no_leak(self.model, self.hidden)

    def recompute(self) -> None:
        """Keep only the layers' inputs for the backward pass. Comes before `shard`."""
        contexts = no_contexts if self._routers is None else self._routers.contexts
        recompute_layers(decoder_layers(self.model), contexts)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        attention: str | None = None,
        experts: str | None = None,
        replays_routing: bool = False,
        make: Callable[..., "Policy"] | None = None,
    ) -> "Policy":
        """Load a Hugging Face folder in BF16.

        Args:
            make: builds the policy out of the model and `replays_routing`; None: this class.
        Raises:
            TrainerError: the folder lacks files, its tensors and the model's parameters do not
                match one to one, or routes cannot be replayed in its class.
        """
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        if not (folder / "config.json").is_file():
            raise TrainerError(
                f"trainer: {folder} has no config.json; model.path must be a Hugging Face folder"
            )
        transformers_logging.disable_progress_bar()
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text_config = config.get_text_config()
        options: dict[str, Any] = {
            "attn_implementation": attention or default_attention(text_config)
        }
        if getattr(text_config, "num_experts", None):
            options["experts_implementation"] = experts or EXPERTS
        loader: Any = AutoModelForCausalLM
        model, report = loader.from_pretrained(
            folder,
            dtype=torch.bfloat16,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported with the others below, not skipped
            **options,
        )
        problems = {name: sorted(map(str, keys)) for name, keys in report.items() if keys}
        if problems:
            raise TrainerError(
                f"trainer: {folder} does not match its model class: {problems}; every tensor must "
                "have a parameter and every parameter a tensor"
            )
        return (make or cls)(model, replays_routing=replays_routing)

    @property
    def experts_shape(self) -> tuple[int, int] | None:
        """Layers and experts per token that sessions must record; None: none are replayed."""
        return None if self._routers is None else self._routers.record_shape

    def shard(self, mesh: Any, *, offloads: bool = False) -> None:
        """Cut the model over the ranks of `mesh`; from here on all ranks compute in step."""
        shard_model(self.model, mesh=mesh, offloads=offloads)
        self._is_sharded = True
        self._places = None  # A sharded model's parts are BF16.
        if mesh.device_type != "cpu":
            self._device = torch.device(mesh.device_type, torch.cuda.current_device())

    def gathered(self, body: Callable[[], T]) -> T:
        """`body()`, in which the model's forward and its head may be used together: only there are
        the parameters of a sharded model that lie outside its layers.

        Its result must be tensors, or tuples and lists of them: FSDP2 looks for gradients there.
        """
        with self.products():
            if not self._is_sharded:
                return body()
            root: Any = self.model
            found: T = root.run_gathered(body)
        if not torch.is_grad_enabled():
            # A backward pass gives the gathered weights back; without one they would stay, and be
            # those of before the next optimizer step.
            root.reshard()
        return found

    def products(self) -> AbstractContextManager[Any]:
        """Around everything that multiplies matrices, the backward pass included."""
        return wide_products(self._device)

    def backward(self, loss: Tensor) -> None:
        with self.products():
            loss.backward()

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trainable parameters by name, tied ones once."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def hidden(self, ids_BT: Tensor, starts: np.ndarray | None = None) -> Tensor:
        """[B, T, H] last hidden states. Rows are padded on the right, so causality is the mask.

        Args:
            starts: as in `MicroBatch`: the single row holds documents that do not see each other.
        """
        arguments = {} if starts is None else documents_arguments(starts, ids_BT.device)
        return self.model.base_model(
            input_ids=ids_BT, attention_mask=None, use_cache=False, **arguments
        ).last_hidden_state

    def logits(self, hidden_PH: Tensor) -> Tensor:
        """float32 [P, V] of a few positions: BF16 weights and hidden states, summed in float32."""
        # A BF16 result would round logits near 10 by 0.03, more than the formats do.
        bias = self._head.bias
        return F.linear(
            in_compute_dtype(hidden_PH),
            in_compute_dtype(self._head.weight),
            None if bias is None else in_compute_dtype(bias),
        )

    def scores(
        self,
        hidden_PH: Tensor,
        ids_PK: Tensor,
        is_slot_PK: Tensor | None = None,
        *,
        temperature: float,
        is_exact: bool = False,
    ) -> HeadScores:
        """Scores of ids beside normaliser and entropy, see `algos.chunked_head.head_scores`.

        Args:
            is_exact: no gradient will come through normaliser and entropy.
        """
        return head_scores(
            hidden_PH,
            self._head.weight,
            ids_PK,
            temperature=temperature,
            bias_V=self._head.bias,
            is_slot_PK=is_slot_PK,
            kept_scores=0 if is_exact else KEPT_SCORES,
        )

    def check_routes(self, batch: MicroBatch) -> None:
        """Raise DataError for a record of experts that this model's routers cannot have made."""
        if self._routers is not None:
            self._routers.check(batch)

    def token_logprobs(
        self, batch: MicroBatch, *, temperature: float, replay: bool
    ) -> TokenLogprobs:
        """Logprobs of a micro-batch's policy tokens, on the support the sampler recorded.

        Routes that the batch recorded are taken when the policy was loaded to replay them. With
        kept sets and `replay`, renormalised on them; with a head, or without `replay`, over
        the whole vocabulary (then kept sets give no support: p and q would not share one).
        """
        rows_P, cols_P = map(self.put, batch.places_P)
        asked = _Asked.of(batch, put=self.put)

        def body() -> tuple[Tensor, Tensor, Tensor, RoutingTally | None]:
            hidden_BTH, routing = self._replayed_hidden(batch)
            hidden_PH = hidden_BTH[rows_P, cols_P - 1]
            found = self.scores(
                hidden_PH,
                asked.ids_PK,
                asked.is_slot_PK,
                temperature=temperature,
                is_exact=batch.kept_logprobs_PK is not None and batch.kept_exact and replay,
            )
            return found.scores_PK, found.normaliser_P, found.entropy_P, routing

        *parts, routing = self.gathered(body)
        found = HeadScores(*parts)
        sampled_P = found.scores_PK[:, 0]
        entropy_P = found.entropy_P.detach()
        head = asked.head(found)
        if batch.kept_logprobs_PK is None or not batch.has_support(replay=replay):
            full_P = sampled_P - found.normaliser_P
            return TokenLogprobs(full_P, None, entropy_P, routing, head)
        sampler_PK = self.put(batch.kept_logprobs_PK)
        kept_PK, scores_PK = kept_mask(sampler_PK), found.scores_PK[:, asked.kept]
        if batch.kept_exact:
            trainer_P, trainer_PK = on_kept_set(sampled_P, scores_PK, kept_PK)
        else:
            trainer_P, trainer_PK = on_vocabulary(sampled_P, scores_PK, kept_PK, found.normaliser_P)
        support = Support(trainer_PK, sampler_PK, batch.kept_exact)
        return TokenLogprobs(trainer_P, support, entropy_P, routing, head)

    def _replayed_hidden(self, batch: MicroBatch) -> tuple[Tensor, RoutingTally | None]:
        """[B, T, H] last hidden states, through the recorded experts where there is a record."""
        ids_BT = self.put(batch.ids_BT)
        if self._routers is None:
            return self.hidden(ids_BT, batch.starts), None
        if batch.experts_BTLK is None:
            tally = self._routers.empty_tally(batch.ids_BT.shape)
            return self.hidden(ids_BT, batch.starts), tally
        with self._routers.replaying(batch.experts_BTLK) as tally:
            return self.hidden(ids_BT, batch.starts), tally

    def next_logprobs(
        self, ids_BT: Tensor, lengths: Sequence[int], *, temperature: float
    ) -> list[Tensor]:
        """log p(ids[t] | ids[:t]) over the whole vocabulary.

        Args:
            ids_BT: int64, padded on the right.
            lengths: real tokens of each row, at least 1.
        Returns:
            float32 [length - 1] for each row: its tokens from 1 on.
        """
        ids_BT = ids_BT.to(self.device)

        def body() -> list[Tensor]:
            hidden_BTH = self.hidden(ids_BT)
            found = []
            for row, length in enumerate(lengths):
                hidden_PH, ids_PK = hidden_BTH[row, : length - 1], ids_BT[row, 1:length, None]
                scores = self.scores(hidden_PH, ids_PK, temperature=temperature)
                found.append(scores.scores_PK[:, 0] - scores.normaliser_P)
            return found

        return self.gathered(body)

    def computed_otherwise(self, *, num_tokens: int) -> AbstractContextManager[None]:
        """For a while the plain attention for the fused one, or the other way round: the same
        function with sums in another order.

        Nothing changes for any further implementation (it was asked for by name), nor where the
        plain one would need memory for a long session's square.
        """
        used = self.model.config._attn_implementation
        other = OTHER_ATTENTION.get(used, used)
        if other == SHORT_ATTENTION and num_tokens > SHORT_CONTEXT_TOKENS:
            other = used
        return _with_attention(self.model, other)

    def parts(self) -> PolicyParts:
        """The current tensors, for writing them part by part."""
        parts = PolicyParts(self.model, is_sharded=self._is_sharded, places=self._places)
        self._places = parts.places
        return parts

    def state(self) -> dict[str, Tensor]:
        """A BF16 copy of all tensors under the names of a Hugging Face checkpoint."""
        parts = self.parts()
        found: dict[str, Tensor] = {}
        for number in range(len(parts.layout)):
            found |= parts.read(number)
        return dict(sorted(found.items()))

    @torch.no_grad()
    def _check_head(self) -> None:
        """Our head must be the model's: some classes scale or cap logits after the matrix."""
        ids_BT = torch.arange(8)[None] % self._head.weight.shape[0]
        theirs = self.model(input_ids=ids_BT, use_cache=False).logits[0].float()
        ours = self.logits(Policy.hidden(self, ids_BT)[0])  # Not that of a subclass.
        gap = float((theirs - ours).abs().max())
        allowed = HEAD_TOLERANCE * max(1.0, float(theirs.abs().max()))
        if not gap <= allowed:
            raise TrainerError(
                f"trainer: the head of {type(self.model).__name__} is not a plain matrix (logits "
                f"differ by {gap:.3g}, allowed {allowed:.3g}); this model class is not supported"
            )


@contextmanager
def _with_attention(model: Any, implementation: str) -> Iterator[None]:
    used = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(used)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The ids whose scores a micro-batch needs: sampled, then kept sets, then heads beside them."""

    ids_PK: Tensor
    is_slot_PK: Tensor
    kept: slice
    """Columns of the kept sets."""
    head_tokens_H: Tensor | None
    sampler_HK: Tensor | None
    """Both None when no head was recorded beside a kept set."""

    @classmethod
    def of(cls, batch: MicroBatch, *, put: Callable[[np.ndarray], Tensor]) -> "_Asked":
        ids = [put(batch.sampled_P)[:, None]]
        slots = [torch.ones_like(ids[0], dtype=torch.bool)]
        if batch.kept_ids_PK is not None and batch.kept_logprobs_PK is not None:
            ids.append(put(batch.kept_ids_PK))
            slots.append(kept_mask(put(batch.kept_logprobs_PK)))
        kept = slice(1, sum(part.shape[1] for part in ids))
        tokens_H = sampler_HK = None
        if batch.head_tokens_H is not None and batch.head_logprobs_HK is not None:
            assert batch.head_ids_HK is not None
            tokens_H = put(batch.head_tokens_H)
            sampler_HK = put(batch.head_logprobs_HK)
            shape = (len(batch.sampled_P), sampler_HK.shape[1])
            head_ids_PK = ids[0].new_zeros(shape)
            head_ids_PK[tokens_H] = put(batch.head_ids_HK)
            is_head_PK = slots[0].new_zeros(shape)
            is_head_PK[tokens_H] = kept_mask(sampler_HK)
            ids.append(head_ids_PK)
            slots.append(is_head_PK)
        return cls(torch.cat(ids, 1), torch.cat(slots, 1), kept, tokens_H, sampler_HK)

    def head(self, found: HeadScores) -> Support | None:
        """Both sides' full-vocabulary logprobs of the heads beside kept sets, detached."""
        if self.head_tokens_H is None or self.sampler_HK is None:
            return None
        scores_HK = found.scores_PK.detach()[self.head_tokens_H, self.kept.stop :]
        normaliser_H = found.normaliser_P.detach()[self.head_tokens_H]
        _, trainer_HK = on_vocabulary(
            scores_HK[:, 0], scores_HK, kept_mask(self.sampler_HK), normaliser_H
        )
        return Support(trainer_HK, self.sampler_HK, is_exact=False)
