"""What is asked of a sampler engine and what comes back.

The request is the subset of SGLang's `/generate` that we use. Invariant: a `Generation` is
complete and self-consistent. Its logprobs are those of the distribution really sampled from, every
kept set holds the sampled id and sums to 1, and the version spans cover every output token. An
answer that breaks one of these never becomes a `Generation` (`engine.answers`).
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlmix.core.candidates import Candidates
from rlmix.core.errors import EngineError
from rlmix.core.trajectory import VersionSpan

GENERATION_TYPE = "application/x-rlmix-generation"
"""Media type of a binary `/generate` answer (`engine.frame`). A client that reads it says so in
`Accept`; an engine that does not know it answers JSON."""

SESSION_HEADER = "X-Session-Id"
MIN_VERSION_HEADER = "X-Min-Version"
POOL_HEADER = "X-Rlmix-Pool"
REPLICA_HEADER = "X-Rlmix-Replica"
NUMERICS_HEADER = "X-Rlmix-Numerics"
REHOMED_HEADER = "X-Rlmix-Rehomed"
GROUP_HEADER = "X-Group-Id"
REQUEST_ID_HEADER = "X-Request-Id"
TIMEOUT_HEADER = "X-Timeout-S"
"""Seconds that the sender still waits; a router passes on what is left of them."""

RECORD_MODES = ("support", "head", "none")

NEUTRAL_PARAMS = {
    "min_p": 0.0,
    "min_new_tokens": 0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "n": 1,
}
"""What we never use, sent all the same: SGLang fills in from the model's generation_config.json
whatever a request leaves out."""

GREEDY_TEMPERATURE = 1e-6
"""Below this SGLang samples greedily and reports logprobs at temperature 1."""


class GenerationAborted(EngineError):
    """The engine ended the request early; nothing of it may be stored."""


class EngineRefused(EngineError, ValueError):
    """The engine answered 400: the request itself is wrong, and asking again will not help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to sample one turn. Every field is sent, so no engine default can apply."""

    temperature: float
    """0 is greedy."""
    top_p: float
    """1 keeps everything."""
    top_k: int
    """-1 keeps everything."""
    max_new_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    """The first of them that is sampled ends the turn and is part of the output."""
    seed: int | None = None
    """None: the engine chooses."""
    ignore_eos: bool = False
    """True: only `max_new_tokens` ends the turn. For probes."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def is_truncated(self) -> bool:
        """True when some tokens cannot be sampled although the model gives them mass."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """One model turn of a session."""

    session_id: str
    request_id: str
    input_ids: tuple[int, ...] | np.ndarray
    """The whole context; engines find the part they know in their prefix cache."""
    sampling: SamplingParams
    record: str
    """`support`: each token's kept set with logprobs that sum to 1; `head`: the `head_k` most
    likely tokens with full-vocabulary logprobs; `none`: only the sampled token's logprob."""
    head_k: int = 0
    """With `support` and at least 1, a head of that many is reported beside the kept sets."""
    min_version: int | None = None
    """Oldest acceptable weight version; a replica that is behind answers 409."""
    group_id: str = ""
    """Of the session's group, for a router that places groups."""
    cache_salt: str | None = None
    """Prefixes are shared only among requests of one salt. None: among all that have none."""
    experts_shape: tuple[int, int] | None = None
    """Layers and experts per token of the model: asks for the experts that tokens were routed to.
    None asks for none. SGLang answers them without their shape."""
    experts_start: int = 0
    """First position whose experts are asked for, at most the number of input tokens."""

    def __post_init__(self) -> None:
        if self.record not in RECORD_MODES:
            raise ValueError(f"record={self.record!r}; allowed: {', '.join(RECORD_MODES)}")
        if self.record == "head":
            if self.head_k < 1:
                raise ValueError(f"record='head' needs head_k >= 1, got {self.head_k}")
            if self.sampling.is_truncated:
                raise ValueError(
                    "record='head' gives full-vocabulary logprobs, which are not those of top-p "
                    "or top-k sampling; use record='support'"
                )
        elif self.head_k and (self.record == "none" or self.sampling.is_greedy):
            raise ValueError(
                f"head_k={self.head_k} with record={self.record!r}, temperature="
                f"{self.sampling.temperature:g}; a head needs record='support' or 'head', and "
                "beside kept sets a temperature above 0, because greedy logprobs are at 1"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What an engine sampled. N output tokens."""

    output_ids: tuple[int, ...]
    """N ids, the stop token included when one was sampled."""
    sampler_logprobs: tuple[float, ...]
    """N natural logs, of the distribution really sampled from: after temperature, renormalised
    on the kept set when top-p or top-k cut something off. Greedy turns that record no support
    report full-vocabulary logprobs at temperature 1 instead of N zeros."""
    kept: Candidates | None
    """N sets; None with record `none`, or `support` when nothing was cut off."""
    kept_exact: bool
    """True: `kept` is the whole support. False: only the most likely candidates."""
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str
    """`stop` or `length`."""
    cached_tokens: int
    """Prompt tokens taken from the prefix cache."""
    pool: str
    replica: str
    numerics_key: str
    rehomed: int
    """How often the router has moved this session so far."""
    head: Candidates | None = None
    """With record `support` and `head_k`: the likeliest ids of each token with logprobs over the
    whole vocabulary, at the sampling temperature."""
    experts: np.ndarray | None = field(default=None, compare=False)
    """uint8 or int16 [tokens, layers, top_k], of the positions from `experts_start` to the last
    that was an input (the last sampled token was not); None when the engine recorded none."""
    wire_bytes: int = 0
    """Size of the answer."""
    engine_s: float = 0.0
    """Time from arrival to the last token, measured by the engine."""


def needs_kept_sets(request: GenerateRequest) -> bool:
    """True when the engine must report kept sets (`return_sampling_mask`)."""
    if request.record == "support":
        return request.sampling.is_truncated or request.sampling.is_greedy
    return request.record == "none" and request.sampling.is_truncated


def request_body(request: GenerateRequest) -> dict[str, Any]:
    """The `/generate` document of a request."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **NEUTRAL_PARAMS,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    ids = request.input_ids
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": ids.tolist() if isinstance(ids, np.ndarray) else list(ids),
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": request.head_k,
    }
    if needs_kept_sets(request):
        body["return_sampling_mask"] = True
        body["sampling_logprobs_mode"] = "support" if request.record == "support" else "selected"
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    if request.experts_shape is not None:
        body["return_routed_experts"] = True
        body["routed_experts_start_len"] = request.experts_start
    return body
