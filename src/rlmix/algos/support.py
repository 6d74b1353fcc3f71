"""The candidates of a sampling step, with what each policy gave them.

Two kinds. A kept set is the whole support that the sampler drew from (top-p, top-k); both
policies are renormalised on it, so sums over it are exact. A head is only the most likely
candidates, with full-vocabulary probabilities; what lies outside has to be modelled.

Invariant: a padded slot is -inf on either side or both and never takes part in arithmetic.
"""

# T policy tokens, K candidate slots, V vocabulary

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Support:
    """Candidates of T tokens, padded to K slots with -inf on either side or both."""

    trainer_logprobs_TK: Tensor
    """float [T, K], natural log, differentiable; same order as the sampler's."""
    sampler_logprobs_TK: Tensor
    """float [T, K], natural log."""
    is_exact: bool
    """True: a kept set, both sides sum to 1 in exp. False: a head of the full vocabulary."""

    def __post_init__(self) -> None:
        trainer, sampler = self.trainer_logprobs_TK.shape, self.sampler_logprobs_TK.shape
        if len(trainer) != 2 or trainer != sampler:
            raise ValueError(
                f"support: trainer {tuple(trainer)} and sampler {tuple(sampler)} must both be "
                "[T, K] with equal sizes"
            )


def kept_mask(logprobs_TK: Tensor) -> Tensor:
    """bool [T, K]: True in real slots. NaN counts as real, so that it is seen and not hidden."""
    return ~torch.isneginf(logprobs_TK)


def candidate_mask(support: Support) -> Tensor:
    """bool [T, K]: True where neither side is padded.

    A candidate to which the trainer gives no probability at all is left out with the padding: its
    score has no gradient to pass on, and its logprob no finite value.
    """
    return kept_mask(support.sampler_logprobs_TK) & kept_mask(support.trainer_logprobs_TK.detach())


def on_kept_set(
    sampled_T: Tensor, kept_scores_TK: Tensor, kept_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Logprobs renormalised on kept sets, from scores (logits over the temperature).

    Args:
        sampled_T: float [T], score of the sampled id, which must be in its own kept set.
        kept_scores_TK: float [T, K], anything in padded slots.
        kept_TK: bool [T, K], True in real slots.
    Returns:
        ([T] logprob of the sampled id, [T, K] logprobs of the kept ids, -inf in padded slots).
    """
    # The lowest finite number instead of -inf: its softmax is 0 and its gradient is 0, not nan.
    lowest = torch.finfo(kept_scores_TK.dtype).min
    normaliser_T = kept_scores_TK.masked_fill(~kept_TK, lowest).logsumexp(dim=1)
    return on_vocabulary(sampled_T, kept_scores_TK, kept_TK, normaliser_T)


def on_vocabulary(
    sampled_T: Tensor, scores_TK: Tensor, kept_TK: Tensor, normaliser_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Logprobs of the sampled id and of some others from their scores and the normaliser.

    Arguments as in `on_kept_set`; the sampled id may lie outside the others.
    """
    logprobs_TK = scores_TK - normaliser_T[:, None]
    return sampled_T - normaliser_T, logprobs_TK.masked_fill(~kept_TK, float("-inf"))


def replayed_logprobs(
    logits_TV: Tensor, ids_T: Tensor, kept_ids_TK: Tensor, kept_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Trainer logprobs renormalised on the recorded kept sets: log p^S.

    The trainer's own top-p set would differ from the recorded one, so it is never recomputed.

    Args:
        logits_TV: float32 or wider [T, V], already divided by the sampling temperature.
        ids_T: int64 [T], the sampled ids; each must be in its own kept set.
        kept_ids_TK: int64 [T, K], any valid id in padded slots.
        kept_TK: bool [T, K], True in real slots.
    Returns:
        ([T] logprob of the sampled id, [T, K] logprobs of the kept ids, -inf in padded slots).
    Source: arXiv:2512.02556 section 3.1 (Keep Sampling Mask).
    """
    sampled_T = logits_TV.gather(1, ids_T[:, None])[:, 0]
    return on_kept_set(sampled_T, logits_TV.gather(1, kept_ids_TK), kept_TK)


def head_logprobs(
    logits_TV: Tensor, ids_T: Tensor, head_ids_TK: Tensor, kept_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Full-vocabulary trainer logprobs of the sampled id and of a recorded head.

    Args and shapes as in `replayed_logprobs`; the sampled id may lie outside the head.
    """
    sampled_T = logits_TV.gather(1, ids_T[:, None])[:, 0]
    scores_TK = logits_TV.gather(1, head_ids_TK)
    return on_vocabulary(sampled_T, scores_TK, kept_TK, logits_TV.logsumexp(dim=1))


def full_logprobs(logits_TV: Tensor, ids_T: Tensor) -> Tensor:
    """[T] full-vocabulary logprob of each sampled id; arguments as in `replayed_logprobs`."""
    return logits_TV.gather(1, ids_T[:, None])[:, 0] - logits_TV.logsumexp(dim=1)


def entropy(logits_TV: Tensor) -> Tensor:
    """[T] entropy in nats of the trainer's distribution over the whole vocabulary."""
    logprobs_TV = logits_TV.log_softmax(dim=1)
    return -(logprobs_TV.exp() * logprobs_TV).sum(dim=1)
