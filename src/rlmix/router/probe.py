"""Asks replicas how they are, when nobody else says it: `/ready`, `/v1/loads`, `/server_info`.

What an answer means is decided in pure functions; any field may be missing. `/health` is never
asked: it generates a token, waits through pauses and can mark a live server unhealthy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_MAX_RUNNING = 256
"""For a server that does not say how many requests it runs at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loads:
    """What `/v1/loads` says, summed over data-parallel ranks; None where it does not say it."""

    running: int | None = None
    waiting: int | None = None
    waiting_tokens: int | None = None
    """Prompt tokens that wait to be prefilled."""
    used_tokens: int | None = None
    """KV tokens of running requests."""
    max_total_tokens: int | None = None
    max_running: int | None = None
    prefill_tokens: float | None = None
    """Prefilled since the start."""
    prefill_us: float | None = None
    """Time that took."""
    moments: tuple[float, ...] | None = None
    """Six sums over decoding steps since the start: steps, batch, microseconds, batch squared,
    batch times microseconds, tokens."""
    generated_tokens: float | None = None
    """Sampled since the start."""
    version: int | None = None
    is_paused: bool | None = None

    @property
    def progress(self) -> float | None:
        """Grows while work is done; None when the replica says nothing of the kind."""
        parts = [self.generated_tokens, self.prefill_tokens, self.prefill_us]
        parts += self.moments or ()
        known = [part for part in parts if part is not None]
        return sum(known) if known else None


def read_loads(document: Mapping[str, Any]) -> Loads:
    """The answer to `/v1/loads`. Fields of another type count as missing."""
    raw = document.get("loads")
    ranks = [rank for rank in raw if isinstance(rank, Mapping)] if isinstance(raw, list) else []

    def total(key: str) -> float | None:
        values = [number for rank in ranks if (number := _number(rank.get(key))) is not None]
        return sum(values) if values else None

    def whole(key: str) -> int | None:
        value = total(key)
        return None if value is None else int(value)

    moments = [found for rank in ranks if (found := _moments(rank.get("decode_moments")))]
    active = whole("num_active_tokens")
    return Loads(
        running=whole("num_running_reqs"),
        waiting=whole("num_waiting_reqs"),
        waiting_tokens=whole("num_waiting_uncached_tokens"),
        used_tokens=whole("num_used_tokens") if active is None else active,
        max_total_tokens=whole("max_total_num_tokens"),
        max_running=whole("max_running_requests"),
        prefill_tokens=total("total_prefill_uncached_tokens"),
        prefill_us=total("total_prefill_busy_us"),
        moments=tuple(sum(column) for column in zip(*moments, strict=True)) if moments else None,
        generated_tokens=_number(document.get("total_generated_tokens")),
        version=read_version(document.get("weight_version")),
        is_paused=bool(document["paused"]) if "paused" in document else None,
    )


def read_version(value: Any) -> int | None:
    """A weight version as engines spell it: digits, or `default` when they were never told."""
    text = str(value).strip()
    if text == "default":
        return 0
    return int(text) if text.isdecimal() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """What `/server_info` says and the router can use; None where it does not say it."""

    view: str | None
    """Weight view: `bf16`, `fp8`, `nvfp4` or the quantisation's own name."""
    numerics_key: str
    max_running: int | None
    max_total_tokens: int | None
    max_context_tokens: int | None
    version: int | None
    pool: str | None


def read_server_info(document: Mapping[str, Any]) -> ServerFacts:
    """From our engines or from the real SGLang, which has no numerics key: one is put together."""
    weights = document.get("weights") or document.get("quantization")
    if weights is None and isinstance(document.get("dtype"), str):
        weights = {"auto": "bf16", "bfloat16": "bf16"}.get(document["dtype"], document["dtype"])
    key = document.get("numerics_key")
    if not key:
        parts = [
            f"{short}={document[field]}"
            for short, field in (
                ("kv", "kv_cache_dtype"), ("attn", "attention_backend"),
                ("moe", "moe_runner_backend"), ("tp", "tp_size"), ("version", "version"),
            )
            if document.get(field) is not None
        ]  # fmt: skip
        key = "/".join([f"weights={weights or 'unknown'}", *parts])
    longest = _whole(document.get("context_length")) or _whole(document.get("max_req_input_len"))
    return ServerFacts(
        view=str(weights) if weights else None,
        numerics_key=str(key),
        max_running=_whole(document.get("max_running_requests")),
        max_total_tokens=_whole(document.get("max_total_num_tokens")),
        max_context_tokens=longest,
        version=read_version(document.get("weight_version")),
        pool=document["pool"] if isinstance(document.get("pool"), str) else None,
    )


def _moments(value: Any) -> list[float] | None:
    """Six sums that are numbers; None for anything else."""
    if not isinstance(value, list) or len(value) < 6:
        return None
    numbers = [number for one in value[:6] if (number := _number(one)) is not None]
    return numbers if len(numbers) == 6 else None


MOST = 1e18
"""No count or time of a server is above this."""


def _number(value: Any) -> float | None:
    """None unless it is a count or a time: a number from 0 to `MOST`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= MOST else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and number > 0 else None
