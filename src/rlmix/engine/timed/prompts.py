"""Reads requests and writes answers without turning ids into numbers.

The ids of a prompt are found in the body as text, counted by their commas and hashed in blocks; the
rest of the body is small and parsed. Answers are cut out of one long text of ids.
"""

from dataclasses import dataclass
from typing import Any

import orjson

from rlmix.engine.timed.cache import blocks_of

NUM_IDS = 1 << 16
ID_BYTES = 6
STREAM = b",".join(b"%d" % (10_000 + (i * 7919) % 80_000) for i in range(NUM_IDS)) + b","
"""Ids of five digits; an answer is a piece of it."""
WORD = "token "
CHARACTERS_PER_TOKEN = 4
LOGPROB = -0.5
"""Of every token: there is no distribution behind it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """One request."""

    rid: str | None
    text: bytes
    """The prompt as the cache compares it."""
    prompt_tokens: int
    output_tokens: int
    logprobs: bool
    stream: bool
    is_chat: bool

    @property
    def blocks(self) -> list[int]:
        return blocks_of(self.text)

    def block_tokens(self, block_bytes: int) -> float:
        return self.prompt_tokens * block_bytes / max(1, len(self.text))


def read_generate(body: bytes) -> Asked:
    """A body of `/generate` with `input_ids`.

    The engine, not the client, decides where an answer ends, so the length that a trace plans
    travels in `sampling_seed`, which no router reads; without one, `max_new_tokens` is reached.

    Raises:
        ValueError: it is not such a body.
    """
    key = body.find(b'"input_ids"')
    start = body.find(b"[", key)
    end = body.find(b"]", start)
    if key < 0 or start < 0 or end < 0:
        raise ValueError("input_ids: missing; a timed replica takes ids, as a list in JSON")
    text = body[start + 1 : end].strip()
    rest = orjson.loads(body[:start] + b"[]" + body[end + 1 :])
    sampling = rest.get("sampling_params") or {}
    limit = int(sampling.get("max_new_tokens", 128))
    return Asked(
        rid=rest.get("rid"),
        text=text,
        prompt_tokens=text.count(b",") + 1 if text else 0,
        output_tokens=max(1, min(limit, int(sampling.get("sampling_seed") or limit))),
        logprobs=bool(rest.get("return_logprob")),
        stream=bool(rest.get("stream")),
        is_chat=False,
    )


def read_chat(body: bytes) -> Asked:
    """A body of `/v1/chat/completions`; `seed` plans the length as above."""
    document = orjson.loads(body)
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: missing or empty")
    text = "".join(f"<{m.get('role')}>{m.get('content')}" for m in messages).encode()
    limit = int(document.get("max_completion_tokens") or document.get("max_tokens") or 128)
    return Asked(
        rid=document.get("rid"),
        text=text,
        prompt_tokens=1 + len(text) // CHARACTERS_PER_TOKEN,
        output_tokens=max(1, min(limit, int(document.get("seed") or limit))),
        logprobs=bool(document.get("logprobs")),
        stream=bool(document.get("stream")),
        is_chat=True,
    )


def output_text(asked: Asked) -> bytes:
    """What is sampled: ids in JSON without brackets, or words."""
    if asked.is_chat:
        return (WORD * asked.output_tokens).encode()
    count = min(asked.output_tokens, NUM_IDS)
    offset = (asked.prompt_tokens * 31) % (NUM_IDS - count + 1)
    return STREAM[offset * ID_BYTES : (offset + count) * ID_BYTES - 1]


def whole_text(asked: Asked, output: bytes) -> bytes:
    """Prompt and answer as the session's next prompt will contain them."""
    return asked.text + (b"<assistant>" if asked.is_chat else b",") + output


def generate_reply(asked: Asked, output: bytes, meta: dict[str, Any], *, count: int) -> bytes:
    """The answer to `/generate` with the first `count` ids."""
    ids = output[: count * ID_BYTES - 1] if count else b""
    if asked.logprobs:
        rows = [[LOGPROB, int(token), None] for token in ids.split(b",")] if ids else []
        meta = {**meta, "output_token_logprobs": rows}
    return b'{"text":"","output_ids":[' + ids + b'],"meta_info":' + orjson.dumps(meta) + b"}"


def chat_reply(
    asked: Asked, output: bytes, meta: dict[str, Any], *, count: int, created: int
) -> dict[str, Any]:
    """The answer to `/v1/chat/completions`, not streamed."""
    content = output[: count * len(WORD)].decode()
    return {
        "id": meta["id"],
        "object": "chat.completion",
        "created": created,
        "model": "timed",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": content},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": asked.prompt_tokens,
            "completion_tokens": count,
            "total_tokens": asked.prompt_tokens + count,
            "prompt_tokens_details": {"cached_tokens": meta["cached_tokens"]},
        },
        "metadata": {"weight_version": meta["weight_version"]},
    }
