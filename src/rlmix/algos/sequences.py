"""Sums, means and minima over whole sequences, given back to each of their tokens.

A sequence is all policy tokens of one sample; the tokens of the environment between them do not
count. Invariants: sums are accumulated in float64, so that the order of tokens does not show; a
call must hold whole sequences, which packing guarantees (a sample is never split).
"""

# T policy tokens, S sequences

import torch
from torch import Tensor


def sequence_sum(values_T: Tensor, sequences_T: Tensor) -> Tensor:
    """[T] sum of `values_T` over the sequence that each token belongs to.

    Args:
        values_T: float [T].
        sequences_T: int64 [T], any ids >= 0; equal ids belong together.
    Returns:
        float [T], the dtype of `values_T`.
    """
    sums_S, _, index_T = _sums(values_T, sequences_T)
    return sums_S[index_T].to(values_T.dtype)


def sequence_mean(values_T: Tensor, sequences_T: Tensor) -> Tensor:
    """[T] mean of `values_T` over the sequence of each token; arguments as in `sequence_sum`."""
    sums_S, counts_S, index_T = _sums(values_T, sequences_T)
    return (sums_S / counts_S)[index_T].to(values_T.dtype)


def sequence_min(values_T: Tensor, sequences_T: Tensor) -> Tensor:
    """[T] least of `values_T` in the sequence of each token; arguments as in `sequence_sum`."""
    num_sequences, index_T = _index(sequences_T)
    least_S = values_T.new_full((num_sequences,), float("inf"))
    return least_S.scatter_reduce(0, index_T, values_T, "amin")[index_T]


def sequence_length(sequences_T: Tensor) -> Tensor:
    """float64 [T] number of tokens in the sequence of each token."""
    return sequence_sum(torch.ones_like(sequences_T, dtype=torch.float64), sequences_T)


def count_sequences(sequences_T: Tensor) -> int:
    """Number of different sequences."""
    return _index(sequences_T)[0]


def _index(sequences_T: Tensor) -> tuple[int, Tensor]:
    """(number of sequences, int64 [T] place of each token's sequence among them)."""
    unique_S, index_T = torch.unique(sequences_T, return_inverse=True)
    return unique_S.numel(), index_T


def _sums(values_T: Tensor, sequences_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(sums, float64 [S]; lengths, float64 [S]; place of each token's sequence, int64 [T])."""
    num_sequences, index_T = _index(sequences_T)
    zeros_S = torch.zeros(num_sequences, dtype=torch.float64, device=values_T.device)
    sums_S = zeros_S.index_add(0, index_T, values_T.double())
    counts_S = zeros_S.index_add(0, index_T, torch.ones_like(values_T, dtype=torch.float64))
    return sums_S, counts_S, index_T
