"""The trainer's own noise floor: what two evaluations of the same weights differ by.

A few samples of each step are scored again, each alone instead of packed with others, and with the
other of two equally good attention implementations: on some machines the shape of a batch changes
no bit. So the difference is rounding in another order of sums. A pool whose mismatch is near it
cannot be told from the trainer itself. In exact mode there is no other order, and it must be 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlmix.algos.corrections import log_ratio
from rlmix.algos.metrics import TokenFacts, mismatch_metrics
from rlmix.batch.packing import MicroBatch, pack_samples
from rlmix.core.sample import TrainSample
from rlmix.trainer.policy import Policy
from rlmix.trainer.spec import AlgoSpec

SAMPLES_PER_SECOND_LOOK = 64
"""One sample of so many is scored again; without a gradient that is about 1 % of a step."""

MAX_SECOND_LOOKS = 8
"""Of one step: more tokens would not make the mean of many steps much better."""


@torch.no_grad()
def noise_floor(
    policy: Policy,
    samples: Sequence[TrainSample],
    micro_batches: Sequence[MicroBatch],
    facts: TokenFacts,
    algo: AlgoSpec,
    *,
    step: int,
) -> dict[str, float]:
    """Score some of a step's samples another way and compare with what the packed pass gave them.

    Args:
        samples, micro_batches: of the step; `sequences_P` of a micro-batch indexes `samples`.
        facts: of all micro-batches in their order, taken with the weights that `policy` has now.
        step: chooses micro-batch and rows, so that all of them have their turn.
    Returns:
        `mismatch/noise_floor_mean_abs`, `..._max_abs` (nats), `..._k3`, `..._tokens`; empty when
        no micro-batch holds two samples, because then there is no second shape.
    """
    shared = [i for i, batch in enumerate(micro_batches) if len(batch.session_ids) > 1]
    if not shared:
        return {}
    number = shared[step % len(shared)]
    batch = micro_batches[number]
    start = sum(before.sampled_P.size for before in micro_batches[:number])
    packed_P = facts.log_ratios_T[start : start + batch.sampled_P.size]
    num_rows = len(batch.session_ids)
    num_looks = min(max(1, len(samples) // SAMPLES_PER_SECOND_LOOK), MAX_SECOND_LOOKS, num_rows)
    rows = [(step + look * num_rows // num_looks) % num_rows for look in range(num_looks)]
    differences: list[Tensor] = []
    for row in rows:
        is_row_P = torch.from_numpy(batch.rows_P == row)
        sample = samples[int(batch.sequences_P[batch.rows_P == row][0])]
        (alone,) = pack_samples([sample], max_tokens=len(sample.ids))
        with policy.computed_otherwise(num_tokens=len(sample.ids)):
            found = policy.token_logprobs(alone, temperature=algo.temperature, replay=algo.replay)
        sampler_P = torch.from_numpy(alone.sampler_logprobs_P)
        differences.append(packed_P[is_row_P] - log_ratio(found.trainer_P.cpu(), sampler_P))
    difference_N = torch.cat(differences)
    measured = mismatch_metrics(difference_N)
    return {
        "mismatch/noise_floor_mean_abs": measured["mismatch/mean_abs"],
        "mismatch/noise_floor_max_abs": measured["mismatch/max_abs"],
        "mismatch/noise_floor_k3": measured["mismatch/k3_kl"],
        "mismatch/noise_floor_tokens": float(difference_N.numel()),
    }
