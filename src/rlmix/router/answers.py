"""An engine's answer as a turn's record, and as OpenAI's documents and chunks. Pure."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from rlmix.router.asked import Asked

TokenText = Callable[[int], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampled:
    """What the engine sampled. N output tokens."""

    request_id: str
    output_ids: list[int]
    sampler_logprobs: list[float]
    """N, of the distribution really sampled from: renormalised on the kept sets where there are
    some."""
    kept_ids: list[list[int]] | None
    """N kept sets; None when nothing was cut off."""
    kept_logprobs: list[list[float]] | None
    top: list[list[tuple[int, float]]] | None
    """Likeliest tokens with full-vocabulary logprobs, when they were asked for."""
    version_spans: list[dict[str, int]]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int

    def record(self) -> dict[str, Any]:
        """As it stands in a trajectory."""
        return {
            "request_id": self.request_id,
            "output_ids": self.output_ids,
            "sampler_logprobs": self.sampler_logprobs,
            "kept_ids": self.kept_ids,
            "kept_logprobs": self.kept_logprobs,
            "version_spans": self.version_spans,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }


def read_answer(content: bytes, asked: Asked) -> Sampled:
    """A JSON answer to `/generate`.

    Raises:
        ValueError, KeyError, TypeError, IndexError: it lacks what was asked for.
    """
    document = orjson.loads(content)
    meta = document["meta_info"]
    entries = meta["output_token_logprobs"]
    output_ids = document.get("output_ids") or [entry[1] for entry in entries]
    logprobs = [float(entry[0]) for entry in entries]
    if [entry[1] for entry in entries] != output_ids:
        raise ValueError("output_token_logprobs are for other ids than output_ids")
    kept_ids = kept_logprobs = None
    if asked.is_truncated:
        kept_ids, kept_logprobs = (
            meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"],
        )  # fmt: skip
        logprobs = [
            float(values[ids.index(token)])
            for token, ids, values in zip(output_ids, kept_ids, kept_logprobs, strict=True)
        ]
    top = None
    if asked.top_logprobs:
        top = [[(e[1], float(e[0])) for e in row] for row in meta["output_top_logprobs"]]
    finish = meta["finish_reason"]["type"]
    if not output_ids and finish != "abort":
        raise ValueError("no output token")
    spans = meta.get("weight_versions") or [
        {"version": meta.get("weight_version", 0), "start": 0, "end": len(output_ids)}
    ]
    return Sampled(
        request_id=str(meta.get("id", "")),
        output_ids=output_ids,
        sampler_logprobs=logprobs,
        kept_ids=kept_ids,
        kept_logprobs=kept_logprobs,
        top=top,
        version_spans=[
            {"version": _version(s["version"]), "start": int(s["start"]), "end": int(s["end"])}
            for s in spans
        ],
        finish_reason=str(finish),
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        cached_tokens=int(meta.get("cached_tokens", 0)),
    )


def _version(value: Any) -> int:
    text = str(value)
    return int(text) if text.isdecimal() else 0


def chat_document(
    common: dict[str, Any],
    text: str,
    calls: Sequence[tuple[str, dict[str, Any]]],
    asked: Asked,
    sampled: Sampled,
    token_text: TokenText,
) -> dict[str, Any]:
    """The answer to `/v1/chat/completions`."""
    message: dict[str, Any] = {"role": "assistant", "content": text or None if calls else text}
    finish = sampled.finish_reason
    if calls:
        message["tool_calls"] = [
            {
                "id": f"call_{sampled.request_id[:24]}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
        finish = "tool_calls" if finish == "stop" else finish
    logprobs = None
    if asked.logprobs:
        tops = sampled.top or [[] for _ in sampled.output_ids]
        logprobs = {
            "content": [
                {
                    **_token(token, logprob, token_text),
                    "top_logprobs": [_token(t, value, token_text) for t, value in top],
                }
                for token, logprob, top in zip(
                    sampled.output_ids, sampled.sampler_logprobs, tops, strict=True
                )
            ],
            "refusal": None,
        }
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}
    return {**common, "object": "chat.completion", "choices": [choice], "usage": _usage(sampled)}


def completion_document(
    common: dict[str, Any], text: str, asked: Asked, sampled: Sampled, token_text: TokenText
) -> dict[str, Any]:
    """The answer to `/v1/completions`."""
    logprobs = None
    if asked.logprobs:
        tokens = [token_text(token) for token in sampled.output_ids]
        logprobs = {
            "tokens": tokens,
            "token_logprobs": sampled.sampler_logprobs,
            "top_logprobs": None
            if sampled.top is None
            else [{token_text(t): value for t, value in top} for top in sampled.top],
            "text_offset": _offsets(tokens),
        }
    choice = {
        "index": 0, "text": text, "finish_reason": sampled.finish_reason, "logprobs": logprobs,
    }  # fmt: skip
    return {**common, "object": "text_completion", "choices": [choice], "usage": _usage(sampled)}


def chat_chunks(document: dict[str, Any], *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """A chat answer as the chunks of a stream."""
    choice = document["choices"][0]
    common = {key: document[key] for key in ("id", "created", "model")}
    common["object"] = "chat.completion.chunk"

    def chunk(delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> Any:
        one = {"index": 0, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return {**common, "choices": [one]}

    message = choice["message"]
    yield chunk({"role": "assistant", "content": ""})
    if message["content"]:
        yield chunk({"content": message["content"]}, logprobs=choice["logprobs"])
    for index, call in enumerate(message.get("tool_calls", [])):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, choice["finish_reason"])
    if with_usage:
        yield {**common, "choices": [], "usage": document["usage"]}


def completion_chunks(document: dict[str, Any], *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """A completion as the chunks of a stream."""
    common = {key: document[key] for key in ("id", "created", "model", "object")}
    choice = document["choices"][0]
    yield {**common, "choices": [{**choice, "finish_reason": None}]}
    last = {"index": 0, "text": "", "logprobs": None, "finish_reason": choice["finish_reason"]}
    yield {**common, "choices": [last]}
    if with_usage:
        yield {**common, "choices": [], "usage": document["usage"]}


def error_document(status: int, text: str) -> dict[str, Any]:
    """An error in OpenAI's shape; one of the router's or an engine's is taken out of its own."""
    try:
        inner = orjson.loads(text)["error"]
        text = inner["message"] if isinstance(inner, dict) else str(inner)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        pass
    kind = "invalid_request_error" if status in (400, 404, 409, 410) else "server_error"
    return {"error": {"message": text, "type": kind, "param": None, "code": status}}


def _token(token: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    text = token_text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _usage(sampled: Sampled) -> dict[str, Any]:
    output = len(sampled.output_ids)
    return {
        "prompt_tokens": sampled.prompt_tokens,
        "completion_tokens": output,
        "total_tokens": sampled.prompt_tokens + output,
        "prompt_tokens_details": {"cached_tokens": sampled.cached_tokens},
    }


def _offsets(tokens: Sequence[str]) -> list[int]:
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return offsets
