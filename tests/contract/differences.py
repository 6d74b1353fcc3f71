"""Where our engines differ from the real SGLang 0.5.23, each with its reason.

The tests of the contract look up what to expect here and nowhere else, so an engine that drifts
fails, and so does a difference that is gone. A value is what was seen: a status, or one word.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Difference:
    sglang: object
    embedded: object
    scripted: object
    why: str


DIFFERENCES = {
    "a kept set without a finite top_k": Difference(
        sglang=400,
        embedded=200,
        scripted=200,
        why="SGLang wants 1 <= top_k <= 4096 for a sampling mask; ours record what top-p keeps",
    ),
    "the same seed, the same turn": Difference(
        sglang=False,
        embedded=True,
        scripted=True,
        why="SGLang takes sampling_seed without deterministic inference and does not use it",
    ),
    "a prefix is found again": Difference(
        sglang=True, embedded=True, scripted=False, why="a script has no keys and values"
    ),
    "text instead of input_ids": Difference(
        sglang=200, embedded=400, scripted=400, why="ours take token ids only"
    ),
    "a tensor that the model does not have": Difference(
        sglang=200,
        embedded=400,
        scripted=200,
        why="SGLang ignores the name, stamps the version and reports success; the pusher therefore "
        "compares names beforehand. The embedded engine says so",
    ),
    "version told after an update whose flush was refused": Difference(
        sglang="0",
        embedded="1",
        scripted="1",
        why="the weights and the spans of running turns changed, but SGLang's HTTP process notes "
        "only updates that succeeded whole; read spans, not /model_info",
    ),
}


def expected(topic: str, engine) -> object:
    """What this engine does about `topic`."""
    return getattr(DIFFERENCES[topic], engine.kind)


SGLANG_KEYS = {
    "/v1/loads": {
        "timestamp",
        "version",
        "accelerator",
        "num_accelerators",
        "loads",
        "dp_rank",
        "num_running_reqs",
        "num_waiting_reqs",
        "num_waiting_uncached_tokens",
        "num_used_tokens",
        "num_total_tokens",
        "num_active_tokens",
        "num_prealloc_ready_tokens",
        "max_total_num_tokens",
        "max_running_requests",
        "token_usage",
        "gen_throughput",
        "cache_hit_rate",
        "utilization",
        "total_prefill_uncached_tokens",
        "total_prefill_busy_us",
        "decode_moments",
        "memory",
        "queues",
    },
    "/server_info": {
        "status",
        "version",
        "model_path",
        "served_model_name",
        "weight_version",
        "max_total_num_tokens",
        "max_req_input_len",
        "max_running_requests",
        "context_length",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "attention_backend",
        "moe_runner_backend",
        "tp_size",
        "random_seed",
        "startup_time",
    },
    "/model_info": {"model_path", "weight_version", "is_generation"},
}
"""What the real server answers and ours have of it; it has hundreds more in /server_info."""

DOCUMENT_EXTRAS = {
    "/v1/loads": {
        "emulated",
        "weight_version",
        "paused",
        "total_generated_tokens",
        "total_requests",
    },
    "/server_info": {
        "engine",
        "accelerator",
        "emulated",
        "weights",
        "view",
        "consistency",
        "activations",
        "kv",
        "attention",
        "pool",
        "replica",
        "numerics_key",
        "numerics",
    },
    "/model_info": {"vocab_size", "context_length"},
}
"""Keys that only our servers answer: what a pool computes in, and totals that SGLang has in
/metrics only."""
