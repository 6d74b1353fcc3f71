"""One request inside the embedded engine: what was asked, how far it is, what is recorded.

Invariant: a request that was accepted can be served; everything that could make a forward fail
(ids outside the vocabulary, lengths beyond the context) was refused before.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlmix.core.candidates import Candidates
from rlmix.core.trajectory import VersionSpan
from rlmix.engine import wire
from rlmix.engine.embedded.routes import Routes
from rlmix.engine.http import RequestError
from rlmix.engine.protocol import GREEDY_TEMPERATURE
from rlmix.engine.sampling import UniformStream

REFUSED_WHEN_SET = {
    "min_p": 0,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_new_tokens": 0,
    "n": 1,
    "stop": None,
    "stop_regex": None,
    "regex": None,
    "json_schema": None,
    "ebnf": None,
    "logit_bias": None,
    "beam_width": None,
}
"""SGLang's sampling parameters that this engine does not have, and the values that ask for
nothing. Any other value is refused: ignoring one would change what is sampled."""

MASK_MODES = ("selected", "support")


class Request:
    """State of one `/generate` call."""

    def __init__(
        self,
        *,
        rid: str,
        prompt: np.ndarray,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        stop_ids: frozenset[int],
        seed: int,
        wants_logprobs: bool,
        num_top_logprobs: int,
        mask_mode: str | None,
        salt: str,
        routes_start: int | None = None,
        wants_shares: bool = False,
    ) -> None:
        """`temperature` is already 1 and `top_k` 1 for a greedy request; `top_k` is V for all."""
        self.rid = rid
        self.prompt = prompt
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k
        self.stop_ids = stop_ids
        self.uniforms = UniformStream(seed)
        self.wants_logprobs = wants_logprobs
        self.num_top_logprobs = num_top_logprobs
        self.mask_mode = mask_mode
        self.salt = salt
        self.routes_start = routes_start
        """First position whose routes are asked for; None: none are."""
        self.wants_shares = wants_shares
        self.routes: Routes | None = None
        """Of the positions from 0; None until the request leaves a slot."""
        self.arrived_s = time.monotonic()
        self.first_token_s = 0.0
        self.finished_s = 0.0
        self.done: asyncio.Future[Request] | None = None
        self.finish_reason: dict[str, Any] | None = None
        self.output_ids: list[int] = []
        self.logprobs: list[np.float32] = []
        self.sampling_logprobs: list[np.float32] = []
        self.kept_sets: list[tuple[np.ndarray, np.ndarray]] = []
        """Per output token: ids and logprobs."""
        self.heads: list[tuple[np.ndarray, np.ndarray]] = []
        self.spans: list[VersionSpan] = []
        self.num_computed = 0
        """Tokens whose keys and values are in the request's slot."""
        self.kv_version = -1
        """Weight version that computed them."""
        self.num_cached = 0
        self.num_retractions = 0
        self.is_broken = False
        """Its logits were NaN or Inf."""

    @property
    def length(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt) + len(self.output_ids)

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.max_new_tokens

    def ids(self, start: int, end: int) -> np.ndarray:
        """Token ids start:end of prompt and output together, int64."""
        edge = len(self.prompt)
        if end <= edge:
            return self.prompt[start:end]
        tail = np.array(self.output_ids[max(0, start - edge) : end - edge], dtype=np.int64)
        return tail if start >= edge else np.concatenate((self.prompt[start:], tail))

    def append(self, token: int, *, version: int) -> None:
        """Take one sampled token; sets `finish_reason` when it was the last."""
        position = len(self.output_ids)
        self.output_ids.append(token)
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        else:
            start = position
        self.spans.append(VersionSpan(version=version, start=start, end=position + 1))
        if token in self.stop_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif position + 1 == self.max_new_tokens:
            self.finish_reason = {"type": "length", "length": position + 1}

    def answer(self, *, weight_version: int) -> wire.Answer:
        """What was sampled and recorded."""
        assert self.finish_reason is not None
        routes = None if self.routes_start is None else self.routes
        if routes is not None:
            routes = routes.part(self.routes_start or 0, len(routes))
        return wire.Answer(
            rid=self.rid,
            output_ids=self.output_ids,
            finish_reason=self.finish_reason,
            num_prompt_tokens=len(self.prompt),
            num_cached_tokens=self.num_cached,
            spans=self.spans,
            weight_version=weight_version,
            latency_s=self.finished_s - self.arrived_s,
            num_retractions=self.num_retractions,
            logprobs=np.array(self.logprobs, dtype=np.float32) if self.wants_logprobs else None,
            sampling_logprobs=np.array(self.sampling_logprobs, dtype=np.float32)
            if self.mask_mode
            else None,
            kept=_joined(self.kept_sets) if self.mask_mode else None,
            tells_support=self.mask_mode == "support",
            head=_joined(self.heads) if self.num_top_logprobs else None,
            experts=None if routes is None else routes.ids,
            expert_shares=None if routes is None or not self.wants_shares else routes.shares,
        )


