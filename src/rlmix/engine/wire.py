"""What our servers answer with: JSON in the shapes of the real SGLang 0.5.23, and the binary form
of `/generate`.

Pure functions, shared by the embedded server and the scripted fake, so that the two cannot differ
in shape. The client's side of the same shapes is `rlmix.engine.answers`.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from rlmix.core.candidates import Candidates
from rlmix.core.numerics_key import NumericsKey
from rlmix.core.trajectory import VersionSpan
from rlmix.engine.frame import encode_frame
from rlmix.engine.protocol import NUMERICS_HEADER, POOL_HEADER, REPLICA_HEADER

DEFAULT_MASK_CAP = 4096
"""Largest kept set that is recorded; a larger one ends the request with an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a server has to say to `/generate`. N output tokens."""

    rid: str
    output_ids: Sequence[int]
    finish_reason: Mapping[str, Any]
    num_prompt_tokens: int
    num_cached_tokens: int
    spans: Sequence[VersionSpan]
    weight_version: int
    latency_s: float
    num_retractions: int = 0
    logprobs: np.ndarray | None = None
    """float32 [N], after temperature, over the whole vocabulary; None when not asked for."""
    sampling_logprobs: np.ndarray | None = None
    """float32 [N], the sampled token's within its kept set; None when no sets were asked for."""
    kept: Candidates | None = None
    """Kept sets; None when none were asked for."""
    tells_support: bool = False
    """True: the sets' logprobs are part of the answer (`sampling_logprobs_mode` support)."""
    head: Candidates | None = None
    experts: np.ndarray | None = None
    """uint8 or int16 [tokens, layers, top_k], of the positions from the asked one to the last that
    was computed (the last sampled token was not); None when not asked for or not recorded."""
    expert_shares: np.ndarray | None = None
    """float32, of the same shape; None when not asked for. Not in SGLang."""


def meta_info(answer: Answer) -> dict[str, Any]:
    """All facts of an answer that are not one value per token."""
    spans = answer.spans
    return {
        "id": answer.rid,
        "finish_reason": dict(answer.finish_reason),
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": len(answer.output_ids),
        "cached_tokens": answer.num_cached_tokens,
        "weight_version": str(spans[-1].version if spans else answer.weight_version),
        "weight_versions": [
            {"version": str(span.version), "start": span.start, "end": span.end} for span in spans
        ],
        "num_retractions": answer.num_retractions,
        "e2e_latency": answer.latency_s,
    }


def generate_document(answer: Answer) -> dict[str, Any]:
    """The answer to `/generate` as JSON. Its float32 values are written in their shortest exact
    form."""
    meta = meta_info(answer)
    output_ids = list(answer.output_ids)
    if answer.logprobs is not None:
        meta["output_token_logprobs"] = [
            [logprob, token, None]
            for logprob, token in zip(answer.logprobs, output_ids, strict=True)
        ]
    if answer.head is not None:
        meta["output_top_logprobs"] = [
            [[logprob, token, None] for token, logprob in zip(ids.tolist(), values, strict=True)]
            for ids, values in _rows(answer.head)
        ]
    if answer.kept is not None:
        rows = _rows(answer.kept)
        meta["output_token_sampling_mask"] = [ids for ids, _ in rows]
        # Of masks, not of ids, whatever its name says.
        meta["output_token_sampling_mask_length"] = len(answer.kept)
        meta["output_token_sampling_logprobs"] = (
            [values for _, values in rows] if answer.tells_support else answer.sampling_logprobs
        )
    if answer.experts is not None:
        meta["routed_experts"] = _base64(answer.experts, "<i4")
    if answer.expert_shares is not None:
        meta["routed_expert_shares"] = _base64(answer.expert_shares, "<f4")
    return {"text": "", "output_ids": output_ids, "meta_info": meta}


def _base64(values: np.ndarray, dtype: str) -> str:
    """The bytes of an array without its shape, as SGLang answers routed experts."""
    return base64.b64encode(values.astype(dtype).tobytes()).decode()


def generate_frame(answer: Answer) -> bytes:
    """The same answer in binary (`engine.frame`), without what no client reads: a token's logprob
    is told once, in its kept set where that is asked for."""
    arrays = {"output_ids": np.array(answer.output_ids, dtype=np.int32)}
    if answer.kept is not None and answer.tells_support:
        arrays.update(_flat("kept", answer.kept))
    elif answer.sampling_logprobs is not None:
        arrays["sampling_logprobs"] = answer.sampling_logprobs
    elif answer.logprobs is not None:
        arrays["logprobs"] = answer.logprobs
    if answer.head is not None:
        arrays.update(_flat("head", answer.head))
    if answer.experts is not None:
        arrays["experts"] = answer.experts
    if answer.expert_shares is not None:
        arrays["expert_shares"] = answer.expert_shares
    return encode_frame(meta_info(answer), arrays)


def _flat(name: str, candidates: Candidates) -> dict[str, np.ndarray]:
    return {
        f"{name}_offsets": candidates.offsets,
        f"{name}_ids": candidates.ids,
        f"{name}_logprobs": candidates.logprobs,
    }


