"""What a session leaves behind: turns, tokens, who sampled them, and the verdict.

Invariant: every sampled token keeps the logprob its own engine reported, the kept set it was
drawn from, the pool's numerics key and the weight version; none of these is ever recomputed.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from rlmix.core.candidates import Candidates


class StopReason(StrEnum):
    """Why a session ended. Exactly one applies; the first that is met, in the listed order."""

    SUBMITTED = "submitted"
    SANDBOX_LOST = "sandbox_lost"
    ENGINE_LOST = "engine_lost"
    CANCELLED = "cancelled"
    SANDBOX_ENDED = "sandbox_ended"
    TIME_LIMIT = "time_limit"
    TURN_LIMIT = "turn_limit"
    TOKEN_LIMIT = "token_limit"
    FORMAT_ERROR = "format_error"

    @property
    def is_infrastructure(self) -> bool:
        """True when the agent cannot have caused it; such a session is void, never 0."""
        return self in (StopReason.SANDBOX_LOST, StopReason.ENGINE_LOST, StopReason.CANCELLED)


class Outcome(StrEnum):
    """The verdict on a session."""

    PASS = "pass"
    FAIL = "fail"
    VOID = "void"


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Half-open range of a turn's sampled tokens that one weight version produced."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One model turn and what the sandbox answered."""

    output_ids: tuple[int, ...]
    """Sampled token ids, the end token included when it was sampled."""
    sampler_logprobs: tuple[float, ...]
    """Natural log, one per output id, of the distribution really sampled from (after
    temperature, renormalised on the kept set when one was used)."""
    kept: Candidates | None = None
    """One set per output id; None when nothing was cut off and no head was asked for."""
    kept_exact: bool = True
    """True: the sets are the whole support that was sampled from and sum to 1 in exp. False: they
    are only the most likely candidates, with full-vocabulary logprobs that sum to less than 1."""
    head: Candidates | None = None
    """Beside exact sets, on the few turns that watch the tail: the most likely ids of each
    position with logprobs over the whole vocabulary, at the sampling temperature."""
    experts: np.ndarray | None = field(default=None, compare=False)
    """uint8 or int16 [tokens, layers, top_k], the experts that the engine routed this turn's new
    context tokens to: from the last token sampled before (a first turn: from the prompt's first
    one) to the last but one sampled here. None when the pool did not record them or was not asked.
    Left out of `==`."""
    observation_ids: tuple[int, ...] = ()
    """Ids appended after the turn (tool output, next generation prompt); never trained on."""
    version_spans: tuple[VersionSpan, ...] = ()
    pool: str = ""
    replica: str = ""
    numerics_key: str = ""
    """Compact form of `NumericsKey`, as the serving replica reported it."""
    finish_reason: str = ""
    """`stop`, `length` or `abort`, as the engine reported it."""
    cached_tokens: int = 0
    """Prompt tokens that the engine took from its prefix cache."""
    wire_bytes: int = 0
    """Size of the engine's answer."""
    command: str = ""
    """The bash command of the turn."""
    exit_code: int | None = None
    """Exit code of the command; None when it was not run."""
    model_s: float = 0.0
    tool_s: float = 0.0

    @property
    def record_bytes(self) -> int:
        """Size of what is kept about the sampled tokens: ids, logprobs, sets, heads, experts."""
        sets = sum(s.num_bytes for s in (self.kept, self.head) if s is not None)
        experts = 0 if self.experts is None else self.experts.nbytes
        return 8 * len(self.output_ids) + sets + experts


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """A finished session. Tokens are `prompt_ids`, then for each turn output and observation."""

    session_id: str
    group_id: str
    task_id: str
    prompt_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    outcome: Outcome
    reward: float
    """1.0 for pass, 0.0 for fail; 0.0 and meaningless when void."""
    void_reason: str = ""
    verdict_detail: str = ""
    diff_bytes: int = 0
    rehomed: int = 0
    """How often the session moved to another replica."""
    started_s: float = 0.0
    """Unix time."""
    finished_s: float = 0.0
    tags: dict[str, str] = field(default_factory=dict)
    """Facts about the task that reports group by (bug kind, difficulty, split)."""

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + sum(
            len(turn.output_ids) + len(turn.observation_ids) for turn in self.turns
        )

    @property
    def oldest_version(self) -> int | None:
        """Smallest weight version that sampled a token here; None without sampled tokens."""
        versions = [span.version for turn in self.turns for span in turn.version_spans]
        return min(versions) if versions else None
