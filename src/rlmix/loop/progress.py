"""How far a run is: what a checkpoint carries so that a resumed run continues, not restarts."""

from dataclasses import asdict, dataclass, field
from typing import Any

REWARD_WINDOW = 3
"""Steps averaged for the first and the last training reward of a summary."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Counters over all attempts of a run. Owned by the training loop, which alone changes it."""

    step: int = 0
    """Optimizer steps done; also the trainer's policy version."""
    published_version: int = 0
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step's valid sessions."""
    sessions: int = 0
    """Sessions finished, voids included."""
    voids: int = 0
    cost_usd: float = 0.0
    pool_cost_usd: dict[str, float] = field(default_factory=dict)
    pool_sessions: dict[str, int] = field(default_factory=dict)
    """Sessions trained on, by the pool that served them."""
    pool_tokens: dict[str, int] = field(default_factory=dict)
    """Sampled tokens trained on, by pool."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Progress":
        return cls(**data)

    @property
    def reward_first(self) -> float | None:
        return _mean(self.rewards[:REWARD_WINDOW])

    @property
    def reward_last(self) -> float | None:
        return _mean(self.rewards[-REWARD_WINDOW:])

    @property
    def void_frac(self) -> float:
        return self.voids / self.sessions if self.sessions else 0.0


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
