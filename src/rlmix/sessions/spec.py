"""What a session is asked to do, and the small interfaces it needs."""

import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from rlmix.engine.protocol import GREEDY_TEMPERATURE, GenerateRequest, Generation
from rlmix.tasks.rule import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionSpec:
    """One session, complete and picklable: a worker needs nothing else to run it."""

    session_id: str
    group_id: str
    task_id: str
    source: str
    """Name of the task source."""
    source_path: str | None = None
    """Folder of a prepared set."""
    split: str
    source_seed: int
    seed: int
    """Turn seeds are derived from it, so equal specs sample equal tokens on equal weights."""
    temperature: float
    top_p: float
    top_k: int
    record: str
    """`support`, `head` or `none`: what the engine reports about each token."""
    head_k: int = 0
    """Candidates of each token with record `head`."""
    alarm_head_k: int = 0
    """With record `support`: candidates of the whole vocabulary beside the kept sets, on
    `alarm_head_frac` of the turns."""
    alarm_head_frac: float = 0.0
    max_turns: int
    max_turn_tokens: int
    max_context_tokens: int
    """Prompt, sampled tokens and observations together."""
    time_limit_s: float
    command_timeout_s: float
    output_chars: int
    experts_shape: tuple[int, int] | None = None
    """Layers and experts per token of the policy: turns bring the experts of their tokens. None:
    nobody replays them."""
    min_version: int | None = None
    """Oldest weight version that may sample; None takes any."""
    grade_unsubmitted: bool = False
    """Judge what is there when a limit ends the session. Off in training: only a submission can
    earn 1; evaluations that grade the state at the limit turn it on and say so."""

    def turn_seed(self, turn: int) -> int:
        """31-bit sampling seed of turn `turn` (from 0)."""
        return zlib.crc32(f"{self.seed}/{turn}".encode()) & 0x7FFFFFFF

    def turn_head_k(self, turn: int) -> int:
        """Candidates of the whole vocabulary that turn `turn` (from 0) records. Which turns watch
        the tail follows from session and turn alone, so a repeated run watches the same ones."""
        if self.record != "support":
            return self.head_k
        if not self.alarm_head_k or self.temperature < GREEDY_TEMPERATURE:
            return 0
        name = f"{self.session_id}/{turn}".encode()
        place = int.from_bytes(blake2b(name, digest_size=8).digest()) / 2**64
        return self.alarm_head_k if place < self.alarm_head_frac else 0


class Engine(Protocol):
    """What a session asks of `EngineClient`."""

    async def generate(self, request: GenerateRequest) -> Generation: ...

    async def release(self, session_id: str) -> None: ...


class Renderer(Protocol):
    """What a session asks of `ChatRenderer`."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    def prompt_ids(self, issue: str) -> list[int]: ...

    def observation_ids(
        self, exit_code: int, output: str, *, ended_with_stop: bool
    ) -> list[int]: ...

    def command(self, output_ids: list[int] | tuple[int, ...]) -> str | None: ...


Judge = Callable[[bytes], Awaitable[Verdict]]
"""Diff -> verdict. The session never holds the hidden half of its task."""
