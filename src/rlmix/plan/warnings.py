"""What a user should know before the run starts, though nothing is wrong enough to refuse it."""

from collections.abc import Iterator, Mapping

from rlmix.config.schema.pools import PoolConfig
from rlmix.config.schema.train import TrainConfig
from rlmix.core.addresses import is_loopback
from rlmix.plan.accelerators import CPU, architecture, multiplies
from rlmix.plan.capabilities import UNKNOWN, judge
from rlmix.plan.fit import fit_warnings
from rlmix.plan.matrix import ROWS
from rlmix.plan.model_facts import REFERENCE, ModelFacts, bundled_facts
from rlmix.plan.refusals import combination
from rlmix.plan.runplan import PoolPlan


def plan_warnings(
    config: TrainConfig, pools: Mapping[str, PoolPlan], facts: ModelFacts
) -> Iterator[str]:
    """One sentence each."""
    emulated = [name for name, pool in pools.items() if pool.is_emulated]
    if emulated:
        yield (
            f"{', '.join(emulated)}: emulated on this machine's CPU; formats are real, speed and "
            "cost are modelled"
        )
    for name, pool in pools.items():
        if pool.replicas == 0:
            yield f"{name}: 0 replicas, so it serves nothing until it is scaled up"
        if pool.is_emulated:
            yield from _emulated_warnings(name, pool, config)
        else:
            yield from _real_warnings(name, config.pools[name], config, facts)
    yield from _notes(config, facts)
    if config.numerics.consistency == "exact":
        yield from _exact_warnings(config)
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
    if not is_loopback(config.net.bind):
        yield f"net.bind={config.net.bind}: servers can be reached from other machines"
    if config.sandbox.allow_unisolated:
        yield "sandbox.allow_unisolated=true: where isolation fails, commands run with your rights"


def _exact_warnings(config: TrainConfig) -> Iterator[str]:
    """Choices with which a difference is left in exact mode."""
    real = [name for name, pool in config.pools.items() if pool.engine != "embedded"]
    if real:
        yield (
            f"{', '.join(real)}: real servers in exact mode do not depend on the batch, but add in "
            "another order than this trainer; their difference to it is small and not 0"
        )
    if config.weights.pause == "in_place":
        yield (
            "weights.pause=in_place: requests go on with keys of older weights, which the trainer "
            "does not have, so exact mode leaves a difference; weights.pause=retract has none"
        )


def _emulated_warnings(name: str, pool: PoolPlan, config: TrainConfig) -> Iterator[str]:
    chip = config.accelerators[pool.accelerator]
    if not multiplies(chip, pool.weights):
        yield (
            f"{name}: {pool.accelerator} has no {pool.weights} tensor cores; weights are stored in "
            f"{pool.weights} and multiplied in bf16"
        )
    # The reference model on the real chip, in the formats that attention and cache are given.
    seen = combination(config.pools[name], config, bundled_facts(REFERENCE))
    for row in judge(seen, ROWS).refusals:
        if "attention" in row.when and "kv" in row.when:
            yield (
                f"{name}: kv={pool.kv} with attention={pool.attention} works here only because it "
                f"is emulated; on {pool.accelerator} {row.reason} ({row.source})"
            )
    if pool.memory_gib * 2**30 > pool.tp * chip.memory_gb * 1e9:
        yield (
            f"{name}: weights and a full cache take {pool.memory_gib:.0f} GiB, more than "
            f"{pool.tp} x {chip.memory_gb:g} GB of {pool.accelerator}; lower max_running"
        )


def _real_warnings(
    name: str, pool: PoolConfig, config: TrainConfig, facts: ModelFacts
) -> Iterator[str]:
    chip = config.accelerators[pool.accelerator]
    longest = config.session.max_context_tokens
    if architecture(chip) == CPU:
        yield f"{name}: real SGLang on a CPU, which proves the protocol and says nothing of speed"
        return
    yield from fit_warnings(name, pool, chip, facts, longest)
    if judge(combination(pool, config, facts), ROWS).verdict == UNKNOWN:
        yield (
            f"{name}: nothing is known against {pool.weights}/{pool.kv} with {pool.attention} and "
            f"{pool.moe} on {pool.accelerator}, and nobody is known to have run it"
        )


def _notes(config: TrainConfig, facts: ModelFacts) -> Iterator[str]:
    """What the matrix says about working combinations, once for all pools that it is about."""
    pools_of: dict[tuple[str, str], list[str]] = {}
    for name, pool in config.pools.items():
        if pool.engine != "embedded":
            for row in judge(combination(pool, config, facts), ROWS).notes:
                pools_of.setdefault((row.reason, row.source), []).append(name)
    for (reason, source), names in pools_of.items():
        yield f"{', '.join(names)}: {reason} ({source})"
