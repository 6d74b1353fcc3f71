"""What a user should know before the run starts, though nothing is wrong enough to refuse it."""

import ipaddress
from collections.abc import Iterator

from rlmix.config.schema.pools import AcceleratorConfig
from rlmix.config.schema.train import TrainConfig
from rlmix.plan.runplan import PoolPlan
from rlmix.plan.speed import is_weight_only


def plan_warnings(config: TrainConfig, pools: dict[str, PoolPlan]) -> Iterator[str]:
    """One sentence each."""
    emulated = [name for name, pool in pools.items() if pool.is_emulated]
    if emulated:
        yield (
            f"{', '.join(emulated)}: emulated on this machine's CPU; formats are real, speed and "
            "cost are modelled"
        )
    for name, pool in pools.items():
        yield from _pool_warnings(name, pool, config.accelerators[pool.accelerator])
    wanted = config.session.workers * config.session.concurrency
    room = sum(pool.concurrency for pool in pools.values())
    if wanted > room:
        yield (
            f"session.workers * session.concurrency = {wanted} sessions at a time, but the pools "
            f"work on {room} requests; the rest waits at the router"
        )
    formats = {(pool.weights, pool.kv) for pool in pools.values() if pool.replicas}
    if config.algo.importance == "none" and len(formats) > 1:
        yield (
            "algo.importance=none on pools of different formats: uncorrected policy gradients "
            "collapse on a mixed fleet"
        )
    if not ipaddress.ip_address(config.net.bind).is_loopback:
        yield f"net.bind={config.net.bind}: servers can be reached from other machines"
    if config.sandbox.allow_unisolated:
        yield "sandbox.allow_unisolated=true: where isolation fails, commands run with your rights"


def _pool_warnings(name: str, pool: PoolPlan, chip: AcceleratorConfig) -> Iterator[str]:
    if pool.replicas == 0:
        yield f"{name}: 0 replicas, so it serves nothing until it is scaled up"
    if is_weight_only(chip, pool.weights):
        yield (
            f"{name}: {pool.accelerator} has no {pool.weights} tensor cores; weights are stored in "
            f"{pool.weights} and multiplied in bf16"
        )
    if pool.kv == "fp8" and chip.compute_capability == "8.0":
        yield (
            f"{name}: an fp8 KV cache works here only because it is emulated; SGLang has none for "
            f"{pool.accelerator} (issue 38291), use kv=bf16 for what carries over"
        )
    if pool.memory_gib * 2**30 > pool.tp * chip.memory_gb * 1e9:
        yield (
            f"{name}: weights and a full cache take {pool.memory_gib:.0f} GiB, more than "
            f"{pool.tp} x {chip.memory_gb:g} GB of {pool.accelerator}; lower max_running"
        )
