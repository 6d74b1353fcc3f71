"""Pools of samplers, and the accelerators they stand on."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, slots=True)
class AcceleratorConfig:
    """Facts about one kind of accelerator. Dense figures, no sparsity."""

    memory_gb: float
    """Memory that a process can use, 1e9 bytes."""
    bandwidth_tb_s: float
    """Memory bandwidth, 1e12 bytes a second."""
    bf16_tflops: float
    fp8_tflops: float | None
    """None: the tensor cores do not compute in this format."""
    nvfp4_tflops: float | None
    compute_capability: str
    ray_label: str
    """Value of Ray's node label `ray.io/accelerator-type`."""
    usd_per_hour: float
    """Price of one accelerator."""


@dataclass(kw_only=True, slots=True)
class PoolConfig:
    """Replicas that all compute the same numbers."""

    accelerator: str
    """A key of `accelerators`."""
    engine: str
    replicas: int
    weights: str
    """Format of the weights, which is also the weight view that the pool reads."""
    activations: str
    kv: str
    attention: str
    """Attention kernel of the engine."""
    moe: str
    """MoE kernel of the engine."""
    tp: int
    """Accelerators of one replica."""
    max_running: int
    """Requests that one replica works on at a time."""
    canary_tolerance_nats: float
    """Largest mean absolute difference between a new replica's logprobs and the trainer's that
    the pool's formats explain; above it the replica is not admitted."""
    usd_per_hour: float | None
    """Price of one accelerator of this pool; None takes that of `accelerators`."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the engine, without dashes."""
