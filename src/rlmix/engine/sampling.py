"""Draws one token per row and says from which set it was drawn.

Invariant: the draw of a row depends on its logprobs, its limits and its uniform number only,
never on the rows beside it; the drawn token is always in the reported kept set.

Truncation as SGLang's PyTorch sampler does it: a token stays when its rank by probability is
below top_k AND the probability of all likelier tokens is at most top_p.
"""

# B row, V vocabulary, M members of all kept sets together

from dataclasses import dataclass

import numpy as np

FIRST_LOOK = 64
"""How many of the likeliest tokens are summed before looking further: top-p sets of a trained
policy are nearly always smaller."""

_BLOCK_UNIFORMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptSets:
    """Kept sets of B rows, one after the other, each in ascending id order."""

    ids_M: np.ndarray
    """int32."""
    logprobs_M: np.ndarray
    """float32; each row's sums to 1 in exp."""
    offsets: np.ndarray
    """int64 [B + 1]: row b holds members offsets[b]:offsets[b+1]."""
    sampled_logprobs_B: np.ndarray
    """float32: the drawn token's logprob within its set."""


class UniformStream:
    """Uniform numbers of one request: number t belongs to output token t, whatever else runs."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed & (2**64 - 1)))
        self._block = self._generator.random(_BLOCK_UNIFORMS)
        self._block_start = 0

    def at(self, position: int) -> float:
        """The number for output token `position`; positions must not decrease."""
        while position - self._block_start >= _BLOCK_UNIFORMS:
            self._block = self._generator.random(_BLOCK_UNIFORMS)
            self._block_start += _BLOCK_UNIFORMS
        return float(self._block[position - self._block_start])


def sample(logprobs_BV: np.ndarray, uniforms_B: np.ndarray) -> np.ndarray:
    """One id per row from the whole vocabulary.

    Args:
        logprobs_BV: float32, log-softmax of the logits over temperature.
        uniforms_B: float64 in [0, 1).
    Returns:
        int64 [B].
    """
    cumulative = np.exp(logprobs_BV).astype(np.float64).cumsum(axis=1)
    targets = uniforms_B * cumulative[:, -1]
    # A target at the very end must not step past the last token that has any probability.
    ids = (cumulative <= targets[:, None]).sum(axis=1)
    return np.minimum(ids, logprobs_BV.shape[1] - 1)


def sample_truncated(
    logits_BV: np.ndarray,
    *,
    logprobs_BV: np.ndarray,
    temperatures_B: np.ndarray,
    top_ps_B: np.ndarray,
    top_ks_B: np.ndarray,
    uniforms_B: np.ndarray,
) -> tuple[np.ndarray, KeptSets]:
    """One id per row from its top-k, top-p set.

    Args:
        logits_BV: float32. The recorded logprobs are made from these, in float64 and rounded once:
            rounded at every step they would be off by more than 1e-6 where logits are large.
        logprobs_BV: float32, log-softmax of the logits over temperature: what decides the set.
        temperatures_B: float64, above 0.
        top_ps_B: float64; 1 keeps all.
        top_ks_B: int64, at least 1; V keeps all.
        uniforms_B: float64 in [0, 1).
    Returns:
        int64 [B] ids, and the sets they were drawn from.
    """
    flat_M, counts_B = _kept(np.exp(logprobs_BV), top_ps_B=top_ps_B, top_ks_B=top_ks_B)
    rows_M = np.repeat(np.arange(len(counts_B)), counts_B)
    ids_M = flat_M - rows_M * logprobs_BV.shape[1]
    offsets = np.concatenate(([0], counts_B.cumsum()))
    starts_B, ends_B = offsets[:-1], offsets[1:]
    kept_M = logits_BV.ravel()[flat_M].astype(np.float64) / temperatures_B[rows_M]
    kept_M -= np.maximum.reduceat(kept_M, starts_B)[rows_M]
    weights_M = np.exp(kept_M)
    cumulative_M = weights_M.cumsum()
    before_B = np.where(starts_B > 0, cumulative_M[starts_B - 1], 0.0)
    mass_B = np.add.reduceat(weights_M, starts_B)
    drawn_B = np.searchsorted(cumulative_M, before_B + uniforms_B * mass_B, side="right")
    # Rounding in the running sum must not move a draw into a neighbour's set.
    drawn_B = np.clip(drawn_B, starts_B, ends_B - 1)
    renormalised_M = (kept_M - np.log(mass_B)[rows_M]).astype(np.float32)
    sets = KeptSets(
        ids_M=ids_M.astype(np.int32),
        logprobs_M=renormalised_M,
        offsets=offsets,
        sampled_logprobs_B=renormalised_M[drawn_B],
    )
    return ids_M[drawn_B], sets


def _kept(
    probs_BV: np.ndarray, *, top_ps_B: np.ndarray, top_ks_B: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens stay: flat indices into [B, V], ascending, and their number per row."""
    num_tokens = probs_BV.shape[1]
    sorted_BV = np.sort(probs_BV, axis=1)[:, ::-1]
    look = min(FIRST_LOOK, num_tokens)
    while True:
        leading = sorted_BV[:, :look].astype(np.float64)
        cumulative = leading.cumsum(axis=1)
        stays = (cumulative - leading) <= top_ps_B[:, None]
        counts_B = np.minimum(stays.sum(axis=1), top_ks_B)
        if look == num_tokens or ((counts_B < look) | (top_ks_B <= look)).all():
            break
        look = num_tokens
    thresholds_B = sorted_BV[np.arange(len(counts_B)), counts_B - 1]
    members_BV = probs_BV >= thresholds_B[:, None]
    flat_M = np.flatnonzero(members_BV)
    if len(flat_M) != counts_B.sum():
        # Several tokens share the last place's probability: the ones with lower ids stay.
        for row, excess in enumerate(members_BV.sum(axis=1) - counts_B):
            tied = (probs_BV[row] == thresholds_B[row]).nonzero()[0]
            members_BV[row, tied[len(tied) - excess :]] = False
        flat_M = np.flatnonzero(members_BV)
    return flat_M, counts_B
