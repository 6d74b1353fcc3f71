"""From an engine's answer to a `Generation`, or to an error that says what is wrong with it.

Nothing is repaired. The arrays of an answer are checked as a whole: every sampled id once in its
own set, sets that sum to 1, finite logprobs, version spans that cover the output.
"""

# N output tokens, M slots of all their sets together

import base64
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from rlmix.core.candidates import Candidates
from rlmix.core.errors import EngineError
from rlmix.core.trajectory import VersionSpan
from rlmix.engine.frame import decode_frame
from rlmix.engine.protocol import (
    NUMERICS_HEADER,
    POOL_HEADER,
    REHOMED_HEADER,
    REPLICA_HEADER,
    GenerateRequest,
    Generation,
    GenerationAborted,
    needs_kept_sets,
)

KEPT_SUM_TOLERANCE = 1e-3
"""How far from 1 a kept set's probabilities may sum: far above float32 rounding, far below a
set that lost a member worth a correction."""

POSITIVE_LOGPROB_TOLERANCE = 1e-4
"""Rounding may push the logprob of a sure token a little above 0."""

SAMPLED_TOLERANCE = 1e-3
"""Nats between a sampled token's own logprob and the one that the head it was drawn beside gives
it: far above float32 rounding, far below another temperature."""

MAX_ID = np.iinfo(np.int32).max


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recorded:
    """The arrays of an answer, unchecked."""

    output_ids: np.ndarray
    """int32 [N]."""
    logprobs: np.ndarray | None
    """float32 [N]; None: those in the kept sets are meant."""
    kept: Candidates | None
    head: Candidates | None
    experts: np.ndarray | None


def parse_document(
    document: Mapping[str, Any], request: GenerateRequest, headers: Mapping[str, str]
) -> Generation:
    """The `Generation` of a 200 answer in JSON, as the real SGLang gives it.

    Raises:
        GenerationAborted: the engine ended the request early.
        EngineError: the answer is incomplete or contradicts itself.
    """
    with _naming(request):
        meta = document["meta_info"]
        _refuse_aborted(meta, request)
        return _generation(meta, _recorded(document, request), request, headers)


def parse_frame(raw: bytes, request: GenerateRequest, headers: Mapping[str, str]) -> Generation:
    """The `Generation` of a 200 answer in binary.

    Raises:
        GenerationAborted: the engine ended the request early.
        EngineError: damaged, incomplete, or in contradiction with itself.
    """
    meta, arrays = decode_frame(raw)
    with _naming(request):
        _refuse_aborted(meta, request)
        return _generation(meta, _framed(arrays, request), request, headers)


@contextmanager
def _naming(request: GenerateRequest) -> Iterator[None]:
    """Errors of reading become one sentence that names the request."""
    try:
        yield
    except (KeyError, TypeError, IndexError) as error:
        raise EngineError(
            f"engine: answer to {request.request_id} lacks or misplaces a field: {error!r}"
        ) from error
    except EngineError:
        raise
    except (ValueError, OverflowError) as error:
        raise EngineError(f"engine: answer to {request.request_id}: {error}") from error


def _framed(arrays: Mapping[str, np.ndarray], request: GenerateRequest) -> _Recorded:
    def array(name: str, dtype: type) -> np.ndarray:
        values = arrays[name]
        if values.dtype != dtype or values.ndim != 1:
            raise ValueError(f"array {name} is {values.dtype} of shape {values.shape}")
        return values

    def candidates(name: str) -> Candidates:
        return Candidates(
            offsets=array(f"{name}_offsets", np.int32),
            ids=array(f"{name}_ids", np.int32),
            logprobs=array(f"{name}_logprobs", np.float32),
        )

    logprobs = kept = None
    if needs_kept_sets(request) and request.record == "support":
        kept = candidates("kept")
    else:
        name = "sampling_logprobs" if needs_kept_sets(request) else "logprobs"
        logprobs = array(name, np.float32)
    head = candidates("head") if request.head_k else None
    if request.record == "head":
        kept, head = head, None
    return _Recorded(
        output_ids=array("output_ids", np.int32),
        logprobs=logprobs,
        kept=kept,
        head=head,
        experts=None if request.experts_shape is None else arrays.get("experts"),
    )


def _refuse_aborted(meta: Mapping[str, Any], request: GenerateRequest) -> None:
    finish = meta["finish_reason"]
    if finish["type"] == "abort":
        raise GenerationAborted(
            f"engine: {request.request_id} was aborted: {finish.get('message', 'no reason given')}"
        )


