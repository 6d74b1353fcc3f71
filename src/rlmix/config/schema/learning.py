"""How the policy learns: the loop, the correction, the trainer, the weights."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class LoopConfig:
    steps: int
    """Optimizer steps of the run."""
    sessions_per_step: int
    group_size: int
    """Sessions of one task whose mean reward is the baseline."""
    max_staleness: int
    """Versions that a group's oldest token may lie behind the trainer."""
    eval_tasks: int
    """Held-out tasks of an evaluation; 0 evaluates nothing."""
    checkpoint_every: int
    """Steps between checkpoints; the last step always writes one."""
    min_step_s: float
    """The trainer's part of a step takes at least so long; stands in for a trainer of real size."""


@dataclass(kw_only=True, slots=True)
class AlgoConfig:
    importance: str
    low: float
    high: float
    """Bounds on the ratio of trainer to sampler probability."""
    centering: bool
    sequence_mask: str
    """Which whole sessions add nothing to the loss."""
    sequence_low: float
    sequence_high: float
    """Bounds of `sequence_mask`, in its own unit."""
    veto: float
    """Token ratio below which the whole session adds nothing; 0: off."""
    average: str
    """What the loss is the mean over."""
    baseline: str
    """What is subtracted from a reward."""
    scale: str
    """What an advantage is divided by."""
    top_p: float
    top_k: int
    """-1 keeps every token."""
    replay: bool
    """Renormalise the trainer's logprobs on the sampler's kept sets."""
    routing_replay: bool
    """Give the trainer's experts to tokens as the sampler did."""
    temperature: float
    head_k: int
    """Candidates to record when sampling cuts nothing off."""
    alarm_head_k: int
    """Candidates of the whole vocabulary to record beside kept sets; 0: none."""
    alarm_head_frac: float
    """Share of turns that record them."""


@dataclass(kw_only=True, slots=True)
class TrainerConfig:
    ranks: int
    device: str
    """`cpu`, or a key of `accelerators`: one for each rank."""
    lr: float
    optimizer: str
    beta1: float
    beta2: float
    weight_decay: float
    grad_clip: float
    warmup_steps: int
    micro_batch_tokens: int
    packing: str
    """How samples share a micro-batch."""
    recompute: bool
    """Layers keep their inputs only and are computed again for their gradients."""
    offload: bool
    """Master weights, gradients and moments stay in main memory."""
    threads: int
    keep_checkpoints: int


@dataclass(kw_only=True, slots=True)
class WeightsConfig:
    publish_every: int
    """Optimizer steps between published versions."""
    keep: int
    """Newest versions of each view that stay on disk."""
    pause: str
    """What a replica does with running requests while it changes weights."""
    transport: str
    """How a version travels from its folder into an engine."""
    store: str | None
    """URL of a store through which machines get versions; null: all see the run's folder."""
    full_every: int
    """Versions from one full snapshot in the store to the next; deltas between them."""
    staging: str | None
    """Folder of each machine for its copies; null: in the run's folder."""
    max_parallel_pulls: int
    bucket_mib: int
    identity_check: bool


@dataclass(kw_only=True, slots=True)
class NumericsConfig:
    consistency: str
    """`exact`: trainer and pools use operators with one order of additions."""
