"""What is asked of a sampler engine and what comes back, and the JSON in between.

The JSON is the subset of SGLang's `/generate` that we use. Invariant: a `Generation` is complete
and self-consistent. Its logprobs are those of the distribution really sampled from, every kept
set holds the sampled id and sums to 1, and the version spans cover every output token. An answer
that breaks one of these never becomes a `Generation`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlmix.core.errors import EngineError
from rlmix.core.trajectory import VersionSpan

SESSION_HEADER = "X-Session-Id"
MIN_VERSION_HEADER = "X-Min-Version"
POOL_HEADER = "X-Rlmix-Pool"
REPLICA_HEADER = "X-Rlmix-Replica"
NUMERICS_HEADER = "X-Rlmix-Numerics"
REHOMED_HEADER = "X-Rlmix-Rehomed"

RECORD_MODES = ("support", "head", "none")

GREEDY_TEMPERATURE = 1e-6
"""Below this SGLang samples greedily and reports logprobs at temperature 1."""

KEPT_SUM_TOLERANCE = 1e-3
"""How far from 1 a kept set's probabilities may sum: far above float32 rounding, far below a
set that lost a member worth a correction."""

POSITIVE_LOGPROB_TOLERANCE = 1e-4
"""Rounding may push the logprob of a sure token a little above 0."""


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
    min_version: int | None = None
    """Oldest acceptable weight version; a replica that is behind answers 409."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What an engine sampled. N output tokens."""

    output_ids: tuple[int, ...]
    """N ids, the stop token included when one was sampled."""
    sampler_logprobs: tuple[float, ...]
    """N natural logs, of the distribution really sampled from: after temperature, renormalised
    on the kept set when top-p or top-k cut something off. Greedy turns that record no support
    report full-vocabulary logprobs at temperature 1 instead of N zeros."""
    kept_ids: tuple[tuple[int, ...], ...] | None
    """N sets; None with record `none`, or `support` when nothing was cut off."""
    kept_logprobs: tuple[tuple[float, ...], ...] | None
    kept_exact: bool
    """True: `kept_ids` is the whole support. False: only the most likely candidates."""
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
        "min_p": 0.0,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": False,
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    ids = request.input_ids
    body: dict[str, Any] = {
        "rid": request.request_id,
        "input_ids": ids.tolist() if isinstance(ids, np.ndarray) else list(ids),
        "sampling_params": params,
        "return_logprob": True,
        "top_logprobs_num": request.head_k if request.record == "head" else 0,
    }
    if needs_kept_sets(request):
        body["return_sampling_mask"] = True
        body["sampling_logprobs_mode"] = "support" if request.record == "support" else "selected"
    return body


def parse_generation(
    answer: Mapping[str, Any], request: GenerateRequest, headers: Mapping[str, str]
) -> Generation:
    """The `Generation` of a 200 answer.

    Raises:
        GenerationAborted: the engine ended the request early.
        EngineError: the answer is incomplete or contradicts itself.
    """
    try:
        return _parse(answer, request, headers)
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(
            f"engine: answer to {request.request_id} lacks or misplaces a field: {error!r}"
        ) from error
    except ValueError as error:
        raise EngineError(f"engine: answer to {request.request_id}: {error}") from error


def _parse(
    answer: Mapping[str, Any], request: GenerateRequest, headers: Mapping[str, str]
) -> Generation:
    meta = answer["meta_info"]
    finish = meta["finish_reason"]
    if finish["type"] == "abort":
        raise GenerationAborted(
            f"engine: {request.request_id} was aborted: {finish.get('message', 'no reason given')}"
        )
    output_ids = tuple(answer["output_ids"])
    if not output_ids:
        raise ValueError("no output token")
    if len(output_ids) > request.sampling.max_new_tokens:
        raise ValueError(f"{len(output_ids)} tokens, asked for {request.sampling.max_new_tokens}")
    logprobs, kept_ids, kept_logprobs = _read_logprobs(meta, output_ids, request)
    _check_logprobs(logprobs, num_tokens=len(output_ids))
    spans = _read_spans(meta, num_tokens=len(output_ids))
    if request.min_version is not None and spans[0].version < request.min_version:
        raise ValueError(
            f"sampled by version {spans[0].version}, asked for at least {request.min_version}"
        )
    return Generation(
        output_ids=output_ids,
        sampler_logprobs=logprobs,
        kept_ids=kept_ids,
        kept_logprobs=kept_logprobs,
        kept_exact=request.record != "head",
        version_spans=spans,
        finish_reason=finish["type"],
        cached_tokens=int(meta.get("cached_tokens", 0)),
        pool=headers.get(POOL_HEADER, ""),
        replica=headers.get(REPLICA_HEADER, ""),
        numerics_key=headers.get(NUMERICS_HEADER, ""),
        rehomed=int(headers.get(REHOMED_HEADER, "0")),
        engine_s=float(meta.get("e2e_latency", 0.0)),
    )