def _recorded(document: Mapping[str, Any], request: GenerateRequest) -> _Recorded:
    meta = document["meta_info"]
    output_ids = _int32(document["output_ids"], what="output ids")
    logprobs = kept = head = None
    if needs_kept_sets(request):
        reported = meta["output_token_sampling_logprobs"]
        if request.record == "none":
            logprobs = _float32(reported)
        else:
            kept = _candidates(meta["output_token_sampling_mask"], reported)
            count = meta.get("output_token_sampling_mask_length", len(kept))
            if count != len(kept):
                raise ValueError(f"{len(kept)} kept sets, the engine counts {count}")
    else:
        entries = meta["output_token_logprobs"]
        if [entry[1] for entry in entries] != output_ids.tolist():
            raise ValueError("output_token_logprobs are for other ids than output_ids")
        logprobs = _float32([entry[0] for entry in entries])
    if request.head_k:
        entries = meta["output_top_logprobs"]
        head = _candidates(
            [[entry[1] for entry in row] for row in entries],
            [[entry[0] for entry in row] for row in entries],
        )
    if request.record == "head":
        kept, head = head, None
    return _Recorded(
        output_ids=output_ids,
        logprobs=logprobs,
        kept=kept,
        head=head,
        experts=_experts(meta.get("routed_experts"), request),
    )


def _experts(text: str | None, request: GenerateRequest) -> np.ndarray | None:
    """Routed experts out of JSON, in the smallest type that holds them all."""
    if text is None or request.experts_shape is None:
        return None
    flat = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    low, high = (int(flat.min()), int(flat.max())) if flat.size else (0, 0)
    if low < 0 or high > np.iinfo(np.int16).max:
        raise ValueError(f"expert ids reach from {low} to {high}; allowed: 0 to 2^15-1")
    width = request.experts_shape[0] * request.experts_shape[1]
    if flat.size % width:
        raise ValueError(f"{flat.size} expert ids are no multiple of {width}, a token's")
    rows = flat.astype(np.uint8 if high < 256 else np.int16)
    return rows.reshape(-1, *request.experts_shape)


def _candidates(ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]]) -> Candidates:
    """Sets out of JSON, one list per token."""
    sizes = [len(row) for row in ids]
    others = [len(row) for row in logprobs]
    if sizes != others:
        position = next(
            (n for n, (a, b) in enumerate(zip(sizes, others, strict=False)) if a != b), None
        )
        if position is None:
            raise ValueError(f"{len(sizes)} candidate sets, {len(others)} sets of logprobs")
        raise ValueError(
            f"position {position}: {sizes[position]} candidate ids, {others[position]} logprobs"
        )
    return Candidates(
        offsets=np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))),
        ids=_int32(list(chain.from_iterable(ids)), what="candidate ids"),
        logprobs=_float32(list(chain.from_iterable(logprobs))),
    )


def _int32(values: Sequence[Any], *, what: str) -> np.ndarray:
    array = np.array(values) if values else np.empty(0, dtype=np.int64)
    # numpy takes true and false among numbers for 1 and 0.
    if array.dtype.kind not in "iu" or array.ndim != 1 or bool in map(type, values):
        raise ValueError(f"{what} are not a flat list of whole numbers")
    if array.size and (array.max() > MAX_ID or array.min() < 0):
        raise ValueError(
            f"{what} reach from {array.min()} to {array.max()}; allowed: 0 to {MAX_ID}"
        )
    return array.astype(np.int32)


