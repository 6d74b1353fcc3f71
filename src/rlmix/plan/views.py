"""Which weight views a run publishes, and which of them a pool reads.

Pure. Invariant: a run has one view of each format, quantised once a version, so all pools of a
format have one scope. The plan's bytes, the trainer's list and the published folders follow it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlmix.config.schema.pools import PoolConfig
from rlmix.config.schema.train import TrainConfig
from rlmix.numerics.view_spec import SCOPES
from rlmix.plan.model_facts import ModelFacts

ALL, EXPERTS = SCOPES


def scoped(config: TrainConfig, facts: ModelFacts) -> TrainConfig:
    """The configuration with the scope of every pool filled in."""
    pools = {
        name: replace(pool, scope=_scope(pool.weights, config.pools, facts))
        for name, pool in config.pools.items()
    }
    return replace(config, pools=pools)


def pool_view(pool: PoolConfig) -> str:
    """The weight view that a pool reads, as `numerics.view_spec` reads it; its scope is filled
    in."""
    return f"{pool.weights}:{EXPERTS}" if pool.scope == EXPERTS else pool.weights


def scope_faults(pools: Mapping[str, PoolConfig], facts: ModelFacts) -> Iterator[str]:
    """Scopes that cannot be, or not together, one line each."""
    asked = {name: pool for name, pool in pools.items() if pool.scope is not None}
    for name, pool in asked.items():
        where = f"pools.{name}.scope"
        if pool.scope == EXPERTS and pool.weights == "bf16":
            yield f"{where}: got experts, but bf16 weights are not quantised; set {where}=null"
        elif pool.scope == EXPERTS and not facts.is_moe:
            yield f"{where}: got experts, but {facts.name} has none; set {where}=all"
    for weights in sorted({pool.weights for pool in asked.values()}):
        scopes = {name: pool.scope for name, pool in asked.items() if pool.weights == weights}
        if len(set(scopes.values())) > 1:
            told = ", ".join(f"{name} {scope}" for name, scope in scopes.items())
            first = next(iter(scopes.values()))
            yield (
                f"pools.{list(scopes)[-1]}.scope: pools of {weights} weights read one view, and "
                f"their scopes differ ({told}); set all to {first}"
            )


def _scope(weights: str, pools: Mapping[str, PoolConfig], facts: ModelFacts) -> str:
    """What a pool of this format asks for; else experts for NVFP4 on real servers, which is how
    checkpoints are published; else all."""
    if weights == "bf16" or not facts.is_moe:
        return ALL
    users = [pool for pool in pools.values() if pool.weights == weights]
    asked = [pool.scope for pool in users if pool.scope is not None]
    if asked:
        return asked[0]
    is_real = any(pool.engine != "embedded" for pool in users)
    return EXPERTS if weights == "nvfp4" and is_real else ALL
