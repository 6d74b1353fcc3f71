"""What a fleet is given to act through: where replicas, references and events come from or go."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from rlmix.launch.handle import Handle
from rlmix.pools.spec import CanaryOutput, ReplicaSpec

Spawn = Callable[[ReplicaSpec, int], Handle]
"""(spec, incarnation) -> the actor that will own the replica."""

References = Callable[[int, Sequence[CanaryOutput]], Awaitable[Sequence[Sequence[float]] | None]]
"""(version, canary outputs) -> the trainer's logprobs of the output ids; None when the trainer
does not hold this version any more."""


class OnEvent(Protocol):
    """Where events go: `(kind, reason, **facts)`, as `EventLog.append` takes them."""

    def __call__(self, kind: str, reason: str, **fields: Any) -> None: ...