def _float32(values: Sequence[Any]) -> np.ndarray:
    """Numbers out of JSON; null becomes NaN and is refused with the other values that are not
    finite."""
    array = np.array(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError("logprobs are not a flat list of numbers")
    with np.errstate(over="ignore"):  # What float32 cannot hold becomes infinite, and is refused.
        return array.astype(np.float32)


def _generation(
    meta: Mapping[str, Any],
    recorded: _Recorded,
    request: GenerateRequest,
    headers: Mapping[str, str],
) -> Generation:
    output_ids, kept, head = recorded.output_ids, recorded.kept, recorded.head
    num_tokens = len(output_ids)
    if not num_tokens:
        raise ValueError("no output token")
    if num_tokens > request.sampling.max_new_tokens:
        raise ValueError(f"{num_tokens} tokens, asked for {request.sampling.max_new_tokens}")
    _check_ids(output_ids, name="output")
    if kept is not None:
        _check_candidates(kept, num_tokens=num_tokens, is_whole=request.record != "head")
    if head is not None:
        _check_candidates(head, num_tokens=num_tokens, is_whole=False)
    if recorded.experts is not None:
        _check_experts(recorded.experts, request, num_tokens=num_tokens)
    logprobs = recorded.logprobs
    if logprobs is None:
        assert kept is not None
        logprobs = kept.logprobs[_sampled_slots(kept, output_ids)]
    if len(logprobs) != num_tokens:
        raise ValueError(f"{len(logprobs)} logprobs for {num_tokens} tokens")
    _check_logprobs(logprobs, positions=np.arange(num_tokens))
    if kept is not None and request.record == "head":
        _check_head_of_sampled(kept, output_ids, logprobs)
    spans = _read_spans(meta, num_tokens=num_tokens)
    if request.min_version is not None and spans[0].version < request.min_version:
        raise ValueError(
            f"sampled by version {spans[0].version}, asked for at least {request.min_version}"
        )
    return Generation(
        output_ids=tuple(output_ids.tolist()),
        sampler_logprobs=tuple(logprobs.tolist()),
        kept=kept,
        kept_exact=request.record != "head",
        head=head,
        experts=recorded.experts,
        version_spans=spans,
        finish_reason=meta["finish_reason"]["type"],
        cached_tokens=int(meta.get("cached_tokens", 0)),
        pool=headers.get(POOL_HEADER, ""),
        replica=headers.get(REPLICA_HEADER, ""),
        numerics_key=headers.get(NUMERICS_HEADER, ""),
        rehomed=int(headers.get(REHOMED_HEADER, "0")),
        engine_s=float(meta.get("e2e_latency", 0.0)),
    )


def _check_candidates(candidates: Candidates, *, num_tokens: int, is_whole: bool) -> None:
    """Sets of all tokens, finite, and a whole set sums to 1; a head at most to that."""
    name = "kept set" if is_whole else "head"
    if len(candidates) != num_tokens:
        raise ValueError(f"{len(candidates)} {name}s for {num_tokens} tokens")
    _check_ids(candidates.ids, name=name)
    tokens_M = candidates.tokens
    _check_logprobs(candidates.logprobs, positions=tokens_M)
    slots_M = np.sort(tokens_M << 32 | candidates.ids)
    twice = slots_M[1:][slots_M[1:] == slots_M[:-1]]
    if twice.size:
        raise ValueError(
            f"position {twice[0] >> 32}: id {twice[0] & MAX_ID} is several times in its {name}"
        )
    mass_N = candidates.mass()
    bad = ~(mass_N <= 1.0 + KEPT_SUM_TOLERANCE)
    if is_whole:
        bad |= mass_N < 1.0 - KEPT_SUM_TOLERANCE
    if bad.any():
        position = int(bad.argmax())
        bound = "must be 1" if is_whole else "must be at most 1"
        raise ValueError(
            f"position {position}: {name} sums to {mass_N[position]:.6g}, {bound} "
            f"within {KEPT_SUM_TOLERANCE}"
        )


def _check_experts(experts: np.ndarray, request: GenerateRequest, *, num_tokens: int) -> None:
    """One row for each asked position that was an input: all but the last sampled token."""
    rows = len(request.input_ids) + num_tokens - 1 - request.experts_start
    expected = (rows, *(request.experts_shape or ()))
    if experts.dtype.kind not in "iu" or experts.shape != expected:
        raise ValueError(
            f"routed experts are {experts.dtype} of shape {experts.shape}, expected whole numbers "
            f"of shape {expected}"
        )


def _check_ids(ids: np.ndarray, *, name: str) -> None:
    if ids.size and ids.min() < 0:
        raise ValueError(f"{name} id {ids.min()} is below 0")


def _sampled_slots(kept: Candidates, output_ids: np.ndarray) -> np.ndarray:
    slots_N, counts_N = kept.find(output_ids)
    bad = counts_N != 1
    if bad.any():
        position = int(bad.argmax())
        found = "not in" if counts_N[position] == 0 else f"{counts_N[position]} times in"
        raise ValueError(
            f"position {position}: sampled id {output_ids[position]} is {found} its kept set"
        )
    return slots_N


def _check_head_of_sampled(head: Candidates, output_ids: np.ndarray, logprobs: np.ndarray) -> None:
    """Where the head holds the sampled id, both must say the same of it."""
    slots_N, _ = head.find(output_ids)
    found = slots_N >= 0
    gap = np.abs(head.logprobs[slots_N[found]] - logprobs[found])
    if gap.size and gap.max() > SAMPLED_TOLERANCE:
        position = int(np.flatnonzero(found)[gap.argmax()])
        raise ValueError(
            f"position {position}: the sampled id has logprob {logprobs[position]:.6g}, its head "
            f"says {head.logprobs[slots_N[position]]:.6g}; both must be at the same temperature"
        )


def _check_logprobs(logprobs: np.ndarray, *, positions: np.ndarray) -> None:
    bad = ~(np.isfinite(logprobs) & (logprobs <= POSITIVE_LOGPROB_TOLERANCE))
    if bad.any():
        slot = int(bad.argmax())
        what = "above 0" if np.isfinite(logprobs[slot]) else "not finite"
        raise ValueError(f"position {positions[slot]}: logprob {logprobs[slot]} is {what}")


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
