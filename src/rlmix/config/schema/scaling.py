"""When pools grow and shrink, and what a simulation assumes."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class SimulateConfig:
    """Assumptions of `rlmix scale pools --simulate`."""

    hours: float
    warm_up_frac: float
    """Share of the time that fills the fleet and is not counted."""
    context_tokens: int
    """Of a turn, on the mean over a session."""
    prompt_tokens: int
    """Of a session's first turn."""
    output_tokens: int
    """Sampled in a turn."""
    observation_tokens: int
    """Prefilled with the next turn."""
    tool_s: float
    """In the sandbox, between two turns."""
    turns_spread: float
    """Standard deviation of the logarithm of a session's turns."""
    trainer_gpus: int
    trainer_accelerator: str
    """A key of `accelerators`."""
    trainer_step_s: float | None
    """The trainer's own time for a step; None: modelled."""
    burst_factor: float
    """By how much the trainer is faster in the middle third of the time."""
    max_sessions: int
    """Under way at a time."""
    batch_frac: float
    """Share of a session's time within which ends are taken together; 0: none are."""
    max_running: int | None
    """Requests of one replica, memory permitting; None: the pool's own."""
    prices: str
    """`list` or `market`."""
    cold_start_s: float
    losses_per_day: float
    """Replicas lost without notice, for each replica."""
    against: str
    """Accelerator of the homogeneous fleets; a key of `accelerators`."""


@dataclass(kw_only=True, slots=True)
class ScalingConfig:
    """Rules of the policy (`scaling.policy`), and its limit of money. Floors and ceilings are the
    pools', quotas the inventory's."""

    auto: bool
    """The policy changes the pools of a run by itself."""
    budget_usd_per_hour: float | None
    """Of all replicas together; None: no limit."""
    headroom_frac: float
    surplus_frac: float
    out_delay_s: float
    in_delay_s: float
    in_cold_starts: float
    zero_delay_s: float
    swap_payback_s: float | None
    """An exchange of replicas pays for itself within this; None: none is made."""
    most_changes: int
    every_s: float
    """Between two decisions."""
    drain_s: float
    """After which the sessions of a closing replica are moved."""
    wait_high_frac: float
    kv_high_frac: float
    queued_high_frac: float
    reprefill_high_frac: float
    simulate: SimulateConfig
