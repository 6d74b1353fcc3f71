"""A small policy with a KV cache, computed as the trainer does or as a sampler's kernels do.

Features of the state, one head of causal attention over the session so far, two layers of tanh,
a head over the vocabulary. Every matrix is [out, in], as the number formats expect.

Invariant: with `EXACT` numerics the step-by-step decoding and the whole-session pass are the same
function of the same weights; whatever differs between a sampler and the trainer comes from the
weights it was given and from its `Kernel`.
"""

# N sessions, L positions, D width, A attention width, V vocabulary, F features

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from rlmix.numerics import fp8
from rlmix.studies.token_task import LENGTH, NUM_FEATURES, VOCABULARY

WIDTH = 64
ATTENTION_WIDTH = 16

Weights = Mapping[str, Tensor]
"""Float32 matrices by name: embed [D, F], query, key, value [A, D], out [D, A], hidden [D, D],
head [V, D]."""

SHAPES = {
    "embed": (WIDTH, NUM_FEATURES),
    "query": (ATTENTION_WIDTH, WIDTH),
    "key": (ATTENTION_WIDTH, WIDTH),
    "value": (ATTENTION_WIDTH, WIDTH),
    "out": (WIDTH, ATTENTION_WIDTH),
    "hidden": (WIDTH, WIDTH),
    "head": (VOCABULARY, WIDTH),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """How a pool computes, beside the weights it holds."""

    rounds_to_bf16: bool
    """Every product's result is rounded to bfloat16, as activations of real kernels are."""
    tile: int
    """Terms that are added up before partial sums are; decides the order of additions."""
    activations: str = "bf16"
    """What matrices are multiplied by: bf16 (as they are) or fp8 (rounded for each row)."""
    kv: str = "bf16"
    """What the cache keeps: bf16 (as they are) or fp8."""


EXACT = Kernel(rounds_to_bf16=False, tile=WIDTH)
"""The trainer's own: float32, one order."""


def initial_weights(generator: Generator) -> dict[str, Tensor]:
    """Normal float32 weights with variance 1 / columns; the head's are smaller, so that it starts
    unsure."""
    scales = dict.fromkeys(SHAPES, 1.0) | {"head": 0.5, "embed": 4.0}
    return {
        name: torch.randn(shape, generator=generator) * scales[name] / math.sqrt(shape[1])
        for name, shape in SHAPES.items()
    }


def session_logits(weights: Weights, features_NL4: Tensor) -> Tensor:
    """Float32 [N, L, V]: the trainer's pass over whole sessions, differentiable.

    Args:
        features_NL4: int64 [N, L, 4], as `token_task.features` gives them.
    """
    x_NLD = torch.nn.functional.embedding(features_NL4, weights["embed"].t()).sum(dim=2)
    query, key, value = (x_NLD @ weights[name].t() for name in ("query", "key", "value"))
    scores_NLL = query @ key.transpose(1, 2) / math.sqrt(ATTENTION_WIDTH)
    length = features_NL4.shape[1]
    future_LL = torch.ones(length, length, dtype=torch.bool).triu(1)
    mixed_NLA = scores_NLL.masked_fill(future_LL, float("-inf")).softmax(dim=2) @ value
    hidden_NLD = torch.tanh(x_NLD + mixed_NLA @ weights["out"].t())
    return torch.tanh(hidden_NLD @ weights["hidden"].t()) @ weights["head"].t()


class Decoder:
    """One pool's sessions, token by token, with its own kernel and cache."""

    def __init__(self, weights: Weights, kernel: Kernel) -> None:
        self._kernel = kernel
        self._columns_FD = weights["embed"].t()
        # Query, key and value read the same input, so one product gives all three.
        joined = torch.cat([weights[name] for name in ("query", "key", "value")])
        self._matrices = {
            "projections": self._tiled(joined),
            **{name: self._tiled(weights[name]) for name in ("out", "hidden", "head")},
        }
        self._cache_NLA2 = torch.empty(0)
        self._length = 0

    def logits(self, features_N4: Tensor) -> Tensor:
        """Float32 [N, V] for the next token; each call is one position of the same N sessions."""
        x_ND = torch.nn.functional.embedding(features_N4, self._columns_FD).sum(dim=1)
        x_ND = self._rounded(x_ND)
        query_NA, new_NA2 = self._times(x_ND, "projections").split(
            [ATTENTION_WIDTH, 2 * ATTENTION_WIDTH], dim=1
        )
        keys_NLA, values_NLA = self._cached(new_NA2).chunk(2, dim=2)
        scores_NL = (keys_NLA @ query_NA[:, :, None])[:, :, 0] / math.sqrt(ATTENTION_WIDTH)
        mixed_NA = self._rounded((scores_NL.softmax(1)[:, None] @ values_NLA)[:, 0])
        hidden_ND = self._rounded(torch.tanh(x_ND + self._times(mixed_NA, "out")))
        hidden_ND = self._rounded(torch.tanh(self._times(hidden_ND, "hidden")))
        return self._times(hidden_ND, "head")

    def _tiled(self, weight: Tensor) -> Tensor:
        """[tiles, tile, out] of a matrix [out, in]."""
        tile = min(self._kernel.tile, weight.shape[1])
        return weight.t().reshape(-1, tile, weight.shape[0])

    def _times(self, x_ND: Tensor, name: str) -> Tensor:
        if self._kernel.activations == "fp8":
            x_ND = fp8.fake_quantize_activations(x_ND)
        matrix = self._matrices[name]
        if len(matrix) == 1:
            return self._rounded(x_ND @ matrix[0])
        parts = x_ND.reshape(len(x_ND), *matrix.shape[:2]).transpose(0, 1)
        return self._rounded(torch.bmm(parts, matrix).sum(0))

    def _cached(self, new_NA2: Tensor) -> Tensor:
        """[N, L, 2A]: keys and values of all positions so far, with these as the newest."""
        if self._kernel.kv == "fp8":
            new_NA2 = fp8.fake_quantize_kv(new_NA2)
        if self._length == 0:
            self._cache_NLA2 = new_NA2.new_empty(len(new_NA2), LENGTH, new_NA2.shape[1])
        self._cache_NLA2[:, self._length] = new_NA2
        self._length += 1
        return self._cache_NLA2[:, : self._length]

    def _rounded(self, values: Tensor) -> Tensor:
        return values.bfloat16().float() if self._kernel.rounds_to_bf16 else values
