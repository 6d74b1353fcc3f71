"""Which sessions of which groups a step trains on, and with what advantage.

Invariants: a void member never counts as a reward of 0; a group without signal stays in the batch
(its tokens belong to the denominator and to the mismatch numbers) with advantage exactly 0;
whatever is left out is counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlmix.algos.advantages import group_advantages, has_signal
from rlmix.batch.samples import to_sample
from rlmix.core.errors import DataError
from rlmix.core.sample import TrainSample
from rlmix.core.trajectory import Outcome, Trajectory

MIN_MEMBERS = 2
"""A baseline needs somebody to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one optimizer step trains on, and what was left out of it."""

    samples: tuple[TrainSample, ...]
    num_groups: int
    """Groups in `samples`."""
    num_groups_without_signal: int
    """Of these, how many agree in all rewards and so have advantage 0."""
    num_void_members: int
    num_tokenless_members: int
    """Valid sessions that ended before the policy sampled a token: rewards, but no sample."""
    num_small_groups: int
    """Groups left out because fewer than two valid members remained."""

    @property
    def num_policy_tokens(self) -> int:
        return sum(int(sample.mask.sum()) for sample in self.samples)

    def metrics(self) -> dict[str, float]:
        total = self.num_groups
        return {
            "batch/groups": float(total),
            "batch/no_signal_frac": self.num_groups_without_signal / total if total else 0.0,
            "batch/void_members": float(self.num_void_members),
            "batch/tokenless_members": float(self.num_tokenless_members),
            "batch/small_groups": float(self.num_small_groups),
        }


def build_batch(groups: Sequence[Sequence[Trajectory]], *, scale: str, baseline: str) -> Batch:
    """Take void members out, compute advantages, make samples.

    Args:
        groups: sibling sessions of one prompt each, any of them void.
        scale, baseline: as in `algos.advantages.group_advantages`.
    Raises:
        DataError: members of different groups in one group, or a record that contradicts itself.
    """
    samples: list[TrainSample] = []
    num_groups = num_without_signal = num_void = num_tokenless = num_small = 0
    for group in groups:
        if len({member.group_id for member in group}) > 1:
            raise DataError(
                f"batch: one group holds members of groups "
                f"{sorted({member.group_id for member in group})}; siblings share one group_id"
            )
        valid = [member for member in group if member.outcome is not Outcome.VOID]
        num_void += len(group) - len(valid)
        if len(valid) < MIN_MEMBERS:
            num_small += 1
            continue
        rewards_G = np.array([member.reward for member in valid], dtype=np.float32)
        advantages_G = group_advantages(rewards_G, scale=scale, baseline=baseline)
        num_groups += 1
        num_without_signal += not has_signal(rewards_G)
        for member, advantage in zip(valid, advantages_G, strict=True):
            if member.num_sampled_tokens == 0:
                num_tokenless += 1
                continue
            samples.append(to_sample(member, advantage=float(advantage)))
    return Batch(
        samples=tuple(samples),
        num_groups=num_groups,
        num_groups_without_signal=num_without_signal,
        num_void_members=num_void,
        num_tokenless_members=num_tokenless,
        num_small_groups=num_small,
    )


def group_lag(group: Sequence[Trajectory], *, trainer_version: int) -> int | None:
    """Trainer version minus the oldest version that sampled a token of a valid member.

    None when no valid member has a sampled token.
    Raises:
        DataError: a token claims a version that the trainer has not made yet.
    """
    versions = [
        version
        for member in group
        if member.outcome is not Outcome.VOID
        for turn in member.turns
        for version in (span.version for span in turn.version_spans if span.end > span.start)
    ]
    if not versions:
        return None
    if max(versions) > trainer_version:
        raise DataError(
            f"batch: group {group[0].group_id} holds a token of version {max(versions)}, but the "
            f"trainer is at {trainer_version}; versions only grow"
        )
    return trainer_version - min(versions)