_Sets = tuple[tuple[Any, ...], ...]


def _read_logprobs(
    meta: Mapping[str, Any], output_ids: tuple[int, ...], request: GenerateRequest
) -> tuple[tuple[float, ...], _Sets | None, _Sets | None]:
    if needs_kept_sets(request):
        reported = meta["output_token_sampling_logprobs"]
        if request.record == "none":
            return tuple(reported), None, None
        kept_ids = tuple(map(tuple, meta["output_token_sampling_mask"]))
        kept_logprobs = tuple(map(tuple, reported))
        return _sampled_in_sets(output_ids, kept_ids, kept_logprobs), kept_ids, kept_logprobs
    entries = meta["output_token_logprobs"]
    if tuple(entry[1] for entry in entries) != output_ids:
        raise ValueError("output_token_logprobs are for other ids than output_ids")
    logprobs = tuple(entry[0] for entry in entries)
    if request.record != "head":
        return logprobs, None, None
    heads = meta["output_top_logprobs"]
    if len(heads) != len(output_ids):
        raise ValueError(f"{len(heads)} heads for {len(output_ids)} tokens")
    head_ids = tuple(tuple(entry[1] for entry in head) for head in heads)
    head_logprobs = tuple(tuple(entry[0] for entry in head) for head in heads)
    return logprobs, head_ids, head_logprobs


def _sampled_in_sets(
    output_ids: tuple[int, ...], kept_ids: _Sets, kept_logprobs: _Sets
) -> tuple[float, ...]:
    """Each sampled id's logprob within its kept set, after checking the sets."""
    if not len(output_ids) == len(kept_ids) == len(kept_logprobs):
        raise ValueError(
            f"{len(output_ids)} tokens, {len(kept_ids)} kept sets, "
            f"{len(kept_logprobs)} sets of logprobs"
        )
    chosen = []
    for position, (token, ids, logprobs) in enumerate(
        zip(output_ids, kept_ids, kept_logprobs, strict=True)
    ):
        if len(ids) != len(logprobs):
            raise ValueError(f"position {position}: {len(ids)} kept ids, {len(logprobs)} logprobs")
        try:
            chosen.append(logprobs[ids.index(token)])
        except ValueError:
            raise ValueError(
                f"position {position}: sampled id {token} is not in its kept set"
            ) from None
    _check_sums(kept_logprobs)
    return tuple(chosen)


def _check_sums(kept_logprobs: _Sets) -> None:
    sizes = np.fromiter(map(len, kept_logprobs), dtype=np.int64, count=len(kept_logprobs))
    flat = np.fromiter(
        (value for row in kept_logprobs for value in row), dtype=np.float64, count=int(sizes.sum())
    )
    starts = np.cumsum(sizes) - sizes
    sums = np.add.reduceat(np.exp(flat), starts)
    bad = ~(np.abs(sums - 1.0) <= KEPT_SUM_TOLERANCE)
    if bad.any():
        position = int(np.argmax(bad))
        raise ValueError(
            f"position {position}: kept set sums to {sums[position]:.6g}, must be 1 "
            f"within {KEPT_SUM_TOLERANCE}"
        )


def _check_logprobs(logprobs: Sequence[float], *, num_tokens: int) -> None:
    if len(logprobs) != num_tokens:
        raise ValueError(f"{len(logprobs)} logprobs for {num_tokens} tokens")
    for position, value in enumerate(logprobs):
        if not (isinstance(value, (int, float)) and math.isfinite(value)):
            raise ValueError(f"position {position}: logprob {value} is not finite")
        if value > POSITIVE_LOGPROB_TOLERANCE:
            raise ValueError(f"position {position}: logprob {value} is above 0")


def _read_spans(meta: Mapping[str, Any], *, num_tokens: int) -> tuple[VersionSpan, ...]:
    raw = meta.get("weight_versions") or [
        {"version": meta["weight_version"], "start": 0, "end": num_tokens}
    ]
    spans = tuple(
        VersionSpan(version=int(span["version"]), start=int(span["start"]), end=int(span["end"]))
        for span in raw
        if span["end"] > span["start"]
    )
    edge = 0
    for span in spans:
        if span.start != edge:
            break
        edge = span.end
    if edge != num_tokens or not spans:
        raise ValueError(f"weight_versions {list(raw)} do not cover {num_tokens} tokens in order")
    return spans
