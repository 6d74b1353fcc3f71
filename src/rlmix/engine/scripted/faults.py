"""What a scripted engine can do wrong, by name."""

from typing import Any

from aiohttp import web

from rlmix.engine.http import RequestError, reply_text

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
    "nan_logprobs": "200, the first logprob is null",
    "wrong_mask": "200, the first kept set lacks the sampled token",
    "bad_spans": "200, weight_versions do not cover the output",
    "old_version": "200, sampled by version 0",
}


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


def spoil(document: dict[str, Any], fault: str) -> None:
    """Make a good answer wrong in the fault's way."""
    meta = document["meta_info"]
    if fault == "abort":
        meta["finish_reason"] = {"type": "abort", "message": "Aborted"}
    elif fault == "nan_logprobs":
        if "output_token_logprobs" in meta:
            meta["output_token_logprobs"][0][0] = None
        if "output_token_sampling_logprobs" in meta:
            first = meta["output_token_sampling_logprobs"]
            meta["output_token_sampling_logprobs"] = [None, *first[1:]]
    elif fault == "wrong_mask":
        sets = [list(ids) for ids in meta.get("output_token_sampling_mask", [])]
        if sets:
            sets[0] = [2**31 - 1] * len(sets[0])
            meta["output_token_sampling_mask"] = sets
    elif fault == "bad_spans":
        meta["weight_versions"] = [
            {**span, "end": span["end"] - 1} for span in meta["weight_versions"]
        ]
    elif fault == "old_version":
        meta["weight_versions"] = [{**span, "version": "0"} for span in meta["weight_versions"]]


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
