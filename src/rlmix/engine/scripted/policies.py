"""Where a scripted engine's tokens come from: pure functions of the call, so a test knows every
token and logprob beforehand."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmix.core.candidates import Candidates
from rlmix.engine.sampling import UniformStream, sample_truncated


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedCall:
    """What a policy may look at."""

    session_id: str
    request_id: str
    input_ids: tuple[int, ...]
    sampling: Mapping[str, Any]
    """`sampling_params` as sent."""
    version: int
    turn: int
    """How many requests of this session were answered before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedReply:
    """N tokens to answer with."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Over the whole vocabulary, after temperature."""
    kept: Candidates
    """N kept sets."""
    full: Candidates
    """N sets of the whole vocabulary, after temperature: where heads are taken from."""
    finish: str = "stop"


Policy = Callable[[ScriptedCall], ScriptedReply]


def certain_reply(output_ids: Sequence[int], *, finish: str = "stop") -> ScriptedReply:
    """These tokens, each with probability 1."""
    certain = Candidates.of([(token,) for token in output_ids], [(0.0,)] * len(output_ids))
    return ScriptedReply(
        output_ids=tuple(output_ids),
        logprobs=(0.0,) * len(output_ids),
        kept=certain,
        full=certain,
        finish=finish,
    )


def turns_policy(turns: Sequence[Sequence[int]]) -> Policy:
    """Turn t of every session answers with `turns[t]`; after the last one it starts again."""

    def policy(call: ScriptedCall) -> ScriptedReply:
        return certain_reply(turns[call.turn % len(turns)])

    return policy


class HashPolicy:
    """A language model without weights: logits are a hash of seed, version and last two ids.

    Its probabilities can be computed again anywhere, so a test can check every logprob.
    """

    def __init__(self, *, vocab_size: int, seed: int = 0, spread: float = 2.0) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._spread = spread

    def logprobs(
        self, context: Sequence[int], *, version: int, temperature: float = 1.0
    ) -> np.ndarray:
        """float32 [V], log-softmax after temperature."""
        last_two = [0, 0, *context][-2:]
        generator = np.random.default_rng([self._seed, version, *last_two])
        logits = generator.standard_normal(self.vocab_size) * self._spread / temperature
        shifted = logits - logits.max()
        return (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)

    def __call__(self, call: ScriptedCall) -> ScriptedReply:
        sampling = call.sampling
        is_greedy = sampling["temperature"] < 1e-6
        top_k = 1 if is_greedy else sampling["top_k"]
        limits = {
            "top_ps_B": np.array([sampling["top_p"]]),
            "top_ks_B": np.array([top_k if top_k > 0 else self.vocab_size]),
        }
        uniforms = UniformStream(sampling.get("sampling_seed", 0))
        stop_ids = set(sampling["stop_token_ids"])
        context = list(call.input_ids)
        logprobs, kept, rows = [], [], []
        for position in range(sampling["max_new_tokens"]):
            row = self.logprobs(
                context,
                version=call.version,
                temperature=1.0 if is_greedy else sampling["temperature"],
            )
            ids, sets = sample_truncated(
                row[None],
                logprobs_BV=row[None],
                temperatures_B=np.ones(1),
                uniforms_B=np.array([uniforms.at(position)]),
                **limits,
            )
            context.append(int(ids[0]))
            logprobs.append(float(row[ids[0]]))
            rows.append(row)
            kept.append(Candidates(offsets=sets.offsets, ids=sets.ids_M, logprobs=sets.logprobs_M))
            if context[-1] in stop_ids:
                break
        output_ids = tuple(context[len(call.input_ids) :])
        return ScriptedReply(
            output_ids=output_ids,
            logprobs=tuple(logprobs),
            kept=Candidates.joined(kept),
            full=Candidates(
                offsets=np.arange(len(rows) + 1) * self.vocab_size,
                ids=np.tile(np.arange(self.vocab_size), len(rows)),
                logprobs=np.concatenate(rows),
            ),
            finish="stop" if output_ids[-1] in stop_ids else "length",
        )
