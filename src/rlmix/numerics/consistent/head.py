"""Logprobs over the vocabulary, taken in tiles of fixed width, the same from hidden states (the
trainer) and from finished logits (the engine).

Invariant: only the real vocabulary takes part, every tile starts at a multiple of VOCAB_TILE, tiles
are added in order, the temperature divides in float32. No [tokens, vocabulary] tensor is kept.
"""

# P positions, V vocabulary, K ids asked for, H hidden

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlmix.numerics.consistent.contract import min_rows
from rlmix.numerics.consistent.linear import linear

VOCAB_TILE = 2048
"""Ids of one tile: 8 KiB of logits a row, so a thousand rows stay in the cache."""

MIN_TAIL = 64
"""The last tile is wider than this, or part of the one before it: libraries multiply a few columns,
and above all a single one, in an order that depends on the number of rows."""

KEPT_TILE = 64
"""Kept sets are added in runs of this many slots; more padding adds runs of 0."""


@dataclass(frozen=True, slots=True)
class VocabScores:
    """What a loss needs to know of a distribution over the vocabulary."""

    scores_PK: Tensor
    """float32, logit / temperature of each id asked for; differentiable."""
    normaliser_P: Tensor
    """float32, log of the sum of exp over all scores; differentiable. Logprob = score - this."""
    entropy_P: Tensor
    """float32, nats, without gradient."""


def vocab_tiles(vocab_size: int) -> Iterator[tuple[int, int]]:
    """First id of each tile, and the one after its last."""
    firsts = range(0, max(1, vocab_size - MIN_TAIL), VOCAB_TILE)
    yield from zip(firsts, [*firsts[1:], vocab_size], strict=True)


def _reduce(
    tile_PV: Callable[[int, int], Tensor], ids_PK: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of the ids, normaliser and entropy, from a function that makes one tile's scores."""
    picked_PK = torch.zeros(ids_PK.shape)
    largest, sums, moments = [], [], []
    for first, last in vocab_tiles(vocab_size):
        scores = tile_PV(first, last)
        inside = ids_PK - first
        is_inside = (inside >= 0) & (inside < last - first)
        found = scores.gather(1, inside.clamp(0, last - first - 1))
        picked_PK = torch.where(is_inside, found, picked_PK)
        top = scores.amax(-1, keepdim=True)
        weights = (scores - top).exp_()
        largest.append(top)
        sums.append(weights.sum(-1, keepdim=True))
        moments.append(weights.mul_(scores).sum(-1, keepdim=True))
    top = largest[0]
    for other in largest[1:]:
        top = torch.maximum(top, other)
    total, moment = torch.zeros_like(top), torch.zeros_like(top)
    for tile_top, tile_sum, tile_moment in zip(largest, sums, moments, strict=True):
        share = (tile_top - top).exp_()
        total = total + tile_sum * share
        moment = moment + tile_moment * share
    normaliser = total.log().add_(top)
    entropy = normaliser - moment / total
    return picked_PK, normaliser[:, 0], entropy[:, 0]


class _VocabScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_PH: Tensor, weight_VH: Tensor, ids_PK: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        def tile(first: int, last: int) -> Tensor:
            return F.linear(hidden_PH, weight_VH[first:last]).div_(temperature)

        found = _reduce(tile, ids_PK, len(weight_VH))
        ctx.save_for_backward(hidden_PH, weight_VH, ids_PK, found[1])
        ctx.temperature = temperature
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_PH, weight_VH, ids_PK, normaliser_P = ctx.saved_tensors
        grad_scores_PK, grad_normaliser_P = grads[0], grads[1]
        grad_hidden = torch.zeros_like(hidden_PH)
        grad_weight = torch.empty_like(weight_VH)
        for first, last in vocab_tiles(len(weight_VH)):
            weight = weight_VH[first:last]
            grad = F.linear(hidden_PH, weight).div_(ctx.temperature)
            grad.sub_(normaliser_P[:, None]).exp_().mul_(grad_normaliser_P[:, None])
            inside = ids_PK - first
            is_inside = (inside >= 0) & (inside < last - first)
            asked = torch.where(is_inside, grad_scores_PK, 0.0)
            grad.scatter_add_(1, inside.clamp(0, last - first - 1), asked)
            grad.div_(ctx.temperature)
            grad_hidden.addmm_(grad, weight)
            torch.mm(grad.t(), hidden_PH, out=grad_weight[first:last])
        return grad_hidden, grad_weight, None, None


def vocab_scores(
    hidden_PH: Tensor, weight_VH: Tensor, ids_PK: Tensor, *, temperature: float
) -> VocabScores:
    """Scores of some ids, and the normaliser, without keeping logits.

    Args:
        hidden_PH: float32 or bfloat16, the normed last hidden states.
        weight_VH: float32 or bfloat16, rows of the real vocabulary only.
        ids_PK: int64, for example the sampled id beside the kept ones.
        temperature: of the sampling, above 0.
    """
    missing = max(0, min_rows() - len(hidden_PH))
    hidden_PH = F.pad(hidden_PH.float(), (0, 0, 0, missing))
    ids_PK = F.pad(ids_PK, (0, 0, 0, missing))
    found = _VocabScores.apply(hidden_PH, weight_VH.float(), ids_PK, temperature)
    kept = len(hidden_PH) - missing
    return VocabScores(*(part[:kept] for part in found))


def head_logits(hidden_PH: Tensor, weight_VH: Tensor) -> Tensor:
    """All logits, float32 [P, V], multiplied in the tiles in which `vocab_scores` multiplies."""
    hidden_PH = hidden_PH.float()
    tiles = [
        linear(hidden_PH, weight_VH[first:last]) for first, last in vocab_tiles(len(weight_VH))
    ]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles, dim=1)


def scores_of_logits(logits_RV: Tensor, ids_RK: Tensor, *, temperature: float) -> VocabScores:
    """The same from logits that exist already (`head_logits`), with the same bits.

    Args:
        logits_RV: float32, not divided by the temperature.
    """

    def tile(first: int, last: int) -> Tensor:
        return logits_RV[:, first:last] / temperature

    return VocabScores(*_reduce(tile, ids_RK, logits_RV.shape[1]))


def kept_normaliser(scores_PK: Tensor, kept_PK: Tensor) -> Tensor:
    """log of the sum of exp over each kept set, float32 [P], with gradient; the same however many
    padded slots follow.

    Args:
        scores_PK: float32, as in `VocabScores`, the kept ids in the recorded order.
        kept_PK: bool, True in real slots, which come first.
    """
    padding = -scores_PK.shape[1] % KEPT_TILE
    scores_PK = F.pad(scores_PK, (0, padding))
    kept_PK = F.pad(kept_PK, (0, padding))
    lowest = torch.finfo(torch.float32).min
    top = scores_PK.detach().masked_fill(~kept_PK, lowest).amax(-1, keepdim=True)
    shifted = (scores_PK - top).masked_fill(~kept_PK, lowest)
    runs = shifted.exp().view(len(scores_PK), -1, KEPT_TILE).sum(-1)
    total = runs[:, 0]
    for run in range(1, runs.shape[1]):
        total = total + runs[:, run]
    return total.log() + top[:, 0]
