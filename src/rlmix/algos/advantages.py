"""How much better a session was than its siblings.

Invariant: an advantage depends on the rewards of one group only, and every baseline here makes
the advantages of a group sum to zero. Works on torch tensors and numpy arrays alike.
"""

# G members of a group

from typing import Any, TypeVar

Array = TypeVar("Array", bound=Any)
"""torch.Tensor or numpy.ndarray of a floating dtype, one dimension."""

SCALES = ("none", "std")
BASELINES = ("mean", "leave_one_out")

STD_FLOOR = 1e-6
"""Added to the standard deviation, dimensionless: keeps a group without spread at exactly 0."""


def group_advantages(rewards_G: Array, *, scale: str, baseline: str = "mean") -> Array:
    """Reward minus what the siblings got.

    Args:
        rewards_G: float [G], one scalar per valid sibling (void members taken out before).
        scale: "none" keeps the difference; "std" divides it by the group's population standard
            deviation + 1e-6, which gives easy and hard groups the weight of mixed ones.
        baseline: "mean" subtracts the group's mean, the member's own reward included, which
            shrinks the expected gradient by 1 - 1/G; "leave_one_out" subtracts the mean of the
            others, which does not. They differ by the factor G / (G - 1), so with scale "std"
            the choice is only that factor too.
    Returns:
        float [G], dtype and kind of the input; sums to 0 up to rounding. All 0 when all rewards
        agree, and for a group of one, which has nobody to be compared with.
    Raises:
        ValueError: the group is empty, or a name is unknown.
    Source: arXiv:2402.03300 section 4.1 ("mean", "std"); arXiv:2503.20783 ("none", called
        Dr. GRPO there); arXiv:2402.14740 ("leave_one_out", RLOO).
    """
    num_members = len(rewards_G)
    if num_members == 0:
        raise ValueError("advantages: a group needs at least one valid member, got none")
    if scale not in SCALES:
        raise ValueError(f"advantages: scale={scale!r} is unknown; use one of {', '.join(SCALES)}")
    if baseline not in BASELINES:
        raise ValueError(
            f"advantages: baseline={baseline!r} is unknown; use one of {', '.join(BASELINES)}"
        )
    if not has_signal(rewards_G):
        # Exact zeros: a mean that rounds would leave a tiny push in a random direction.
        return rewards_G * 0
    centred_G = rewards_G - rewards_G.mean()
    advantages_G = centred_G
    if baseline == "leave_one_out":
        advantages_G = centred_G * (num_members / (num_members - 1))
    if scale == "std":
        std = (centred_G**2).mean() ** 0.5
        advantages_G = advantages_G / (std + STD_FLOOR)
    return advantages_G


def has_signal(rewards_G: Array) -> bool:
    """True when at least two rewards differ, so that the group says which member was better."""
    return len(rewards_G) > 1 and bool(rewards_G.max() != rewards_G.min())
