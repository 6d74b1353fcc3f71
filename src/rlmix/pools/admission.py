"""Pure rules: may a replica serve, is it stuck, may it be started again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmix.core.errors import EngineError
from rlmix.pools.spec import AdmissionRefused, CanaryOutput, ReplicaLoad

MAX_LOGPROB = 1e-3
"""Rounding may lift the logprob of a sure token above 0, not further than this."""


def check_canaries(
    outputs: Sequence[CanaryOutput],
    references: Sequence[Sequence[float]] | None,
    *,
    name: str,
    tolerance_nats: float,
) -> float | None:
    """Refuse a replica whose canary logprobs are not numbers, or not the trainer's.

    Args:
        references: the trainer's logprobs of the same output ids, one sequence per output; None
            when no trainer of this version is at hand, then only the numbers themselves count.
        tolerance_nats: largest mean absolute difference over all canary tokens.
    Returns:
        The mean absolute difference in nats; None without references.
    Raises:
        AdmissionRefused: says which canary and how far off.
        EngineError: the references do not fit the outputs.
    """
    for index, output in enumerate(outputs):
        if not output.output_ids:
            raise AdmissionRefused(f"pools: {name}: canary {index} was answered without a token")
        for position, value in enumerate(output.sampler_logprobs):
            if not math.isfinite(value) or value > MAX_LOGPROB:
                raise AdmissionRefused(
                    f"pools: {name}: canary {index} has the logprob {value} at position {position}"
                )
    if references is None or not outputs:
        return None
    differences: list[float] = []
    for output, reference in zip(outputs, references, strict=True):
        if len(reference) != len(output.sampler_logprobs):
            raise EngineError(
                f"pools: {len(reference)} reference logprobs for "
                f"{len(output.sampler_logprobs)} canary tokens"
            )
        differences += [
            abs(sampler - trainer)
            for sampler, trainer in zip(output.sampler_logprobs, reference, strict=True)
        ]
    mean_abs = math.fsum(differences) / len(differences)
    if not mean_abs <= tolerance_nats:
        raise AdmissionRefused(
            f"pools: {name}: canary logprobs differ from the trainer's by {mean_abs:.4g} nats on "
            f"average over {len(differences)} tokens, its number format explains up to "
            f"{tolerance_nats:g}"
        )
    return mean_abs


@dataclass(slots=True)
class ProgressWatch:
    """Is an engine that has work doing any? Liveness is tokens advancing, not an answer."""

    tokens: int = -1
    moved_s: float = 0.0
    """When tokens last advanced, or there was nothing to do."""

    def stalled_s(self, load: ReplicaLoad, *, now_s: float) -> float:
        """Seconds since the last sign of progress, as of this observation."""
        has_work = load.running + load.queued > 0 and not load.is_paused
        if load.progress_tokens != self.tokens or not has_work:
            self.tokens = load.progress_tokens
            self.moved_s = now_s
        return now_s - self.moved_s


@dataclass(slots=True)
class RestartBudget:
    """How often a slot may be filled again."""

    max_restarts: int
    window_s: float
    delay_s: float
    times_s: list[float] = field(default_factory=list)

    def next_delay_s(self, *, now_s: float) -> float | None:
        """Take one restart from the budget.

        Returns:
            How long to wait before it: the delay, doubled for each restart in the window. None
            when the window holds `max_restarts` already.
        """
        self.times_s = [time_s for time_s in self.times_s if now_s - time_s < self.window_s]
        if len(self.times_s) >= self.max_restarts:
            return None
        self.times_s.append(now_s)
        return float(self.delay_s * 2 ** (len(self.times_s) - 1))
