"""Engine arguments that change how fast a pool is and not what it computes. Pure.

What decides numbers is what the plan derives from keys of the numerics key (formats, kernels,
tensor parallelism, the model, the sampling) and what it sets itself for that reason. Invariant: no
knob is one of those, and none is a flag that only rlmix sets (`plan.engine_args`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlmix.config.schema.pools import AcceleratorConfig, PoolConfig
from rlmix.plan.accelerators import CPU, NPU, architecture
from rlmix.plan.engine_args import KEYS, NOT_OURS, sglang_flags
from rlmix.plan.profiles import CHUNKED_PREFILL_TOKENS, PAGE_TOKENS
from rlmix.scaling.tuning import Settings, Value

MAX_RUNNING = "max_running"
MEMORY_FRAC = "memory_frac"
POOL_KEYS = (MAX_RUNNING, MEMORY_FRAC)
"""Knobs that are keys of a pool; all others are arguments of the engine."""

NEUTRAL_OWNERS = {"pools.NAME.max_running", "pools.NAME.memory_frac"}
"""Keys of which flags follow, and that are no part of the numerics key."""

SET_FOR_NUMBERS = frozenset({
    "bf16-gemm-backend", "disable-custom-all-reduce", "disable-shared-experts-fusion", "dtype",
    "enable-deterministic-inference", "enforce-disable-flashinfer-allreduce-fusion", "ep-size",
    "fp4-gemm-backend", "fp8-gemm-backend", "mamba-radix-cache-strategy", "mamba-track-interval",
    "rl-on-policy-target", "sampling-backend", "sampling-defaults",
})  # fmt: skip
"""Flags that profiles set because they decide numbers or what is recorded."""


def numeric_flags() -> frozenset[str]:
    """Flags that decide numbers."""
    owned = {flag for flag, owner in KEYS.items() if owner not in NEUTRAL_OWNERS}
    return frozenset(owned) | SET_FOR_NUMBERS | frozenset(NOT_OURS)


def knobs_of(pool: PoolConfig, chip: AcceleratorConfig) -> dict[str, list[Value]]:
    """Argument -> values to try beside the one that the pool has.

    The embedded engine has its batch only. Pages are left alone where the attention kernel wants
    its own, memory and graphs where there is no accelerator. Chunks above the validated size are
    never tried.
    """
    knobs: dict[str, list[Value]] = {MAX_RUNNING: _near(pool.max_running)}
    if pool.engine == "embedded":
        return knobs
    kind = architecture(chip)
    offered: dict[str, Sequence[Value]] = {
        "chunked-prefill-size": (1024, 2048, 4096, CHUNKED_PREFILL_TOKENS),
        "schedule-policy": ("lpm", "fcfs"),
        "schedule-conservativeness": (0.3, 0.6, 1.0, 1.3),
        "radix-eviction-policy": ("lru", "lfu"),
        "max-prefill-tokens": (4096, 16384),
        "num-continuous-decode-steps": (1, 2, 4),
        "disable-radix-cache": (False, True),
    }
    if pool.attention not in PAGE_TOKENS:
        offered["page-size"] = (1, 16, 64)
    if kind not in (CPU, NPU):
        knobs[MEMORY_FRAC] = [
            round(value, 3) for value in (pool.memory_frac - 0.04, pool.memory_frac + 0.03)
        ]
        offered["cuda-graph-max-bs-decode"] = (pool.max_running // 2, pool.max_running * 2)
    known = sglang_flags()
    for name, values in offered.items():
        now = pool.engine_args.get(name, DEFAULTS.get(name))
        others = [value for value in values if value != now]
        if name in known and others:
            knobs[name] = others
    return knobs


DEFAULTS: Mapping[str, Value] = {
    "chunked-prefill-size": CHUNKED_PREFILL_TOKENS,
    "disable-radix-cache": False,
    "max-prefill-tokens": 16384,
    "num-continuous-decode-steps": 1,
    "page-size": 1,
    "radix-eviction-policy": "lru",
    "schedule-conservativeness": 1.0,
    "schedule-policy": "fcfs",
}
"""What a server does that was told nothing else: the profile's value, or SGLang 0.5.23's."""


def with_settings(pool: PoolConfig, settings: Settings) -> PoolConfig:
    """The pool with other values of its knobs."""
    given = dict(settings)
    max_running = int(given.pop(MAX_RUNNING, pool.max_running))
    memory_frac = float(given.pop(MEMORY_FRAC, pool.memory_frac))
    return replace(
        pool,
        max_running=max_running,
        memory_frac=memory_frac,
        engine_args={**pool.engine_args, **given},
    )


def _near(now: int) -> list[Value]:
    """Half and double, twice: a batch is memory against reuse of weights."""
    return [size for size in (now // 4, now // 2, now * 2, now * 4) if size >= 1 and size != now]
