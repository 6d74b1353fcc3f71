"""The small load that engine arguments are measured on: generated, or recorded in a run."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlmix.config.schema.train import TrainConfig
from rlmix.core.errors import DataError
from rlmix.core.trajectory import Outcome, Trajectory
from rlmix.engine.protocol import SamplingParams
from rlmix.observe.trajectories import read_trajectories

TURNS = 3
PROMPT_TOKENS = 96
SHARED_TOKENS = 64
"""Of the prompt, the same in all sessions: a system prompt."""
OUTPUT_TOKENS = 24
OBSERVATION_TOKENS = 32
FIRST_ID = 16
"""Generated texts take ids from here on: the first are often special."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTurn:
    output_ids: tuple[int, ...]
    """Their number is what is sampled; they themselves are what the next turn starts with."""
    observation_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSession:
    prompt_ids: tuple[int, ...]
    turns: tuple[LoadTurn, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningLoad:
    sessions: tuple[LoadSession, ...]
    sampling: SamplingParams
    record: str
    """As `GenerateRequest.record`."""
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        """Sampled in one load."""
        return sum(len(turn.output_ids) for one in self.sessions for turn in one.turns)

    def mark(self, number: int) -> int:
        """A token id for a load."""
        return FIRST_ID + number % (self.vocab_size - FIRST_ID)


def vocab_size_of(model_dir: Path) -> int:
    """Token ids that the model has."""
    document = json.loads((model_dir / "config.json").read_text())
    return int(document.get("text_config", document)["vocab_size"])


def generated_load(config: TrainConfig, *, vocab_size: int, sessions: int) -> TuningLoad:
    """Sessions of random ids that share the start of their prompts, as agents' do."""
    draw = np.random.default_rng(config.run.seed)
    limit = config.session.max_context_tokens - 1
    grown = PROMPT_TOKENS + TURNS * (OUTPUT_TOKENS + OBSERVATION_TOKENS)
    scale = min(1.0, limit / grown)

    def ids(count: int) -> tuple[int, ...]:
        size = max(1, int(count * scale))
        return tuple(draw.integers(FIRST_ID, vocab_size, size).tolist())

    shared = ids(SHARED_TOKENS)
    made = [
        LoadSession(
            prompt_ids=shared + ids(PROMPT_TOKENS - SHARED_TOKENS),
            turns=tuple(
                LoadTurn(output_ids=ids(OUTPUT_TOKENS), observation_ids=ids(OBSERVATION_TOKENS))
                for _ in range(TURNS)
            ),
        )
        for _ in range(sessions)
    ]
    return _load(made, config, vocab_size)


def recorded_load(path: Path, config: TrainConfig, *, vocab_size: int, sessions: int) -> TuningLoad:
    """The first sessions of a file of trajectories.

    Raises:
        DataError: it cannot be read, has no session, or one of another model.
    """
    if not path.is_file():
        raise DataError(f"--load {path}: there is no such file; give trajectories/step_*.jsonl")
    found = [one for one in read_trajectories(path) if one.turns and one.outcome != Outcome.VOID]
    if not found:
        raise DataError(f"--load {path}: no session in it that ended")
    made = [_session(one) for one in found[:sessions]]
    highest = max(max(one.prompt_ids) for one in made)
    if highest >= vocab_size:
        raise DataError(
            f"--load {path}: token id {highest} is not of this model, which has "
            f"{vocab_size}; set model.path to the one that was recorded"
        )
    return _load(made, config, vocab_size)


def _session(trajectory: Trajectory) -> LoadSession:
    turns = tuple(
        LoadTurn(output_ids=tuple(turn.output_ids), observation_ids=tuple(turn.observation_ids))
        for turn in trajectory.turns
        if turn.output_ids
    )
    return LoadSession(prompt_ids=tuple(trajectory.prompt_ids), turns=turns)


def _load(made: Sequence[LoadSession], config: TrainConfig, vocab_size: int) -> TuningLoad:
    algo = config.algo
    sampling = SamplingParams(
        temperature=algo.temperature,
        top_p=algo.top_p,
        top_k=algo.top_k,
        max_new_tokens=1,
        ignore_eos=True,
    )
    record = "support" if algo.replay and sampling.is_truncated else "none"
    return TuningLoad(sessions=tuple(made), sampling=sampling, record=record, vocab_size=vocab_size)
