"""The RunPlan: every process of a run with its command, and what it will cost.

Plain data that survives JSON: `RunPlan.from_dict(plan.to_dict()) == plan`. The document's keys are
a contract (design, section 7); add keys, rename none.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rlmix.plan.memory import MemoryBudget
from rlmix.plan.speed import ModelledSpeed
from rlmix.plan.tasks import TasksPlan


def thread_limits(threads: int) -> dict[str, str]:
    """Environment of a process that shares the cores with many: libraries must not each take all
    of them. Two threads each make small matrices 100 times slower."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaPlan:
    """One engine server."""

    name: str
    """Of the slot, e.g. `h100-0`; a replacement gets the same."""
    pool: str
    argv: tuple[str, ...]
    """Command of the server. `{model_path}`, `{weight_version}` and `{ready_file}` are filled in
    at every start, since a replacement starts from the newest version."""
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """Replicas that all compute the same numbers."""

    accelerator: str
    engine: str
    is_emulated: bool
    """True: the accelerator is not there, the engine reproduces its formats."""
    weights: str
    scope: str
    """Which matrices its weight view quantises; `all` for BF16, where none is."""
    activations: str
    kv: str
    attention: str
    linear_attention: str
    state: str
    moe: str
    tp: int
    replicas: int
    gpus: int
    """Accelerators of the whole pool; emulated ones where `is_emulated`."""
    argv: tuple[str, ...]
    """Command of one replica, with `{replica}` for its name beside the fields of `ReplicaPlan`."""
    env: dict[str, str]
    usd_per_hour: float
    """Of the whole pool, at the planned replicas."""
    usd_per_replica_hour: float
    memory_gib: float
    """What weights and caches take on one replica's accelerators: the whole share for SGLang, a
    full cache of `max_running` requests for the embedded engine."""
    budget: MemoryBudget | None
    """How that divides; None for emulated pools, which hold a small model on a CPU."""
    nodes: tuple[str, ...]
    """Machine of each replica; empty without an inventory, when Ray finds them by label."""
    gpu_ids: tuple[tuple[int, ...], ...]
    """Accelerators of each replica, as its machine counts them; without an inventory one machine
    is meant. Empty where nothing stands on accelerators."""
    urls: tuple[str, ...]
    """Servers that run already, one for each replica; empty where rlmix starts them."""
    ray_label: str
    price_source: str
    tokens_per_s: float | None
    """Of the whole pool, modelled with the run's own model; None for emulated pools."""
    concurrency: int
    """Requests that the whole pool works on at a time."""
    max_running: int
    """The same for one replica."""
    speed: float
    """What the router takes for the speed of one replica before it has seen any, relative to the
    other pools."""
    canary_tolerance_nats: float
    modelled: ModelledSpeed | None
    """What one replica should do: with the run's model, or with the reference model where the
    pool is emulated; None when that does not fit."""
    by_context: tuple[ModelledSpeed, ...]
    """The same at several lengths of context; empty for emulated pools."""
    evidence: tuple[str, ...]
    """Where this combination is known to work, from the capability matrix."""

    def replica(self, pool: str, index: int) -> ReplicaPlan:
        """The plan of replica `index` (from 0) of this pool, which is called `pool`. One beyond the
        planned ones has no device ids; whoever starts it finds its place."""
        name = f"{pool}-{index}"
        argv = tuple(name if part == "{replica}" else part for part in self.argv)
        env = dict(self.env)
        if index < len(self.gpu_ids):
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpu_ids[index]))
        return ReplicaPlan(name=name, pool=pool, argv=argv, env=env)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerPlan:
    """The trainer ranks."""

    ranks: int
    device: str
    compute: str
    optimizer: str
    lr: float
    micro_batch_tokens: int
    threads: int
    views: tuple[str, ...]
    """Weight views that it publishes, one for each format that a pool has, as
    `numerics.view_spec` reads them."""
    gpus: int
    memory_gib: float
    """Weights in BF16, master weights, gradients and optimizer state of all ranks together,
    without activations."""
    rank_gib: float
    """One rank at its peak, with the activations of a micro-batch."""
    rank_parts_gib: dict[str, float]
    """The same by part, as `plan.trainer_memory` tells them apart."""
    most_tokens: int | None
    """Longest micro-batch that a rank can hold, 0 for none; None on a CPU."""
    tokens_per_s: float | None
    """Of all ranks, through forward and backward at 40 % of the peak; None on a CPU."""
    nodes: tuple[str, ...]
    """Machine of each rank; empty without an inventory."""
    usd_per_hour: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterPlan:
    argv: tuple[str, ...]
    """Command of the router, with `{ready_file}`."""
    env: dict[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerPlan:
    """The task workers."""

    workers: int
    concurrency: int
    """Sessions of one worker at a time."""
    sandbox: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPlan:
    """The benchmark that checkpoints are judged on. Its servers are not in the run's price."""

    data: str
    subset: str
    k: int
    """Of pass@k."""
    n: int
    """Samples of each task."""
    weights: str
    """Format in which checkpoints are served for it."""
    every_steps: int
    """Optimizer steps between evaluations in the run; 0: only by `rlmix eval`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """This plan beside that of another experiment. Modelled."""

    experiment: str
    usd_per_hour: float
    """Of the other plan."""
    pools_usd_per_hour: dict[str, float]
    """Pool of the other plan -> its price."""
    tokens_per_s: float | None
    usd_per_mtok: float | None
    """Of its pools, the trainer left out."""
    saved_frac: float
    """Share of the other plan's price that this one saves; negative when it costs more."""
    pool_cost_frac: dict[str, float]
    """Pool of this plan -> price of its tokens over that of the other plan's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    pools: dict[str, PoolPlan]
    trainer: TrainerPlan
    router: RouterPlan
    workers: WorkerPlan
    evaluation: EvaluationPlan | None
    """None: no benchmark."""
    usd_per_hour: float
    """All pools and the trainer. Modelled wherever accelerators are emulated."""
    tokens_per_s: float | None
    """Of all pools together, modelled; None when any is emulated."""
    usd_per_mtok: float | None
    """Price of a million sampled tokens, pools only."""
    unused: dict[str, int]
    """Machine of the inventory -> accelerators that nothing stands on."""
    against: Comparison | None
    warnings: tuple[str, ...]
    tasks: TasksPlan | None = None
    """What a prepared set needs and lacks; None for generated tasks."""

    @property
    def is_modelled(self) -> bool:
        """True when the cost contains accelerators that are not there."""
        return any(pool.is_emulated for pool in self.pools.values())

    def replicas(self) -> tuple[ReplicaPlan, ...]:
        """Every replica to start, pool by pool."""
        return tuple(
            pool.replica(name, index)
            for name, pool in self.pools.items()
            for index in range(pool.replicas)
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values; tuples become lists in JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> "RunPlan":
        """The plan that `to_dict` (or its JSON) came from."""
        against, evaluation = document["against"], document["evaluation"]
        return RunPlan(
            pools={name: _pool(values) for name, values in document["pools"].items()},
            trainer=_read(TrainerPlan, document["trainer"]),
            router=_read(RouterPlan, document["router"]),
            workers=_read(WorkerPlan, document["workers"]),
            evaluation=EvaluationPlan(**evaluation) if evaluation else None,
            usd_per_hour=document["usd_per_hour"],
            tokens_per_s=document["tokens_per_s"],
            usd_per_mtok=document["usd_per_mtok"],
            unused=dict(document["unused"]),
            against=Comparison(**against) if against else None,
            warnings=tuple(document["warnings"]),
            tasks=_read(TasksPlan, document["tasks"]) if document["tasks"] else None,
        )


def _pool(values: Mapping[str, Any]) -> PoolPlan:
    modelled, budget = values["modelled"], values["budget"]
    nested = {
        "modelled": ModelledSpeed(**modelled) if modelled else None,
        "gpu_ids": [tuple(ids) for ids in values["gpu_ids"]],
        "by_context": [ModelledSpeed(**speed) for speed in values["by_context"]],
        "budget": MemoryBudget(**budget) if budget else None,
    }
    plan: PoolPlan = _read(PoolPlan, {**values, **nested})
    return plan


def _read(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass from JSON values: lists become tuples."""
    return kind(
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
    )
