"""What a loss needs of a distribution over the vocabulary, without a [tokens, vocabulary] tensor.

Hidden states meet the head in blocks of tokens by ids; a block's scores are used and overwritten by
the next. The backward pass computes them a second time, save for the first few, which are kept, so
it does not matter what the loss does with the results, whole sequences included.

Invariants: working memory is bounded, whatever the number of tokens and the vocabulary; sums
over the vocabulary and over tokens are kept in the compute dtype and rounded to the parameter's
once; blocks are visited in one order, so a repetition gives the same bits.
"""

# P tokens, V vocabulary, H hidden size, K ids asked for, N real (token, id) pairs

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.algos.corrections import in_compute_dtype
from rlmix.algos.support import entropy

TOKEN_CHUNK = 512
VOCAB_CHUNK = 2048
"""A block of 4 MiB in float32; the choice by measurement is in docs/trainer.md."""

WHOLE_SCORES = 2**22
"""Tokens times vocabulary up to which plain autograd keeps all scores (16 MiB each of a few
copies): nothing is computed twice, and it is no more memory than the blocks need."""

KEPT_SCORES = 2**25
"""Scores of the first blocks that are kept for the backward pass instead of being computed again
(128 MiB in float32). With a wide hidden state products decide the time, and this is a quarter of
them wherever tokens times vocabulary is no more than that."""

PAIR_CHUNK = 4096
"""(token, id) pairs whose head rows and hidden states are held at a time when only they have a
gradient."""


@dataclass(frozen=True, slots=True)
class HeadScores:
    """Scores of some ids beside what normalises them; all differentiable."""

    scores_PK: Tensor
    """[P, K] logit / temperature of each id asked for; 0 in slots that were not asked for."""
    normaliser_P: Tensor
    """[P] log of the sum of exp over the scores of the vocabulary: logprob = score - this."""
    entropy_P: Tensor
    """[P] nats, of the whole vocabulary."""


def head_scores(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    ids_PK: Tensor,
    *,
    temperature: float,
    bias_V: Tensor | None = None,
    is_slot_PK: Tensor | None = None,
    token_chunk: int = TOKEN_CHUNK,
    vocab_chunk: int = VOCAB_CHUNK,
    whole_scores: int = WHOLE_SCORES,
    kept_scores: int = KEPT_SCORES,
) -> HeadScores:
    """Scores of ids, normaliser and entropy of the distribution that predicts each token.

    Args:
        hidden_PH: float [P, H], the last hidden states of the positions that predict.
        weight_VH: float [V, H], the head; bfloat16 is widened block by block.
        ids_PK: int64 [P, K]; anything in slots that are not asked for.
        temperature: of the sampling, above 0.
        bias_V: float [V], or None.
        is_slot_PK: bool [P, K], the slots asked for; None: all.
        token_chunk, vocab_chunk: size of a block; changes rounding only.
        whole_scores: P * V up to which all scores are kept; changes rounding only.
        kept_scores: beyond, how many are kept; changes no bit. 0 where the loss needs the gradients
            of asked scores only (exact kept sets): then none is computed again anyway.
    Returns:
        `HeadScores` in float32, or float64 when the hidden states are float64.
    Raises:
        ValueError: an id outside the vocabulary, a temperature or a chunk that is not positive.
    """
    _check(ids_PK, is_slot_PK, vocab_size=len(weight_VH), temperature=temperature)
    if token_chunk < 1 or vocab_chunk < 1:
        raise ValueError(
            f"chunked head: token_chunk={token_chunk}, vocab_chunk={vocab_chunk}; both must be at "
            "least 1"
        )
    if len(hidden_PH) * len(weight_VH) <= whole_scores:
        return _whole(hidden_PH, weight_VH, bias_V, ids_PK, is_slot_PK, temperature)
    blocks = _Blocks.of(
        ids_PK,
        is_slot_PK,
        vocab_size=len(weight_VH),
        token_chunk=token_chunk,
        vocab_chunk=vocab_chunk,
    )
    return HeadScores(
        *_Chunked.apply(hidden_PH, weight_VH, bias_V, blocks, temperature, kept_scores)
    )


