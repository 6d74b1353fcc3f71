"""From logits to recorded tokens: temperature, draw, logprobs, kept sets.

Invariant: each request is sampled by its own parameters and its own uniform numbers, so what
shares the batch with it changes nothing.
"""

# R sampled rows, V vocabulary

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlmix.engine.embedded.requests import Request
from rlmix.engine.sampling import KeptSets, sample, sample_truncated
from rlmix.numerics.consistent.head import kept_normaliser, scores_of_logits


class Sampler:
    """Samples one token for each of a batch of requests."""

    def __init__(self, *, mask_cap: int, is_exact: bool = False) -> None:
        """`is_exact`: reported logprobs are made as the trainer makes them, in float32 tiles."""
        self._mask_cap = mask_cap
        self._is_exact = is_exact
        self._limits: _Limits | None = None

    @torch.inference_mode()
    def sample(self, requests: Sequence[Request], logits_RV: Tensor, *, version: int) -> None:
        """Append one token to each request; sets the finish reason of those that end."""
        limits = self._limits
        if limits is None or not limits.fits(requests):
            limits = self._limits = _Limits(requests, vocab_size=logits_RV.shape[1])
        tempered_RV = logits_RV
        if limits.temperatures is not None:
            tempered_RV = logits_RV / limits.temperatures
        if self._is_exact:
            logprobs = exact_logprobs(tempered_RV)
        else:
            logprobs = torch.log_softmax(tempered_RV, dim=-1)
        logprobs_RV, scores_RV = logprobs.numpy(), logits_RV.numpy()
        uniforms = np.array([r.uniforms.at(len(r.output_ids)) for r in requests])
        # A NaN or Inf anywhere in a row makes the whole row NaN; such a request cannot go on.
        broken = np.isnan(logprobs_RV[:, 0])
        if broken.any():
            for row in broken.nonzero()[0].tolist():
                requests[row].is_broken = True
                requests[row].finish_reason = {"type": "abort", "message": "logits are NaN or Inf"}
            logprobs_RV = np.where(broken[:, None], np.float32(0), logprobs_RV)
            scores_RV = np.where(broken[:, None], np.float32(0), scores_RV)
        ids = np.empty(len(requests), dtype=np.int64)
        if len(limits.plain):
            ids[limits.plain] = sample(_rows(logprobs_RV, limits.plain), uniforms[limits.plain])
        if len(limits.cut):
            ids[limits.cut], sets = sample_truncated(
                _rows(scores_RV, limits.cut),
                logprobs_BV=_rows(logprobs_RV, limits.cut),
                temperatures_B=limits.cut_temperatures,
                top_ps_B=limits.top_ps,
                top_ks_B=limits.top_ks,
                uniforms_B=uniforms[limits.cut],
            )
            if self._is_exact and any(r.mask_mode is not None for r in limits.cut_requests):
                sets = exact_sets(sets, _rows(tempered_RV.numpy(), limits.cut), ids[limits.cut])
            self._record_sets(limits.cut_requests, sets)
        if limits.num_top:
            _record_heads(requests, logprobs, limits.num_top)
        chosen = logprobs_RV[np.arange(len(ids)), ids]
        for row, (request, token) in enumerate(zip(requests, ids.tolist(), strict=True)):
            if request.finish_reason is None:
                request.append(token, version=version)
                request.logprobs.append(chosen[row])

    def _record_sets(self, requests: Sequence[Request], sets: KeptSets) -> None:
        offsets = sets.offsets.tolist()
        for index, request in enumerate(requests):
            if request.mask_mode is None or request.finish_reason is not None:
                continue
            start, end = offsets[index], offsets[index + 1]
            if end - start > self._mask_cap:
                request.finish_reason = {
                    "type": "abort",
                    "message": f"kept set of {end - start} tokens; at most {self._mask_cap} are "
                    "recorded (--sampling-mask-max-tokens)",
                }
                continue
            request.kept_sets.append((sets.ids_M[start:end], sets.logprobs_M[start:end]))
            request.sampling_logprobs.append(sets.sampled_logprobs_B[index])


def exact_logprobs(tempered_RV: Tensor) -> Tensor:
    """Log-softmax with the bits of the trainer's `vocab_scores`.

    Args:
        tempered_RV: float32, logits over temperature.
    """
    nothing_R0 = torch.empty((len(tempered_RV), 0), dtype=torch.int64)
    normaliser_R = scores_of_logits(tempered_RV, nothing_R0, temperature=1.0).normaliser_P
    return tempered_RV - normaliser_R[:, None]


def exact_sets(sets: KeptSets, tempered_RV: np.ndarray, ids_R: np.ndarray) -> KeptSets:
    """The same kept sets with logprobs that have the bits of the trainer's replay.

    Args:
        tempered_RV: float32, logits over temperature of the rows that the sets belong to.
        ids_R: the drawn ids.
    """
    counts_R = np.diff(sets.offsets)
    rows_M = np.repeat(np.arange(len(counts_R)), counts_R)
    slots_M = np.arange(len(rows_M)) - sets.offsets[:-1][rows_M]
    scores_M = tempered_RV[rows_M, sets.ids_M]
    scores_RK = np.zeros((len(counts_R), int(counts_R.max())), dtype=np.float32)
    scores_RK[rows_M, slots_M] = scores_M
    is_kept_RK = np.arange(scores_RK.shape[1]) < counts_R[:, None]
    normaliser_R = kept_normaliser(
        torch.from_numpy(scores_RK), torch.from_numpy(is_kept_RK)
    ).numpy()
    drawn_R = tempered_RV[np.arange(len(ids_R)), ids_R]
    return replace(
        sets,
        logprobs_M=scores_M - normaliser_R[rows_M],
        sampled_logprobs_B=drawn_R - normaliser_R,
    )


class _Limits:
    """Sampling parameters of a batch as arrays; made anew when the batch changes."""

    def __init__(self, requests: Sequence[Request], *, vocab_size: int) -> None:
        self._requests = list(requests)
        values = [request.temperature for request in requests]
        self.temperatures = None
        if any(value != 1.0 for value in values):
            self.temperatures = torch.tensor(values).unsqueeze(1)
        is_cut = np.array(
            [
                request.top_p < 1.0 or request.top_k < vocab_size or request.mask_mode is not None
                for request in requests
            ]
        )
        self.plain = (~is_cut).nonzero()[0]
        self.cut = is_cut.nonzero()[0]
        self.cut_requests = [requests[row] for row in self.cut.tolist()]
        self.cut_temperatures = np.array([request.temperature for request in self.cut_requests])
        self.top_ps = np.array([request.top_p for request in self.cut_requests])
        self.top_ks = np.array([request.top_k for request in self.cut_requests])
        self.num_top = max(request.num_top_logprobs for request in requests)

    def fits(self, requests: Sequence[Request]) -> bool:
        return len(requests) == len(self._requests) and all(
            old is new for old, new in zip(self._requests, requests, strict=True)
        )


def _rows(values: np.ndarray, rows: np.ndarray) -> np.ndarray:
    return values if len(rows) == len(values) else values[rows]


def _record_heads(requests: Sequence[Request], logprobs: Tensor, num_top: int) -> None:
    rows = [row for row, request in enumerate(requests) if request.num_top_logprobs]
    top_values, top_ids = logprobs[rows].topk(num_top, dim=-1)
    values_RK, ids_RK = top_values.numpy(), top_ids.int().numpy()
    for row, values, ids in zip(rows, values_RK, ids_RK, strict=True):
        request = requests[row]
        if request.finish_reason is None:
            count = request.num_top_logprobs
            request.heads.append((ids[:count], values[:count]))