def _joined(sets: Sequence[tuple[np.ndarray, np.ndarray]]) -> Candidates:
    sizes = np.fromiter((len(ids) for ids, _ in sets), dtype=np.int64, count=len(sets))
    return Candidates(
        offsets=np.concatenate(([0], sizes.cumsum())),
        ids=np.concatenate([ids for ids, _ in sets] or [np.empty(0, np.int32)]),
        logprobs=np.concatenate([values for _, values in sets] or [np.empty(0, np.float32)]),
    )


def parse_request(
    body: Mapping[str, Any],
    *,
    rid: str,
    default_seed: int,
    vocab_size: int,
    context_length: int,
    max_total_tokens: int,
    eos_ids: tuple[int, ...],
) -> Request:
    """A request out of a `/generate` body.

    Raises:
        RequestError: 400 with what is wrong and what is allowed.
    """
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise RequestError(400, "sampling_params must be an object")
    for name, harmless in REFUSED_WHEN_SET.items():
        value = params.get(name, harmless)
        if value != harmless and value not in (None, [], {}):
            raise RequestError(400, f"{name}={value!r}: the embedded engine has no {name}")
    if body.get("stream"):
        raise RequestError(400, "stream=true: the embedded engine answers whole turns only")
    prompt = _prompt(body, vocab_size=vocab_size)
    max_new_tokens = _whole(params, "max_new_tokens", 128, low=1)
    total = len(prompt) + max_new_tokens
    limit = min(context_length, max_total_tokens)
    if total > limit:
        raise RequestError(
            400,
            f"requested {len(prompt)} input and {max_new_tokens} new tokens, {total} in all; "
            f"the limit is {limit} (context {context_length}, KV budget {max_total_tokens})",
        )
    temperature = _number(params, "temperature", 1.0, low=0.0, high=math.inf)
    top_p = _number(params, "top_p", 1.0, low=0.0, high=1.0)
    top_k = _whole(params, "top_k", -1, low=-1)
    if top_k == 0:
        raise RequestError(400, "top_k=0; give -1 for all tokens or at least 1")
    is_greedy = temperature < GREEDY_TEMPERATURE
    num_top_logprobs = _whole(body, "top_logprobs_num", 0, low=0)
    if num_top_logprobs > vocab_size:
        raise RequestError(
            400, f"top_logprobs_num={num_top_logprobs}; the vocabulary has {vocab_size}"
        )
    mask_mode = None
    if body.get("return_sampling_mask"):
        mask_mode = body.get("sampling_logprobs_mode") or "selected"
        if mask_mode not in MASK_MODES:
            raise RequestError(
                400, f"sampling_logprobs_mode={mask_mode!r}; allowed: {', '.join(MASK_MODES)}"
            )
    routes_start = None
    if body.get("return_routed_experts"):
        routes_start = _whole(body, "routed_experts_start_len", 0, low=0)
        if routes_start > len(prompt):
            raise RequestError(
                400,
                f"routed_experts_start_len={routes_start}; allowed: 0 to the {len(prompt)} input "
                "tokens",
            )
    stop_ids: frozenset[int] = frozenset()
    if not params.get("ignore_eos"):
        stop_ids = frozenset((*eos_ids, *_stop_ids(params)))
    seed = params.get("sampling_seed")
    return Request(
        rid=rid,
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        temperature=1.0 if is_greedy else temperature,
        top_p=top_p,
        top_k=1 if is_greedy else vocab_size if top_k < 0 else min(top_k, vocab_size),
        stop_ids=stop_ids,
        seed=default_seed if seed is None else _whole(params, "sampling_seed", 0, low=-(2**63)),
        wants_logprobs=bool(body.get("return_logprob")),
        num_top_logprobs=num_top_logprobs,
        mask_mode=mask_mode,
        salt=str(body.get("cache_salt") or ""),
        routes_start=routes_start,
        wants_shares=bool(body.get("return_expert_shares")),
    )


def _prompt(body: Mapping[str, Any], *, vocab_size: int) -> np.ndarray:
    ids = body.get("input_ids")
    if ids is None:
        raise RequestError(
            400, "input_ids is missing; the embedded engine takes token ids, no text"
        )
    if not isinstance(ids, list) or not ids:
        raise RequestError(400, "input_ids must be a list of at least one token id")
    try:
        prompt = np.array(ids)
    except ValueError:
        raise RequestError(400, "input_ids must be one flat list of token ids") from None
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise RequestError(400, "input_ids must be one flat list of whole numbers")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(400, f"token id {bad} is outside the vocabulary (0 to {vocab_size - 1})")
    return prompt.astype(np.int64)


def _stop_ids(params: Mapping[str, Any]) -> list[int]:
    ids = params.get("stop_token_ids") or []
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise RequestError(400, "stop_token_ids must be a list of token ids")
    return ids


def _number(
    params: Mapping[str, Any], name: str, default: float, *, low: float, high: float
) -> float:
    value = params.get(name)
    if value is None:
        return default
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        raise RequestError(400, f"{name}={value!r}; allowed: a number from {low:g} to {high:g}")
    return float(value)


def _whole(params: Mapping[str, Any], name: str, default: int, *, low: int) -> int:
    value = params.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise RequestError(400, f"{name}={value!r}; allowed: a whole number of at least {low}")
    return value