def _check(
    ids_PK: Tensor, is_slot_PK: Tensor | None, *, vocab_size: int, temperature: float
) -> None:
    if not temperature > 0:
        raise ValueError(f"chunked head: temperature={temperature} must be above 0")
    is_wrong_PK = (ids_PK < 0) | (ids_PK >= vocab_size)
    if is_slot_PK is not None:
        is_wrong_PK &= is_slot_PK
    if bool(is_wrong_PK.any()):
        raise ValueError(
            f"chunked head: id {int(ids_PK[is_wrong_PK][0])} is outside the vocabulary of "
            f"{vocab_size}"
        )


def _whole(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    ids_PK: Tensor,
    is_slot_PK: Tensor | None,
    temperature: float,
) -> HeadScores:
    logits_PV = F.linear(
        in_compute_dtype(hidden_PH),
        in_compute_dtype(weight_VH),
        None if bias_V is None else in_compute_dtype(bias_V),
    )
    logits_PV = logits_PV / temperature
    if is_slot_PK is None:
        scores_PK = logits_PV.gather(1, ids_PK)
    else:
        ids_PK = ids_PK.masked_fill(~is_slot_PK, 0)
        scores_PK = logits_PV.gather(1, ids_PK).masked_fill(~is_slot_PK, 0.0)
    return HeadScores(scores_PK, logits_PV.logsumexp(dim=1), entropy(logits_PV))


