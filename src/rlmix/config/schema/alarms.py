"""What a run is watched for, and what happens then. The rules are those of `algos.alarms`."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class AlarmsConfig:
    """For each rule NAME: `NAME_limit` in the rule's unit and `NAME_action`."""

    patience: int
    """Steps in a row beyond a limit until an alarm stands."""
    min_tokens: int
    """Of a step, or of a pool in it, to be judged."""
    head_min_tokens: int
    """The same for the tail ratio of recorded heads."""
    window: int
    """Steps of its own past that a rule remembers."""
    tail_ratio_limit: float
    tail_ratio_action: str
    ess_limit: float
    ess_action: str
    masked_limit: float
    masked_action: str
    k3_limit: float
    k3_action: str
    entropy_limit: float
    entropy_action: str
    non_finite_limit: float
    non_finite_action: str
    pool_drift_limit: float
    pool_drift_action: str
    pool_drift_min_nats: float
    pool_drift_format_gap: float
    """Times the other pools' difference that a number format may explain."""
    pool_masked_limit: float
    pool_masked_action: str
    pool_k3_limit: float
    pool_k3_action: str
    pool_tolerance_limit: float
    """Times `pools.NAME.canary_tolerance_nats`."""
    pool_tolerance_action: str
    release_after_steps: int
    """Steps after which a quarantined pool is started again; 0: never."""
    last_pool: str
    """What happens when the pool to quarantine is the last one that serves."""
