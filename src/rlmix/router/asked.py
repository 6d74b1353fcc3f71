"""What an OpenAI-style body asks for, and the engine's body that asks for the same. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmix.router.template import Message, normal_message

DEFAULT_MAX_TOKENS = 1024
MASK_CAP = 4096
"""Largest kept set that engines record; SGLang wants a finite top_k of at most this with it."""
REFUSED = {
    "best_of": (None, 1), "echo": (None, False), "suffix": (None, ""), "n": (None, 1),
    "logit_bias": (None, {}), "response_format": (None, {"type": "text"}),
}  # fmt: skip
"""Fields that mean more than this router does, and the values that mean nothing."""


@dataclass(kw_only=True, slots=True)
class Asked:
    """One request. Exactly one of `messages`, `text` and `prompt_ids` is given."""

    messages: list[Message] | None = None
    text: str | None = None
    prompt_ids: list[int] | None = None
    tools: list[Any] = field(default_factory=list)
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: list[str]
    seed: int | None
    frequency_penalty: float
    presence_penalty: float
    is_stream: bool
    with_usage: bool
    logprobs: bool
    top_logprobs: int

    @property
    def parts(self) -> Sequence[Any]:
        """The conversation, in parts that can be continued: messages, or characters."""
        if self.messages is not None:
            return self.messages
        return self.text or ""

    @property
    def context(self) -> Any:
        """What else its ids depend on."""
        return self.tools

    @property
    def is_truncated(self) -> bool:
        return self.temperature > 0 and (self.top_p < 1.0 or self.top_k > 0)

    def sampling(self, vocab_size: int) -> dict[str, Any]:
        """The parameters that decide the distribution sampled from."""
        top_k = self.top_k
        if self.is_truncated and top_k < 1:
            # Kept sets need a finite top_k in SGLang 0.5.23.
            top_k = min(vocab_size, MASK_CAP)
        return {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": top_k,
            "min_p": self.min_p, "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }  # fmt: skip

    def engine_body(
        self,
        ids: list[int],
        *,
        request_id: str,
        stop_token_ids: Sequence[int],
        vocab_size: int,
    ) -> dict[str, Any]:
        """A `/generate` body in which no engine default applies."""
        params = {
            **self.sampling(vocab_size),
            "max_new_tokens": self.max_new_tokens,
            "stop_token_ids": list(stop_token_ids),
            "ignore_eos": False,
        }
        for key in ("frequency_penalty", "presence_penalty"):
            if not params[key]:
                del params[key]
        if self.stop:
            params["stop"] = self.stop
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        body: dict[str, Any] = {
            "rid": request_id,
            "input_ids": ids,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": self.top_logprobs,
        }
        if self.is_truncated:
            body["return_sampling_mask"] = True
            body["sampling_logprobs_mode"] = "support"
        return body


def read_chat(document: Any) -> Asked:
    """A body of `/v1/chat/completions`.

    Raises:
        ValueError: the field, what it was, and what is allowed.
    """
    fields = _object(document)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages: give a list of at least one")
    tools = fields.get("tools") or []
    if not isinstance(tools, list):
        raise ValueError("tools: give a list")
    if fields.get("tool_choice") == "none":
        tools = []
    logprobs = bool(fields.get("logprobs"))
    return Asked(
        messages=[normal_message(message) for message in messages],
        tools=tools,
        logprobs=logprobs,
        top_logprobs=int(_number(fields, "top_logprobs", 0, 0, 20)) if logprobs else 0,
        **_shared(fields),
    )


def read_completion(document: Any) -> Asked:
    """A body of `/v1/completions`; the prompt is text or token ids.

    Raises:
        ValueError: the field, what it was, and what is allowed.
    """
    fields = _object(document)
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    text, ids = None, None
    if isinstance(prompt, str) and prompt:
        text = prompt
    elif isinstance(prompt, list) and prompt and all(type(i) is int for i in prompt):
        ids = prompt
    else:
        raise ValueError("prompt: give one text or one list of token ids, not empty")
    top = fields.get("logprobs")
    return Asked(
        text=text,
        prompt_ids=ids,
        logprobs=top is not None and top is not False,
        top_logprobs=int(_number(fields, "logprobs", 0, 0, 20)) if top else 0,
        **_shared(fields),
    )


def _object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError("the body must be a JSON object")
    for key, nothing in REFUSED.items():
        if document.get(key) not in nothing:
            raise ValueError(f"{key}: {document[key]!r} is not served; leave it out")
    return document


def _shared(fields: dict[str, Any]) -> dict[str, Any]:
    stop = fields.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(word, str) for word in stop):
        raise ValueError("stop: give text or a list of texts")
    limit_key = "max_completion_tokens" if fields.get("max_completion_tokens") else "max_tokens"
    seed = fields.get("seed")
    if seed is not None and type(seed) is not int:
        raise ValueError(f"seed: {seed!r}; give a whole number")
    options = fields.get("stream_options") or {}
    return {
        "max_new_tokens": int(_number(fields, limit_key, DEFAULT_MAX_TOKENS, 1, 1 << 24)),
        "temperature": _number(fields, "temperature", 1.0, 0.0, 100.0),
        "top_p": _number(fields, "top_p", 1.0, 0.0, 1.0),
        "top_k": int(_number(fields, "top_k", -1, -1, 1 << 24)),
        "min_p": _number(fields, "min_p", 0.0, 0.0, 1.0),
        "stop": stop,
        "seed": seed,
        "frequency_penalty": _number(fields, "frequency_penalty", 0.0, -2.0, 2.0),
        "presence_penalty": _number(fields, "presence_penalty", 0.0, -2.0, 2.0),
        "is_stream": bool(fields.get("stream")),
        "with_usage": bool(isinstance(options, dict) and options.get("include_usage")),
    }


def _number(fields: dict[str, Any], key: str, default: float, low: float, high: float) -> float:
    value = fields.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:
        raise ValueError(f"{key}: {value!r}; give a number from {low:g} to {high:g}")
    return float(value)
