"""What a scripted engine can do wrong, by name."""

from dataclasses import replace

import numpy as np
from aiohttp import web

from rlmix.engine.http import RequestError, reply_text
from rlmix.engine.wire import Answer

FAULTS = {
    "busy": "503 with Retry-After",
    "stale": "409: the replica is older than asked for",
    "error": "500",
    "refuse": "400",
    "hang": "no answer at all",
    "cut": "the connection closes without an answer",
    "truncate": "200, but the body stops half way",
    "exit": "the process ends at once",
    "abort": "200 with finish_reason abort",
    "changed": "200, one bit of the body is another",
    "nan_logprobs": "200, the first logprob is NaN (null in JSON)",
    "shifted_logprobs": "200, every logprob over the whole vocabulary is half a nat too low",
    "wrong_mask": "200, the first kept set lacks the sampled token",
    "bad_spans": "200, weight_versions do not cover the output",
    "old_version": "200, sampled by version 0",
    "slow": "200, after half a second more",
    "stale_update": "an update says success and changes nothing",
    "partial_update": "an update says success and leaves one tensor as it was",
    "failed_update": "an update leaves one tensor as it was and answers 400",
}

UPDATE_FAULTS = ("stale_update", "partial_update", "failed_update")
"""They wait for the next update; all others for the next generate call."""

SLOW_S = 0.5

SHIFT_NATS = np.float32(0.5)


def refuse(fault: str, *, version: int) -> None:
    """Raise the HTTP refusal of a fault that is one."""
    if fault == "stale":
        raise RequestError(409, f"version {version} is too old (scripted)")
    if fault == "busy":
        raise RequestError(503, "no room (scripted)", retry_after_s=0.02)
    if fault == "error":
        raise RequestError(500, "scripted error")
    if fault == "refuse":
        raise RequestError(400, "scripted refusal")


def spoil(answer: Answer, fault: str) -> Answer:
    """A good answer, wrong in the fault's way."""
    if fault == "abort":
        return replace(answer, finish_reason={"type": "abort", "message": "Aborted"})
    if fault == "nan_logprobs":
        kept, sampling, logprobs = answer.kept, answer.sampling_logprobs, answer.logprobs
        return replace(
            answer,
            logprobs=None if logprobs is None else _with_nan(logprobs),
            sampling_logprobs=None if sampling is None else _with_nan(sampling),
            kept=None if kept is None else replace(kept, logprobs=_with_nan(kept.logprobs)),
        )
    if fault == "shifted_logprobs" and answer.logprobs is not None:
        return replace(answer, logprobs=answer.logprobs - SHIFT_NATS)
    if fault == "wrong_mask" and answer.kept is not None:
        ids = answer.kept.ids.copy()
        ids[: answer.kept.offsets[1]] = 2**31 - 1 - np.arange(answer.kept.offsets[1])
        return replace(answer, kept=replace(answer.kept, ids=ids))
    if fault == "bad_spans":
        return replace(answer, spans=[replace(span, end=span.end - 1) for span in answer.spans])
    if fault == "old_version":
        return replace(answer, spans=[replace(span, version=0) for span in answer.spans])
    return answer


def _with_nan(logprobs: np.ndarray) -> np.ndarray:
    spoilt = logprobs.copy()
    spoilt[0] = np.nan
    return spoilt


def change_a_byte(response: web.Response) -> web.Response:
    """Another bit in the middle of the body, as a broken network card or proxy would make it."""
    body = bytearray(response.body)  # type: ignore[arg-type]
    body[len(body) // 2] ^= 1
    response.body = bytes(body)
    return response


def cut(request: web.BaseRequest) -> web.Response:
    """Close the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return reply_text()


async def send_half(request: web.BaseRequest, response: web.Response) -> web.StreamResponse:
    """Send the head and half of the body, then close."""
    body = response.body
    assert isinstance(body, bytes)
    partial = web.StreamResponse(headers={**response.headers, "Content-Length": str(len(body))})
    await partial.prepare(request)
    await partial.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return partial
