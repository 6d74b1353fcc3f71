"""What the trainer says about canary answers, for the gate every replica passes before it serves.

Invariant: a reference is given only for the version that the trainer holds before and after
scoring; otherwise the gate checks the canary's numbers alone, never against other weights.
"""

from collections.abc import Callable, Sequence

from rlmix.launch.handle import Handle
from rlmix.pools.spec import CanaryOutput

SCORE_LIMIT_S = 120.0


class CanaryReferences:
    """Callable as `pools.slot.References`."""

    def __init__(self, trainer: Handle, *, held_version: Callable[[], int]) -> None:
        """
        Args:
            held_version: policy version of the trainer's current weights (steps done).
        """
        self._trainer = trainer
        self._held_version = held_version

    async def __call__(
        self, version: int, outputs: Sequence[CanaryOutput]
    ) -> Sequence[Sequence[float]] | None:
        if self._held_version() != version:
            return None
        try:
            scores = await self._trainer.call(
                "score",
                [[*output.prompt_ids, *output.output_ids] for output in outputs],
                temperature=1.0,
                timeout_s=SCORE_LIMIT_S,
            )
        except TimeoutError:
            return None  # Busy with a long step; the numbers alone are checked then.
        if self._held_version() != version:
            return None
        return [
            [float(value) for value in score[len(output.prompt_ids) :]]
            for score, output in zip(scores, outputs, strict=True)
        ]
