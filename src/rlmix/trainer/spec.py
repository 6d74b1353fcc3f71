"""What a trainer rank is told, and what it answers. Imports nothing heavy: the driver uses it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class AlgoSpec:
    """The policy loss; meanings and sources in docs/algorithms.md."""

    importance: str
    """`none`, `tis`, `mis`, `cispo`, `ppo`, `gspo` or `seq_tis`."""
    low: float
    high: float
    """Inclusive bounds on the ratio trainer / sampler."""
    centering: bool
    sequence_mask: str
    """`none`, `product`, `geometric`, `k3` or `opsm`: which whole sequences add nothing."""
    sequence_low: float
    sequence_high: float
    """Inclusive bounds of `sequence_mask`, in its own unit."""
    veto: float
    """Token ratio below which the whole sequence adds nothing; 0 switches it off."""
    average: str
    """`tokens` or `sequences`: what the loss is the mean over."""
    replay: bool
    """Renormalise trainer logprobs on the recorded kept sets."""
    routing_replay: bool
    """Take the experts that the sampler recorded (R3)."""
    temperature: float
    """The one the sessions were sampled at; logits are divided by it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSpec:
    """How gradients become weights."""

    name: str
    """`adamw` or `sgd` (no momentum)."""
    lr: float
    beta1: float
    beta2: float
    """Used by adamw only."""
    weight_decay: float
    """Decoupled, per step times lr; on matrices only, never on norms and biases."""
    grad_clip: float
    """Largest global gradient norm; 0 switches clipping off."""
    warmup_steps: int
    """Linear from lr / warmup_steps to lr; 0 starts at lr."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSpec:
    """One trainer rank."""

    algo: AlgoSpec
    optimizer: OptimizerSpec
    micro_batch_tokens: int
    """Padded tokens of one forward and backward pass."""
    threads: int
    """Torch threads of this process."""
    seed: int
    checkpoints_dir: str
    keep_checkpoints: int
    """Newest complete checkpoints to keep, at least 1."""
    weights_store: str
    views: tuple[str, ...]
    """Weight views to publish, one per distinct pool format."""
    pool_views: Mapping[str, str] = field(default_factory=dict)
    """Pool -> the weight view that it reads, for the split of the metrics."""
    attention: str | None = None
    """Transformers' attention implementation; None: by the model's context, see
    `policy.default_attention`."""
    experts: str | None = None
    """Transformers' experts implementation; None: `policy.EXPERTS`."""
    numerics: str = "native"
    """`native`: Transformers' forward. `exact`: the consistent operators, which the pools use too;
    `exact_fp32`: the same without rounding activations to BF16."""
    rank: int = 0
    ranks: int = 1
    """Processes that train one model together; above 1 each must `join` before it loads."""
    remote_store: str = ""
    """URL to which published versions go as well; empty: nowhere."""
    full_every: int = 1
    """Versions from one full snapshot there to the next."""
    keep_versions: int = 1
    """Newest that stay there; the loop prunes the folder."""
    device: str = "cpu"
    """Anything else is an accelerator, one for each rank."""
    packing: str = "rows"
    """`rows` or `documents`, see `batch.packing.LAYOUTS`."""
    recomputes: bool = False
    """Activation checkpointing: layers are computed again in the backward pass."""
    offloads: bool = False
    """Master weights, gradients and moments stay in main memory (accelerators only)."""
    host: str = "127.0.0.1"
    """Address of this rank's machine that the others reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveReport:
    """One finished checkpoint."""

    path: str
    step: int
    num_bytes: int
    """Of all its files."""
    blocked_s: float
    """Waiting for the save before it, and copying into main memory: the trainer stood still."""
    write_s: float
    """In the background."""

    def metrics(self) -> dict[str, float]:
        return {
            "time/checkpoint_s": self.blocked_s,
            "time/checkpoint_write_s": self.write_s,
            "trainer/checkpoint_bytes": float(self.num_bytes),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one call of `train_step` did."""

    step: int
    applied: bool
    """False: the weights are as they were; `skip_reason` says why."""
    skip_reason: str
    """Empty when applied; `no signal: ...` is normal, `non-finite: ...` is a fault."""
    metrics: dict[str, float]
    pools: tuple[str, ...]
    """Pools that sampled tokens of this step; keys `.../by_pool/<pool>/...` exist for each."""

    @property
    def is_fault(self) -> bool:
        return self.skip_reason.startswith("non-finite")
