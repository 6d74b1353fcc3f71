"""Which replica stands on which machine. Pure.

A replica's accelerators are in one machine. Replicas take machines of their kind in the order of
the inventory, the trainer first, since it needs whole machines most. Without an inventory no
machine is named: Ray finds them by label, and accelerators are counted as if all were in this one.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rlmix.config.schema.pools import PoolConfig
from rlmix.config.schema.train import TrainConfig
from rlmix.plan.accelerators import CPU, architecture


@dataclass(slots=True)
class _Machine:
    name: str
    accelerator: str
    gpus: int
    free: int


@dataclass(kw_only=True, slots=True)
class Placement:
    trainer: tuple[str, ...] = ()
    """Machine of each rank; empty without an inventory."""
    pools: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Pool -> machine of each replica."""
    gpu_ids: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    """Pool -> accelerators of each replica, as its machine counts them."""
    usd_per_hour: dict[str, float] = field(default_factory=dict)
    """Machine -> price of one of its accelerators, where the inventory has one."""
    unused: dict[str, int] = field(default_factory=dict)
    """Machine -> accelerators that nothing stands on."""
    problems: list[str] = field(default_factory=list)
    """What does not fit, one line each."""


def place(config: TrainConfig) -> Placement:
    """Put trainer and pools on the inventory's machines."""
    machines = list(_machines(config))
    placement = Placement()
    if not machines:
        placement.gpu_ids = _on_one_machine(config)
        return placement
    for name, node in config.inventory.nodes.items():
        if node.usd_per_hour is not None:
            prices = {f"{name}-{index}": node.usd_per_hour for index in range(node.count)}
            placement.usd_per_hour |= prices
    trainer = config.trainer
    if trainer.device != "cpu":
        found = _take(machines, trainer.device, size=1, count=trainer.ranks)
        placement.trainer = tuple(name for name, _ in found)
        if len(found) < trainer.ranks:
            placement.problems.append(
                f"trainer.ranks: wants {trainer.ranks} {trainer.device}, the inventory has "
                f"{len(found)}; lower trainer.ranks or add machines to inventory.nodes"
            )
    for name, pool in config.pools.items():
        if not _takes_accelerators(pool, config):
            continue
        found = _take(machines, pool.accelerator, size=pool.tp, count=pool.replicas)
        placement.pools[name] = tuple(machine for machine, _ in found)
        placement.gpu_ids[name] = tuple(ids for _, ids in found)
        if len(found) < pool.replicas:
            each = f" of {pool.tp}" if pool.tp > 1 else ""
            placement.problems.append(
                f"pools.{name}.replicas: wants {pool.replicas} replicas{each} {pool.accelerator}, "
                f"the inventory has room for {len(found)}; set pools.{name}.replicas={len(found)} "
                "or add machines to inventory.nodes"
            )
    placement.unused = {machine.name: machine.free for machine in machines if machine.free}
    return placement


def _machines(config: TrainConfig) -> Iterator[_Machine]:
    for name, node in config.inventory.nodes.items():
        for index in range(node.count):
            yield _Machine(f"{name}-{index}", node.accelerator, node.gpus, node.gpus)


def _takes_accelerators(pool: PoolConfig, config: TrainConfig) -> bool:
    return pool.engine == "sglang" and architecture(config.accelerators[pool.accelerator]) != CPU


def _on_one_machine(config: TrainConfig) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Accelerators counted through: the trainer's ranks first, then replica after replica."""
    trainer = config.trainer
    used = trainer.ranks if trainer.device != "cpu" else 0
    found: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name, pool in config.pools.items():
        if _takes_accelerators(pool, config):
            starts = [used + index * pool.tp for index in range(pool.replicas)]
            found[name] = tuple(tuple(range(start, start + pool.tp)) for start in starts)
            used += pool.replicas * pool.tp
    return found


def _take(
    machines: list[_Machine], accelerator: str, *, size: int, count: int
) -> list[tuple[str, tuple[int, ...]]]:
    """Machine and accelerators of each of up to `count`."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for machine in machines:
        while machine.accelerator == accelerator and machine.free >= size and len(found) < count:
            first = machine.gpus - machine.free
            machine.free -= size
            found.append((machine.name, tuple(range(first, first + size))))
    return found


def mean_price(
    nodes: tuple[str, ...], prices: dict[str, float], otherwise: float | None
) -> float | None:
    """Price of one accelerator, over the machines that something stands on.

    Args:
        prices: machine -> price, of those that have one of their own.
        otherwise: price on all others; None where none is known.
    """
    paid = [prices.get(node, otherwise) for node in nodes] or [otherwise]
    known = [price for price in paid if price is not None]
    return sum(known) / len(known) if len(known) == len(paid) else None
