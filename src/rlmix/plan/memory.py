"""Where a replica's memory goes: weights, recurrent state, KV cache. Computed, never measured.

A replica gives `memory_frac` of its accelerators to weights and caches and keeps the rest for
activations, graphs and libraries, as SGLang's `--mem-fraction-static` does. Invariant: numbers are
of the whole replica; what tensor parallelism copies is counted as often as it is held.
"""

from dataclasses import dataclass

from rlmix.config.schema.pools import AcceleratorConfig
from rlmix.plan.model_facts import ModelFacts

GIB = 2.0**30
RUNTIME_BYTES = 2e9
"""Memory of the engine itself on each accelerator: context, communication buffers."""
STATE_SLOTS_PER_REQUEST = 5
"""SGLang holds 3 slots of recurrent state for each running request, and 2 more to track the states
of its prefix cache while batches overlap (extra_buffer)."""
CONTEXTS_TOKENS = (8_192, 32_768, 262_144)
"""Contexts that a plan tells the concurrency at: a short and a long session, and the longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """One replica, all its accelerators together."""

    total_gib: float
    share_gib: float
    """What weights and caches may take."""
    weights_gib: float
    state_gib: float
    """Recurrent state of `max_running` requests; 0 for models without."""
    kv_gib: float
    """What is left for the KV cache."""
    kv_tokens: int
    """Tokens of context that it holds."""
    requests: dict[str, int]
    """Tokens of context (as text, for JSON) -> requests that fit at a time, `max_running` aside."""


def memory_budget(
    facts: ModelFacts,
    chip: AcceleratorConfig,
    *,
    weights: str,
    kv: str,
    state: str,
    tp: int,
    memory_frac: float,
    max_running: int,
) -> MemoryBudget:
    """How the memory of one replica of `tp` accelerators is divided.

    Args:
        weights: the view, as `numerics.view_spec` reads it.
        state: format of the recurrent state; any name for models without one.
    """
    total = tp * chip.memory_gb * 1e9
    room = memory_frac * total - tp * RUNTIME_BYTES - facts.weight_bytes(weights)
    state_bytes = STATE_SLOTS_PER_REQUEST * facts.state_bytes(state)
    token_bytes = kv_bytes_held(facts, kv=kv, tp=tp)
    left = room - max_running * state_bytes
    return MemoryBudget(
        total_gib=total / GIB,
        share_gib=memory_frac * total / GIB,
        weights_gib=facts.weight_bytes(weights) / GIB,
        state_gib=max_running * state_bytes / GIB,
        kv_gib=max(left, 0.0) / GIB,
        kv_tokens=max(int(left // token_bytes), 0),
        requests={
            str(context): max(int(room // (context * token_bytes + state_bytes)), 0)
            for context in CONTEXTS_TOKENS
        },
    )


def kv_bytes_held(facts: ModelFacts, *, kv: str, tp: int) -> float:
    """Bytes that one token of context takes on all accelerators together: beyond one KV head an
    accelerator, heads are copied."""
    copies = max(tp / facts.kv_heads, 1.0)
    return facts.kv_bytes_per_token(kv) * copies
