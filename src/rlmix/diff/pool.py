"""An embedded pool for a comparison: its weights, its own sampling, and its operators.

The engine's scheduler runs in this process, without HTTP: it batches, finds prefixes and records
logprobs as a replica does. Invariant: the decode replay recomputes exactly what the scheduler
computed, token by token, from the same runs of prompt tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from rlmix.core.errors import DataError
from rlmix.diff.exact_side import exact_side
from rlmix.diff.program import Shape, Side
from rlmix.diff.texts import Recorded
from rlmix.engine.embedded.exact_weights import spec_of
from rlmix.engine.embedded.operators import NativeOperators
from rlmix.engine.embedded.profile import Profile
from rlmix.engine.embedded.requests import Request, parse_request
from rlmix.engine.embedded.scheduler import Scheduler
from rlmix.engine.embedded.shape import ModelShape, read_shape
from rlmix.engine.embedded.weights import ExactWeights, NativeWeights, load_weights, read_config
from rlmix.model.chat import ChatRenderer
from rlmix.numerics.view_config import quantization_config
from rlmix.numerics.views import encode_view
from rlmix.tasks.generate import build_task

TURN_TOKENS = 40
"""Sampled tokens of a turn at most, so that sessions have several and prefixes are found again."""
MASK_CAP = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolAsk:
    """A pool of the configuration, as far as its numbers go."""

    name: str
    accelerator: str
    weights: str
    activations: str
    kv: str
    attention: str
    moe: str
    view: str
    """The weight view that it reads, as `numerics.view_spec` reads it."""
    consistency: str
    max_running: int
    tolerance_nats: float
    """Largest mean absolute difference to the trainer that is allowed."""

    @property
    def profile(self) -> Profile:
        return Profile(
            accelerator=self.accelerator,
            weights=self.weights,
            activations=self.activations,
            kv=self.kv,
            attention=self.attention,
            moe=self.moe,
            consistency=self.consistency,
        )


def write_view(model: Path, state: Mapping[str, Tensor], view: str, folder: Path) -> Path:
    """A folder with one weight view of a BF16 state dict; made once."""
    from safetensors.torch import save_file

    if not folder.exists():
        folder.mkdir(parents=True)
        config = {**read_config(model), "quantization_config": quantization_config(view)}
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(encode_view(state, view), folder / "model.safetensors")
    return folder


class EmbeddedPool:
    """One replica of a pool."""

    def __init__(self, ask: PoolAsk, folder: Path, *, temperature: float) -> None:
        """
        Args:
            folder: of the pool's weight view.
        """
        self.ask, self._temperature = ask, temperature
        self.config = read_config(folder)
        self.shape: ModelShape = read_shape(self.config)
        self.weights = load_weights(folder, shape=self.shape, profile=ask.profile)

    def sample(
        self, renderer: ChatRenderer, *, sessions: int, tokens: int, seed: int
    ) -> list[Recorded]:
        """Sessions of a few turns on generated tasks, answered by a fixed line of output."""
        talks = [_Talk(renderer, number, tokens=tokens) for number in range(sessions)]
        context = self.shape.context_length
        scheduler = Scheduler(
            self.shape,
            self.ask.profile,
            self.weights,
            version=0,
            max_running=min(self.ask.max_running, sessions),
            context_length=context,
            max_total_tokens=sessions * context,
            mask_cap=MASK_CAP,
        )
        try:
            while open_talks := [talk for talk in talks if talk.room(context) > 0]:
                asked = [(talk, self._request(talk, seed=seed)) for talk in open_talks]
                for _, request in asked:
                    scheduler.submit(request)
                while scheduler.has_work:
                    scheduler.step()
                for talk, request in asked:
                    talk.take(request, self.ask.name)
        finally:
            scheduler.close()
        return [talk.recorded(self.ask.name) for talk in talks]

    def _request(self, talk: "_Talk", *, seed: int) -> Request:
        context = self.shape.context_length
        body = {
            "input_ids": list(talk.ids),
            "sampling_params": {
                "max_new_tokens": talk.room(context),
                "sampling_seed": seed * 100_003 + talk.number * 1_009 + talk.turns,
                "temperature": self._temperature,
                "stop_token_ids": list(talk.stop_ids),
            },
            "return_logprob": True,
        }
        return parse_request(
            body,
            rid=f"{talk.number}-{talk.turns}",
            default_seed=seed,
            vocab_size=self.shape.vocab_size,
            context_length=context,
            max_total_tokens=context,
            eos_ids=self.shape.eos_ids,
        )

    def side(self, like: Shape, *, prefilled: Sequence[tuple[int, int]] | None) -> Side:
        """The pool's operators; `prefilled` as in `NativeOperators`."""
        weights = self.weights
        if isinstance(weights, ExactWeights):
            return exact_side(
                weights.tensors,
                spec_of(self.shape, self.ask.profile),
                name=self.ask.name,
                theta=self.shape.rope_theta,
                temperature=self._temperature,
                settings=self.settings(),
            )
        assert isinstance(weights, NativeWeights)
        operators = NativeOperators(
            self.shape,
            self.ask.profile,
            weights,
            context_length=self.shape.context_length + 1,
            temperature=self._temperature,
            prefilled=prefilled,
        )
        return Side(
            name=self.ask.name,
            shape=like,
            operators=operators.table(),
            settings=self.settings(),
            weights={},
        )

    def settings(self) -> dict[str, str | float]:
        """What the replica says of itself: one word for each thing that decides a logprob."""
        shape = self.shape
        return {
            "vocab_size": float(shape.vocab_size),
            "num_layers": float(shape.num_layers),
            "head_dim": float(shape.head_dim),
            "rms_eps": shape.rms_eps,
            "rope_theta": shape.rope_theta,
            "top_k_experts": float(shape.top_k if shape.num_experts else 0),
            "norm_topk_prob": float(shape.norm_topk_prob if shape.num_experts else 0),
            "temperature": self._temperature,
        }


