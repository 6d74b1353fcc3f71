"""Whether a model fits a pool: tensor-parallel limits and memory. Pure, one line a fault."""

from collections.abc import Iterator

from rlmix.config.schema.pools import AcceleratorConfig, PoolConfig
from rlmix.plan.memory import CONTEXTS_TOKENS, MemoryBudget, memory_budget
from rlmix.plan.model_facts import FP8_BLOCK, ModelFacts

TP_SIZES = (1, 2, 4, 8, 16)


def pool_budget(
    pool: PoolConfig, chip: AcceleratorConfig, facts: ModelFacts, *, tp: int | None = None
) -> MemoryBudget:
    """Memory of one replica, at another tensor-parallel size if one is given."""
    return memory_budget(
        facts,
        chip,
        weights=pool.weights,
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
    budget = pool_budget(pool, chip, facts)
    larger = [tp for tp in fitting if tp > pool.tp]
    changes = [f"pools.{name}.tp={tp}" for tp in larger[:1]]
    if pool.weights == "bf16" and chip.fp8_tflops is not None:
        changes.append(f"pools.{name}.weights=fp8 pools.{name}.activations=fp8")
    room_gib = budget.share_gib - budget.weights_gib
    longest = budget.requests.get(str(context_tokens), 0)
    held = (
        f"{longest} requests of {context_tokens} tokens fit beside them"
        if room_gib > 0
        else "nothing is left for a cache"
    )
    yield (
        f"pools.{name}.tp: got {pool.tp} on {pool.accelerator}: {pool.weights} weights take "
        f"{budget.weights_gib:.1f} GiB of the {budget.share_gib:.1f} GiB that "
        f"memory_frac={pool.memory_frac:g} of {pool.tp} x {chip.memory_gb:g} GB gives to weights "
        f"and caches, and {held}; set {' or '.join(changes) or 'fewer weights'}"
    )


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
