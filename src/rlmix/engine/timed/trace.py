"""Agentic sessions from a seed: how many turns, how long the answers, observations and tools are.

Invariant: a trace is a function of its seed and shape alone, and so is the work in it: every router
is given the same turns with the same lengths.
"""

import math
import random
from dataclasses import dataclass

from rlmix.engine.timed.prompts import ID_BYTES, NUM_IDS, STREAM


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A log-normal length or time, cut off at both ends."""

    median: float
    sigma: float
    least: float
    most: float

    def draw(self, rng: random.Random) -> float:
        value = rng.lognormvariate(math.log(self.median), self.sigma)
        return min(max(value, self.least), self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What sessions look like. Tokens, and seconds on the accelerator's clock."""

    turns: Spread = Spread(median=10, sigma=0.5, least=3, most=24)
    prompt_tokens: Spread = Spread(median=8000, sigma=0.4, least=3000, most=20_000)
    output_tokens: Spread = Spread(median=200, sigma=0.8, least=16, most=2048)
    observation_tokens: Spread = Spread(median=900, sigma=0.9, least=16, most=8000)
    tool_s: Spread = Spread(median=2.0, sigma=1.0, least=0.1, most=30.0)
    shared_tokens: int = 0
    """First tokens of every prompt that are the same in all sessions."""
    group_size: int = 1
    """Sessions that have the same prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnPlan:
    """One model turn and the command after it."""

    output_tokens: int
    observation: bytes
    """Ids in JSON, without brackets."""
    tool_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionPlan:
    """One session."""

    session_id: str
    prompt: bytes
    turns: tuple[TurnPlan, ...]


def make_trace(num_sessions: int, *, seed: int, shape: Shape | None = None) -> list[SessionPlan]:
    """`num_sessions` sessions, in the order in which they start."""
    shape = shape or Shape()
    rng = random.Random(seed)
    shared = _ids(random.Random(seed + 1), shape.shared_tokens)
    sessions = []
    prompt = b""
    for index in range(num_sessions):
        if index % shape.group_size == 0:
            own = _ids(rng, max(1, round(shape.prompt_tokens.draw(rng)) - shape.shared_tokens))
            prompt = shared + b"," + own if shared else own
        turns = tuple(
            TurnPlan(
                output_tokens=round(shape.output_tokens.draw(rng)),
                observation=_ids(rng, round(shape.observation_tokens.draw(rng))),
                tool_s=shape.tool_s.draw(rng),
            )
            for _ in range(round(shape.turns.draw(rng)))
        )
        sessions.append(SessionPlan(session_id=f"s{seed}-{index}", prompt=prompt, turns=turns))
    return sessions


def _ids(rng: random.Random, count: int) -> bytes:
    """A piece of the ids' text; two pieces are the same with a chance of one in 65,536."""
    if not count:
        return b""
    start = rng.randrange(NUM_IDS)
    text = STREAM[start * ID_BYTES : (start + count) * ID_BYTES]
    while len(text) < count * ID_BYTES:
        text += STREAM[: count * ID_BYTES - len(text)]
    return text[:-1]