def _rows(candidates: Candidates) -> list[tuple[np.ndarray, np.ndarray]]:
    edges = candidates.offsets[1:-1]
    if not len(candidates):
        return []
    return list(
        zip(np.split(candidates.ids, edges), np.split(candidates.logprobs, edges), strict=True)
    )


def identity_headers(*, pool: str, replica: str, numerics: NumericsKey) -> dict[str, str]:
    """Headers that say who answered; the router passes them on."""
    return {
        POOL_HEADER: pool,
        REPLICA_HEADER: replica,
        NUMERICS_HEADER: numerics.compact(),
    }


def loads_document(
    *,
    engine_version: str,
    accelerator: str,
    num_running: int,
    num_waiting: int,
    num_waiting_uncached_tokens: int,
    num_used_tokens: int,
    num_cached_tokens: int,
    max_total_tokens: int,
    max_running: int,
    gen_throughput: float,
    cache_hit_frac: float,
    total_prefill_uncached_tokens: int,
    total_prefill_busy_us: int,
    decode_moments: Sequence[float],
    num_paused: int,
    num_retracted: int,
    weight_bytes: int,
    kv_bytes: int,
    is_paused: bool,
    weight_version: int,
    total_generated_tokens: int,
    total_requests: int,
) -> dict[str, Any]:
    """The answer to `/v1/loads`. Our own fields come last: `emulated`, `weight_version`, `paused`,
    `total_generated_tokens` and `total_requests`."""
    load = {
        "dp_rank": 0,
        "num_running_reqs": num_running,
        "num_waiting_reqs": num_waiting,
        "num_waiting_uncached_tokens": num_waiting_uncached_tokens,
        "num_used_tokens": num_used_tokens + num_cached_tokens,
        "num_total_tokens": num_used_tokens + num_waiting_uncached_tokens,
        "num_active_tokens": num_used_tokens,
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": max_total_tokens,
        "max_running_requests": max_running,
        "token_usage": num_used_tokens / max_total_tokens,
        "gen_throughput": gen_throughput,
        "cache_hit_rate": cache_hit_frac,
        "utilization": num_running / max_running,
        "total_prefill_uncached_tokens": total_prefill_uncached_tokens,
        "total_prefill_busy_us": total_prefill_busy_us,
        "decode_moments": list(decode_moments),
        "memory": {
            "weight_gb": weight_bytes / 2**30,
            "kv_cache_gb": kv_bytes / 2**30,
            "graph_gb": 0.0,
            "token_capacity": max_total_tokens,
        },
        "queues": {
            "waiting": num_waiting,
            "grammar": 0,
            "paused": num_paused,
            "retracted": num_retracted,
            "prealloc_ready": 0,
        },
    }
    return {
        "timestamp": datetime.now(UTC).isoformat(),
        "version": engine_version,
        "accelerator": accelerator,
        "num_accelerators": 1,
        "loads": [load],
        "emulated": True,
        "weight_version": str(weight_version),
        "paused": is_paused,
        "total_generated_tokens": total_generated_tokens,
        "total_requests": total_requests,
    }


def server_info_document(
    *,
    model_path: str,
    weight_version: int,
    max_total_tokens: int,
    max_running: int,
    context_length: int,
    pool: str,
    replica: str,
    numerics: NumericsKey,
    startup_s: float,
    seed: int,
) -> dict[str, Any]:
    """The answer to `/server_info`: the fields of the real one that mean something here, and what
    the pool computes in."""
    return {
        "status": "ready",
        "version": numerics.engine_version,
        "model_path": model_path,
        "served_model_name": model_path,
        "weight_version": str(weight_version),
        "max_total_num_tokens": max_total_tokens,
        "max_req_input_len": context_length - 1,
        "max_running_requests": max_running,
        "context_length": context_length,
        "dtype": "bfloat16",
        "quantization": None if numerics.weights == "bf16" else numerics.weights,
        "kv_cache_dtype": "fp8_e4m3" if numerics.kv == "fp8" else numerics.kv,
        "attention_backend": numerics.attention,
        "moe_runner_backend": numerics.moe,
        "tp_size": numerics.tp,
        "random_seed": seed,
        "startup_time": {"tokenizer_e2e": startup_s},
        "engine": numerics.engine,
        "accelerator": numerics.accelerator,
        "emulated": numerics.is_emulated,
        "weights": numerics.weights,
        "view": numerics.view,
        "activations": numerics.activations,
        "kv": numerics.kv,
        "attention": numerics.attention,
        "consistency": numerics.consistency,
        "pool": pool,
        "replica": replica,
        "numerics_key": numerics.compact(),
        "numerics": numerics.to_dict(),
    }


def update_document(*, success: bool, message: str, num_paused: int) -> dict[str, Any]:
    """The answer to `/update_weights_from_disk`; its status is 200 or 400."""
    return {"success": success, "message": message, "num_paused_requests": num_paused}
