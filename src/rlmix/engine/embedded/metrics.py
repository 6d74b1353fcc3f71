"""`/metrics` of the embedded engine: Prometheus text under SGLang's names."""

from rlmix.engine.embedded.scheduler import Scheduler


def prometheus_text(scheduler: Scheduler, *, labels: dict[str, str], weight_bytes: int) -> str:
    """One scrape."""
    stats = scheduler.stats
    used, cached = scheduler.num_used_tokens, scheduler.prefixes.num_tokens
    free = scheduler.max_total_tokens - used - cached
    gauges: dict[str, float] = {
        "num_running_reqs": scheduler.num_running,
        "num_queue_reqs": scheduler.num_waiting,
        "num_paused_reqs": scheduler.num_running if scheduler.is_paused else 0,
        "num_used_tokens": used + cached,
        "token_usage": used / scheduler.max_total_tokens,
        "max_total_num_tokens": scheduler.max_total_tokens,
        "gen_throughput": stats.throughput(),
        "cache_hit_rate": stats.cache_hit_frac,
        "utilization": scheduler.num_running / scheduler.max_running,
        "kv_available_tokens": free,
        "kv_evictable_tokens": cached,
        "kv_used_tokens": used,
        "weight_memory_usage_gb": weight_bytes / 2**30,
        "kv_cache_memory_usage_gb": scheduler.cache.num_bytes / 2**30,
        "weight_version": scheduler.version,
    }
    counters: dict[str, float] = {
        "num_requests_total": stats.num_requests,
        "num_aborted_requests_total": stats.num_aborted,
        "num_retracted_requests_total": stats.num_retracted,
        "prompt_tokens_total": stats.prompt_tokens,
        "generation_tokens_total": stats.generated_tokens,
        "cached_tokens_total": stats.cached_tokens,
        "prefill_uncached_tokens_total": stats.prefill_tokens,
        "weight_updates_total": stats.num_updates,
        "weight_load_duration_seconds_total": stats.update_s,
        "time_to_first_token_seconds_sum": stats.first_token_s,
        "e2e_request_latency_seconds_sum": stats.latency_s,
    }
    text = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = []
    for kind, values in (("gauge", gauges), ("counter", counters)):
        for name, value in values.items():
            lines.append(f"# TYPE sglang:{name} {kind}")
            lines.append(f"sglang:{name}{{{text}}} {value:.9g}")
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