@dataclass(frozen=True, slots=True)
class _Block:
    """One block's place, and the pairs asked for inside it."""

    rows: slice
    ids: slice
    places_N: Tensor
    """Flat places in [P, K]."""
    rows_N: Tensor
    cols_N: Tensor
    """Counted from the block's corner."""

    @property
    def corner(self) -> tuple[int, int]:
        return self.rows.start, self.ids.start


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The pairs asked for, sorted by the block that they lie in: vocabulary first."""

    shape_PK: tuple[int, int]
    vocab_size: int
    token_chunk: int
    vocab_chunk: int
    places_N: Tensor
    ids_N: Tensor
    offsets: tuple[int, ...]
    """Where each block's pairs begin, and the end."""

    @classmethod
    def of(
        cls,
        ids_PK: Tensor,
        is_slot_PK: Tensor | None,
        *,
        vocab_size: int,
        token_chunk: int,
        vocab_chunk: int,
    ) -> "_Blocks":
        num_tokens, num_slots = ids_PK.shape
        if is_slot_PK is None:
            places_N = torch.arange(ids_PK.numel(), device=ids_PK.device)
        else:
            places_N = is_slot_PK.flatten().nonzero()[:, 0]
        ids_N = ids_PK.flatten()[places_N]
        chunks = -(-num_tokens // token_chunk)
        blocks_N = ids_N // vocab_chunk * chunks + places_N // num_slots // token_chunk
        order_N = blocks_N.argsort(stable=True)
        counts = blocks_N.bincount(minlength=chunks * -(-vocab_size // vocab_chunk))
        return cls(
            shape_PK=(num_tokens, num_slots),
            vocab_size=vocab_size,
            token_chunk=token_chunk,
            vocab_chunk=vocab_chunk,
            places_N=places_N[order_N],
            ids_N=ids_N[order_N],
            offsets=(0, *counts.cumsum(0).tolist()),
        )

    @property
    def size(self) -> int:
        return min(self.token_chunk, self.shape_PK[0]) * min(self.vocab_chunk, self.vocab_size)

    def columns(self) -> Iterator[tuple[slice, list[_Block]]]:
        """Runs of the vocabulary, each with its blocks from the first token to the last."""
        number = 0
        num_tokens, num_slots = self.shape_PK
        for first in range(0, self.vocab_size, self.vocab_chunk):
            ids = slice(first, min(first + self.vocab_chunk, self.vocab_size))
            found = []
            for start in range(0, num_tokens, self.token_chunk):
                pairs = slice(self.offsets[number], self.offsets[number + 1])
                places_N = self.places_N[pairs]
                found.append(
                    _Block(
                        rows=slice(start, min(start + self.token_chunk, num_tokens)),
                        ids=ids,
                        places_N=places_N,
                        rows_N=places_N // num_slots - start,
                        cols_N=self.ids_N[pairs] - first,
                    )
                )
                number += 1
            yield ids, found


class _Scorer:
    """Scores of one block at a time, in one buffer."""

    def __init__(
        self,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        *,
        temperature: float,
        size: int,
    ) -> None:
        # Dividing [P, H] by the temperature is as good as dividing [P, V], and V is larger.
        self.hidden_PH = in_compute_dtype(hidden_PH) / temperature
        self._weight_VH, self._bias_V = weight_VH, bias_V
        self._temperature = temperature
        self._buffer = self.hidden_PH.new_empty(size)
        self.weight = self.hidden_PH.new_empty(0)
        self._bias: Tensor | None = None

    def take(self, ids: slice) -> None:
        """Widen this run of the head; blocks of it follow."""
        self.weight = self._weight_VH[ids].to(self.hidden_PH.dtype)
        if self._bias_V is not None:
            self._bias = self._bias_V[ids].to(self.hidden_PH.dtype) / self._temperature

    def scores(self, rows: slice) -> Tensor:
        """[rows, ids taken]; valid until the next call."""
        shape = (rows.stop - rows.start, len(self.weight))
        out = self._buffer[: shape[0] * shape[1]].view(shape)
        torch.mm(self.hidden_PH[rows], self.weight.t(), out=out)
        return out if self._bias is None else out.add_(self._bias)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_PH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        blocks: _Blocks,
        temperature: float,
        kept_scores: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        scorer = _Scorer(hidden_PH, weight_VH, bias_V, temperature=temperature, size=blocks.size)
        picked_PK = scorer.hidden_PH.new_zeros(blocks.shape_PK)
        running = _Running(scorer.hidden_PH, blocks.size)
        room = kept_scores if any(ctx.needs_input_grad) else 0
        kept: dict[tuple[int, int], Tensor] = {}
        for ids, column in blocks.columns():
            scorer.take(ids)
            for block in column:
                scores = scorer.scores(block.rows)
                picked_PK.view(-1)[block.places_N] = scores[block.rows_N, block.cols_N]
                if scores.numel() <= room:
                    room -= scores.numel()
                    kept[block.corner] = scores.clone()
                running.add(block.rows, scores)
        normaliser_P, entropy_P = running.results()
        ctx.save_for_backward(hidden_PH, weight_VH, bias_V, normaliser_P, entropy_P)
        ctx.blocks, ctx.temperature, ctx.kept = blocks, temperature, kept
        ctx.set_materialize_grads(False)
        return picked_PK, normaliser_P, entropy_P

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_PH, weight_VH, bias_V, normaliser_P, entropy_P = ctx.saved_tensors
        blocks: _Blocks = ctx.blocks
        scorer = _Scorer(
            hidden_PH, weight_VH, bias_V, temperature=ctx.temperature, size=blocks.size
        )
        grad_hidden_PH = torch.zeros_like(scorer.hidden_PH)
        grad_weight_VH = torch.empty_like(weight_VH)
        grad_bias_V = None if bias_V is None else torch.empty_like(bias_V)
        grad_scores_PK, grad_normaliser_P, grad_entropy_P = grads
        is_dense = grad_normaliser_P is not None or grad_entropy_P is not None
        for ids, column in blocks.columns():
            scorer.take(ids)
            grad_weight = torch.zeros_like(scorer.weight)
            grad_bias = scorer.weight.new_zeros(len(scorer.weight))
            for block in column:
                asked_N = None
                if grad_scores_PK is not None:
                    asked_N = grad_scores_PK.reshape(-1)[block.places_N]
                if not is_dense:
                    if asked_N is not None:
                        _add_pairs(grad_hidden_PH, grad_weight, grad_bias, scorer, block, asked_N)
                    continue
                rows = block.rows
                # Taken out, for it is overwritten: a second backward pass computes it again.
                scores = ctx.kept.pop(block.corner, None)
                grad = _score_gradients(
                    scorer.scores(rows) if scores is None else scores,
                    normaliser_P[rows],
                    None if grad_normaliser_P is None else grad_normaliser_P[rows],
                    entropy_P[rows],
                    None if grad_entropy_P is None else grad_entropy_P[rows],
                )
                if asked_N is not None:
                    grad.index_put_((block.rows_N, block.cols_N), asked_N, accumulate=True)
                grad_hidden_PH[rows].addmm_(grad, scorer.weight)
                grad_weight.addmm_(grad.t(), scorer.hidden_PH[rows])
                if grad_bias_V is not None:
                    grad_bias.add_(grad.sum(dim=0))
            grad_weight_VH[ids] = grad_weight  # Rounded here, once.
            if grad_bias_V is not None:
                grad_bias_V[ids] = grad_bias.div_(ctx.temperature)
        grad_hidden_PH.div_(ctx.temperature)
        return grad_hidden_PH.to(hidden_PH.dtype), grad_weight_VH, grad_bias_V, None, None, None


class _Running:
    """Largest score, sum of exp and first moment of each token, over the blocks seen so far."""

    def __init__(self, hidden_PH: Tensor, size: int) -> None:
        # The lowest finite number: the first block's share of it is exp(-huge) = 0, never nan.
        self._top_P = hidden_PH.new_full((len(hidden_PH),), torch.finfo(hidden_PH.dtype).min)
        self._total_P = torch.zeros_like(self._top_P)
        self._moment_P = torch.zeros_like(self._top_P)
        """Sum of exp(score - top) * (score - top)."""
        self._buffer = hidden_PH.new_empty(size)

    def add(self, rows: slice, scores: Tensor) -> None:
        """Overwrites `scores`."""
        before, total, moment = self._top_P[rows], self._total_P[rows], self._moment_P[rows]
        top = torch.maximum(before, scores.amax(dim=1))
        shift = before - top
        share = shift.exp()
        moment.add_(shift * total).mul_(share)
        total.mul_(share)
        scores.sub_(top[:, None])
        weights = torch.exp(scores, out=self._buffer[: scores.numel()].view(scores.shape))
        total.add_(weights.sum(dim=1))
        moment.add_(weights.mul_(scores).sum(dim=1))
        before.copy_(top)

    def results(self) -> tuple[Tensor, Tensor]:
        """Normaliser and entropy."""
        log_total_P = self._total_P.log()
        return self._top_P + log_total_P, log_total_P - self._moment_P / self._total_P


def _score_gradients(
    scores: Tensor,
    normaliser: Tensor,
    grad_normaliser: Tensor | None,
    entropy: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Gradient in each score of a block through normaliser and entropy; overwrites `scores`.

    d normaliser / d s_v = p_v; d entropy / d s_v = -p_v (log p_v + entropy).
    """
    logprobs = scores.sub_(normaliser[:, None])
    if grad_entropy is None:
        assert grad_normaliser is not None
        return logprobs.exp_().mul_(grad_normaliser[:, None])
    pushes = (logprobs + entropy[:, None]).mul_(-grad_entropy[:, None])
    if grad_normaliser is not None:
        pushes.add_(grad_normaliser[:, None])
    return logprobs.exp_().mul_(pushes)


def _add_pairs(
    grad_hidden_PH: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    scorer: _Scorer,
    block: _Block,
    asked_N: Tensor,
) -> None:
    """Gradients where only the scores asked for have one: exact kept sets. No scores are needed."""
    hidden, grad_hidden = scorer.hidden_PH[block.rows], grad_hidden_PH[block.rows]
    for first in range(0, len(asked_N), PAIR_CHUNK):
        part = slice(first, first + PAIR_CHUNK)
        rows_N, cols_N, grad_N1 = block.rows_N[part], block.cols_N[part], asked_N[part, None]
        grad_hidden.index_add_(0, rows_N, scorer.weight[cols_N].mul_(grad_N1))
        grad_weight.index_add_(0, cols_N, hidden[rows_N].mul_(grad_N1))
    grad_bias.index_add_(0, block.cols_N, asked_N)
