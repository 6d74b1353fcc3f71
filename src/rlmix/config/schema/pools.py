"""Pools of samplers, the accelerators they stand on, and the machines that have them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class AcceleratorConfig:
    """Facts about one kind of accelerator. Dense figures, no sparsity."""

    memory_gb: float
    """Memory that the driver reports, 1e9 bytes."""
    bandwidth_tb_s: float
    """Memory bandwidth, 1e12 bytes a second."""
    bf16_tflops: float
    fp8_tflops: float | None
    """None: the tensor cores do not compute in this format."""
    nvfp4_tflops: float | None
    compute_capability: str | None
    """None: not a CUDA device."""
    link: str
    """How accelerators of one machine are connected."""
    ray_label: str
    """Value of Ray's node label `ray.io/accelerator-type`."""
    usd_per_hour: float | None
    """Price of one accelerator; None where no public price is known."""
    price_source: str
    """Where the price is from, and of when."""
    market_usd_per_hour: float | None = None
    """Lowest price seen of one accelerator; None: nobody looked."""
    market_source: str | None = None


@dataclass(kw_only=True, slots=True)
class PoolConfig:
    """Replicas that all compute the same numbers."""

    accelerator: str
    """A key of `accelerators`."""
    engine: str
    replicas: int
    min_replicas: int
    """Scaling leaves as many, or `replicas` where that is less; 0: the pool may go altogether."""
    max_replicas: int | None
    """Scaling makes no more; None: the machines and the budget decide."""
    weights: str
    """Format of the weights, which is also the weight view that the pool reads."""
    scope: str | None
    """Which matrices of the weight view are quantised; None: what the plan says (`plan.views`)."""
    activations: str
    """Format in which products are taken."""
    kv: str
    attention: str
    """Attention kernel of the engine."""
    linear_attention: str
    """Kernel of recurrent layers."""
    state: str
    """Format of the recurrent state."""
    moe: str
    """MoE kernel of the engine."""
    tp: int
    """Accelerators of one replica."""
    ep: int
    """Of these, how many share the experts; each holds whole ones."""
    max_running: int
    """Requests that one replica works on at a time."""
    memory_frac: float
    """Share of an accelerator's memory for weights and caches."""
    canary_tolerance_nats: float
    """Largest mean absolute difference between a new replica's logprobs and the trainer's that
    the pool's formats explain; above it the replica is not admitted."""
    record_experts: bool | None
    """Record which experts each token took; None: when `algo.routing_replay` wants them."""
    usd_per_hour: float | None
    """Price of one accelerator of this pool; None takes that of `accelerators`."""
    urls: list[str] = field(default_factory=list)
    """Servers that run already, one for each replica of an external pool."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, without dashes."""


def records_experts(pool: PoolConfig, *, routing_replay: bool) -> bool:
    """Does the pool's engine record the experts of its tokens?"""
    return routing_replay if pool.record_experts is None else pool.record_experts


@dataclass(kw_only=True, slots=True)
class NodeConfig:
    """Machines of one kind."""

    accelerator: str
    """A key of `accelerators`."""
    gpus: int
    """Accelerators of one machine."""
    count: int
    usd_per_hour: float | None
    """Price of one accelerator on these machines; None takes that of `accelerators`."""


@dataclass(kw_only=True, slots=True)
class InventoryConfig:
    nodes: dict[str, NodeConfig] = field(default_factory=dict)
    """Empty: as many machines as the pools ask for."""


@dataclass(kw_only=True, slots=True)
class PlanConfig:
    against: str | None
    """Experiment whose plan this one is compared with."""