class _Talk:
    """A session under way."""

    def __init__(self, renderer: ChatRenderer, number: int, *, tokens: int) -> None:
        self._renderer, self.number, self._left = renderer, number, tokens
        task = build_task(split="eval", seed=0, index=number)
        self.ids = list(renderer.prompt_ids(task.public.issue))
        self.stop_ids = renderer.stop_token_ids
        self.turns = 0
        self._sampled: list[int] = []
        self._logprobs: list[float] = []
        self._prefilled: list[tuple[int, int]] = []

    def room(self, context: int) -> int:
        """Tokens that the next turn may sample; 0: the session is over."""
        return max(0, min(TURN_TOKENS, self._left, context - len(self.ids) - 1))

    def take(self, request: Request, pool: str) -> None:
        answer = request.answer(weight_version=0)
        if answer.logprobs is None or not len(answer.output_ids):
            raise DataError(
                f"diff: pool {pool} sampled nothing in a turn: {dict(answer.finish_reason)}"
            )
        self._prefilled.append((answer.num_cached_tokens, len(self.ids)))
        first = len(self.ids)
        self._sampled += range(first, first + len(answer.output_ids))
        self._logprobs += answer.logprobs.tolist()
        self.ids += list(answer.output_ids)
        self._left -= len(answer.output_ids)
        self.turns += 1
        if self._left > 0:
            has_ended = answer.finish_reason.get("type") == "stop"
            line = f"line {self.turns}\n"
            self.ids += self._renderer.observation_ids(0, line, ended_with_stop=has_ended)

    def recorded(self, pool: str) -> Recorded:
        end = self._sampled[-1] + 1
        return Recorded(
            name=f"{pool}/{self.number}",
            pool=pool,
            ids=tuple(self.ids[:end]),
            sampled=tuple(self._sampled),
            logprobs_P=np.array(self._logprobs, dtype=np.float32),
            prefilled=tuple(self._prefilled),
            version=0,
        )
