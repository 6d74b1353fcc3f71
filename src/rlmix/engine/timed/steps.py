"""How long an engine's steps take: a few coefficients, and nothing that remembers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Seconds of decoding and of prefill, in the form that a memory-bound roofline has."""

    fixed_s: float
    """Of every decoding step: weights that each step reads, and kernel launches."""
    experts_s: float = 0.0
    """Reading every routed expert once; a step reads those that its batch touches."""
    expert_missed_frac: float = 1.0
    """Share of the experts that one token does not touch."""
    request_s: float = 0.0
    """What one more request adds to a step: its recurrent state."""
    kv_token_s: float = 0.0
    """What one more token in the cache of a running request adds to a step."""
    prefill_fixed_s: float = 0.0
    prefill_token_s: float = 0.0
    """One uncached token of a prompt."""
    prefill_pair_s: float = 0.0
    """One uncached token looking at one token of its context."""

    def decode_s(self, batch: int, kv_tokens: float) -> float:
        """One step for `batch` requests that hold `kv_tokens` tokens together."""
        touched_frac = 1.0 - self.expert_missed_frac**batch
        load_s = self.request_s * batch + self.kv_token_s * kv_tokens
        return self.fixed_s + self.experts_s * touched_frac + load_s

    def prefill_s(self, new_tokens: int, context_tokens: int) -> float:
        """Computing the last `new_tokens` of a prompt of `context_tokens`."""
        pairs = new_tokens * (context_tokens - new_tokens / 2)
        return (
            self.prefill_fixed_s + self.prefill_token_s * new_tokens + self.prefill_pair_s * pairs
        )

    def scaled(self, factor: float) -> "StepTimes":
        """The same engine with every time multiplied."""
        times = {name: value * factor for name, value in asdict(self).items() if name[-2:] == "_s"}
        return StepTimes(**times, expert_missed_frac=self.expert_missed_frac)

    def to_dict(self) -> dict[str, float]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "StepTimes":
        return cls(**document)
