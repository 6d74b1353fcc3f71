"""Whether a model fits a pool: tensor-parallel limits and memory. Pure, one line a fault."""

from collections.abc import Iterator
from dataclasses import replace

from rlmix.config.schema.pools import AcceleratorConfig, PoolConfig
from rlmix.plan.memory import CONTEXTS_TOKENS, MemoryBudget, memory_budget
from rlmix.plan.model_facts import FP8_BLOCK, ModelFacts
from rlmix.plan.views import ALL, pool_view

TP_SIZES = (1, 2, 4, 8, 16)


def pool_budget(
    pool: PoolConfig, chip: AcceleratorConfig, facts: ModelFacts, *, tp: int | None = None
) -> MemoryBudget:
    """Memory of one replica, at another tensor-parallel size if one is given."""
    return memory_budget(
        facts,
        chip,
        weights=pool_view(pool),
        kv=pool.kv,
        state=pool.state if facts.is_hybrid else "bf16",
        tp=tp or pool.tp,
        memory_frac=pool.memory_frac,
        max_running=pool.max_running,
    )


def fit_faults(
    name: str,
    pool: PoolConfig,
    chip: AcceleratorConfig,
    facts: ModelFacts,
    *,
    context_tokens: int,
) -> Iterator[str]:
    """Why this pool cannot hold or split the model, each with a setting that can."""
    sizes = facts.tp_sizes(pool.weights)
    fitting = [tp for tp in sizes if _holds(pool, chip, facts, tp, context_tokens)]
    if pool.tp not in sizes:
        causes = []
        width = facts.expert_width
        if pool.weights == "fp8" and not facts.fp8_blocks_divide(pool.tp):
            causes.append(
                f"FP8 blocks of {FP8_BLOCK} do not divide an expert's width {width}/{pool.tp}="
                f"{width / pool.tp:g}"
            )
        if facts.heads % pool.tp or facts.linear_heads % pool.tp:
            causes.append(f"{facts.heads} attention heads do not divide by {pool.tp}")
        if facts.kv_heads % pool.tp and pool.tp % facts.kv_heads:
            causes.append(f"{facts.kv_heads} KV heads neither divide by {pool.tp} nor copy evenly")
        else:
            causes.append(kv_copies(pool, facts))
        best = f"set pools.{name}.tp={fitting[0]}" if fitting else "take larger accelerators"
        allowed = ", ".join(map(str, sizes))
        yield (
            f"pools.{name}.tp: got {pool.tp} on {pool.accelerator}: "
            f"{'; '.join(filter(None, causes))}; use one of {allowed}; {best}"
        )
        return
    if pool.tp in fitting:
        return
    yield _memory_fault(name, pool, chip, facts, fitting, context_tokens)


def _memory_fault(
    name: str,
    pool: PoolConfig,
    chip: AcceleratorConfig,
    facts: ModelFacts,
    fitting: list[int],
    context_tokens: int,
) -> str:
    """Too little room for one session of `context_tokens`, told by what takes the room. Every
    change that it names was tried."""
    budget = pool_budget(pool, chip, facts)
    share = (
        f"of the {budget.share_gib:.1f} GiB that memory_frac={pool.memory_frac:g} of {pool.tp} x "
        f"{chip.memory_gb:g} GB gives to weights and caches"
    )
    alone = pool_budget(replace(pool, max_running=1), chip, facts)
    if alone.kv_tokens >= context_tokens:
        running = _most_running(pool, chip, facts, context_tokens)
        return (
            f"pools.{name}.max_running: got {pool.max_running} on {pool.accelerator}: the "
            f"recurrent states of as many requests take {budget.state_gib:.1f} GiB beside "
            f"{budget.weights_gib:.1f} GiB of {pool.weights} weights {share}, and no session of "
            f"{context_tokens} tokens fits beside them; set pools.{name}.max_running={running} or "
            "less"
        )
    changes = [f"pools.{name}.tp={tp}" for tp in fitting if tp > pool.tp][:1]
    narrow = replace(pool, weights="fp8", activations="fp8", scope=ALL)
    if (
        pool.weights == "bf16"
        and chip.fp8_tflops is not None
        and pool.tp in facts.tp_sizes("fp8")
        and _holds(narrow, chip, facts, pool.tp, context_tokens)
    ):
        changes.append(f"pools.{name}.weights=fp8 pools.{name}.activations=fp8")
    if not changes:
        fewer = replace(pool, max_running=1)
        sizes = [
            tp
            for tp in facts.tp_sizes(pool.weights)
            if _holds(fewer, chip, facts, tp, context_tokens)
        ]
        if sizes:
            running = _most_running(replace(pool, tp=sizes[0]), chip, facts, context_tokens)
            changes = [f"pools.{name}.tp={sizes[0]} pools.{name}.max_running={running} or less"]
    held = "nothing is left for a cache"
    if alone.kv_tokens:
        held = f"{alone.kv_tokens} tokens of cache fit beside them, not {context_tokens}"
    return (
        f"pools.{name}.tp: got {pool.tp} on {pool.accelerator}: {pool.weights} weights take "
        f"{budget.weights_gib:.1f} GiB {share}, and {held}; "
        f"{'set ' + ' or '.join(changes) if changes else 'take larger accelerators'}"
    )


def _most_running(
    pool: PoolConfig, chip: AcceleratorConfig, facts: ModelFacts, context_tokens: int
) -> int:
    """Largest `max_running` below the pool's whose states leave room for one longest session; at
    least 1."""
    low, high = 1, pool.max_running
    while low < high:
        middle = (low + high + 1) // 2
        tried = replace(pool, max_running=middle)
        if pool_budget(tried, chip, facts).kv_tokens >= context_tokens:
            low = middle
        else:
            high = middle - 1
    return low


def _holds(
    pool: PoolConfig, chip: AcceleratorConfig, facts: ModelFacts, tp: int, context_tokens: int
) -> bool:
    """True when one request of the longest session fits beside the states of all."""
    return pool_budget(pool, chip, facts, tp=tp).kv_tokens >= context_tokens


def fit_warnings(
    name: str, pool: PoolConfig, chip: AcceleratorConfig, facts: ModelFacts, context_tokens: int
) -> Iterator[str]:
    """What works and will hurt."""
    budget = pool_budget(pool, chip, facts)
    if copies := kv_copies(pool, facts):
        yield f"{name}: {copies}"
    if pool.tp > 1 and "pcie" in chip.link.lower():
        yield (
            f"{name}: tp={pool.tp} on {pool.accelerator} sums over {chip.link}; expect less than "
            "the modelled speed"
        )
    middle = CONTEXTS_TOKENS[1]
    fits = budget.requests[str(middle)]
    if context_tokens >= middle and fits < pool.max_running:
        yield (
            f"{name}: {fits} requests of {middle} tokens fit at a time, fewer than "
            f"max_running={pool.max_running}; long sessions will be retracted and prefilled again"
        )


def kv_copies(pool: PoolConfig, facts: ModelFacts) -> str:
    """A clause when tensor parallelism copies KV heads; empty otherwise."""
    if pool.tp <= facts.kv_heads:
        return ""
    return (
        f"{facts.kv_heads} KV heads on tp={pool.tp} are stored {pool.tp // facts.kv_heads} times, "
        "so the cache gains nothing"
    )
