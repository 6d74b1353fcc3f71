"""Stage 0: is it the same question? What makes two lists of logprobs incomparable, in one sentence
each, before anything is computed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlmix.diff.texts import Recorded

CLASS_OF_SETTING = {
    "vocab_size": "vocabulary",
    "temperature": "sampling",
    "top_p": "sampling",
    "top_k": "sampling",
    "top_k_experts": "router",
    "norm_topk_prob": "router",
}
"""Settings whose difference is no hyper-parameter of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """Why two sides cannot be compared."""

    cause: str
    """A framework class, see `findings`."""
    sentence: str


def setting_obstacles(
    trainer: Mapping[str, str | float], pool: Mapping[str, str | float], *, name: str
) -> Iterator[Obstacle]:
    """Settings that both sides state and that differ."""
    for key in sorted(set(trainer) & set(pool)):
        if trainer[key] != pool[key]:
            yield Obstacle(
                cause=CLASS_OF_SETTING.get(key, "hyper-parameter"),
                sentence=f"{key} is {trainer[key]} in the trainer and {pool[key]} in {name}; make "
                "them equal",
            )


def text_obstacles(texts: Sequence[Recorded], *, vocab_size: int) -> Iterator[Obstacle]:
    """Texts that the trainer's model cannot score."""
    for text in texts:
        largest = max(text.ids)
        if largest >= vocab_size or min(text.ids) < 0:
            yield Obstacle(
                cause="vocabulary",
                sentence=f"{text.name} holds token id {largest}; the trainer's vocabulary has "
                f"{vocab_size}",
            )
        if not bool(torch.isfinite(torch.from_numpy(text.logprobs_P)).all()):
            yield Obstacle(
                cause="sampling", sentence=f"{text.name} holds a logprob that is not finite"
            )
        elif float(text.logprobs_P.max()) > 1e-4:
            yield Obstacle(
                cause="sampling",
                sentence=f"{text.name} holds a logprob of {float(text.logprobs_P.max()):.4g}; that "
                "is above 0, no log of a probability",
            )


def weight_obstacles(
    expected: Mapping[str, Tensor], loaded: Mapping[str, Tensor], *, name: str
) -> Iterator[Obstacle]:
    """Tensors that a pool multiplies with and that are not those of the trainer's view, by bits:
    codes, scales and what is not quantised."""
    missing = sorted(set(expected) ^ set(loaded))
    if missing:
        yield Obstacle(
            cause="weights",
            sentence=f"{name} and the trainer's view do not hold the same tensors: "
            f"{', '.join(missing[:3])}",
        )
    others = [
        key
        for key in sorted(set(expected) & set(loaded))
        if expected[key].shape != loaded[key].shape or not _same_bits(expected[key], loaded[key])
    ]
    if others:
        yield Obstacle(
            cause="weights",
            sentence=f"{len(others)} tensors of {name} are not those of the trainer's weights, "
            f"first {others[0]}; publish them again",
        )


def _same_bits(first: Tensor, second: Tensor) -> bool:
    if first.dtype != second.dtype:
        return False
    one, other = (part.contiguous().reshape(-1).view(torch.uint8) for part in (first, second))
    return bool(torch.equal(one, other))


def shift_obstacle(recorded: Tensor, scored_by_shift: Mapping[int, Tensor]) -> Obstacle | None:
    """Whether the recorded logprobs fit the targets shifted by one better than their own.

    Args:
        scored_by_shift: -1, 0 and 1 -> trainer's logprobs of the targets shifted by it.
    """
    gaps = {
        shift: float((scored - recorded).abs().mean()) for shift, scored in scored_by_shift.items()
    }
    best = min(gaps, key=gaps.__getitem__)
    if best == 0 or gaps[best] > 0.5 * gaps[0]:
        return None
    return Obstacle(
        cause="tokens",
        sentence=f"recorded logprobs fit the targets shifted by {best:+d} (mean difference "
        f"{gaps[best]:.3g} nats) and not their own ({gaps[0]:.3g})",
    )
