"""Trainable token sequences, as they travel from the batch room to the trainer."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample:
    """One token sequence with everything the loss needs. T tokens, K kept-set slots.

    Position t holds the facts about token `ids[t]` (not about its successor). Positions with
    mask 0 hold zeros in the other arrays.
    """

    session_id: str
    ids: np.ndarray
    """int32 [T]."""
    mask: np.ndarray
    """bool [T]: True where the policy sampled the token."""
    sampler_logprobs: np.ndarray
    """float32 [T], natural log, of the distribution really sampled from."""
    advantage: float
    """Detached, the same for every sampled token of the trajectory."""
    versions: np.ndarray
    """int32 [T]: weight version that sampled the token; -1 where mask is False."""
    pools: np.ndarray
    """int16 [T]: index into `pool_names`; -1 where mask is False."""
    pool_names: tuple[str, ...]
    kept_offsets: np.ndarray | None = None
    """int32 [T + 1]: token t's kept set is slots kept_offsets[t]:kept_offsets[t+1]."""
    kept_ids: np.ndarray | None = None
    """int32 [total slots]."""
    kept_logprobs: np.ndarray | None = None
    """float32 [total slots], the sampler's, summing to 1 per token in exp."""
    kept_exact: bool = True
    """True: the kept sets are the whole support that was sampled from. False: they are only the
    most likely candidates, with full-vocabulary logprobs that sum to less than 1 in exp."""
    head_offsets: np.ndarray | None = None
    """int32 [T + 1], beside exact kept sets: token t's head is head_offsets[t]:head_offsets[t+1],
    empty for the many tokens without one. None: no turn recorded one."""
    head_ids: np.ndarray | None = None
    """int32 [total head slots]."""
    head_logprobs: np.ndarray | None = None
    """float32 [total head slots], the sampler's over the whole vocabulary, after temperature."""
    experts: np.ndarray | None = None
    """int16 [T, layers, top_k], the experts that the sampler routed each token to; -1 where that
    was not recorded. None: no turn recorded them."""
    reward: float = 0.0
