"""What the live view shows. The loop builds one of these; the view only reads it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolState:
    """One pool, now. None means not measured yet."""

    name: str
    accelerator: str
    is_emulated: bool
    weights: str
    """Weight format, e.g. `nvfp4`."""
    kv: str
    """KV cache format, e.g. `fp8`."""
    replicas_ready: int
    replicas_total: int
    running: int = 0
    """Requests being decoded."""
    queued: int = 0
    """Requests waiting in the pool's engines."""
    tokens_per_s: float | None = None
    version: int | None = None
    """Lowest weight version among its ready replicas."""
    k3_kl: float | None = None
    """Mismatch to the trainer in the last step, nats per token."""
    usd_per_hour: float | None = None
    """All replicas of the pool together; modelled where the accelerator is emulated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLine:
    """One event, as `events.jsonl` has it."""

    run_s: float
    kind: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    run: str
    phase: str
    """What the run is doing, for a reader: `booting pools`, `training`, `closing evaluation`."""
    step: int
    """Optimizer steps done."""
    num_steps: int
    elapsed_s: float
    eta_s: float | None = None
    """Seconds to the end of the run; None while unknown."""
    policy_version: int | None = None
    pools: tuple[PoolState, ...] = ()
    done: int = 0
    """Sessions finished towards the next step (or tasks of the evaluation)."""
    needed: int = 0
    unit: str = "sessions"
    """What `done` and `needed` count."""
    rewards: tuple[float, ...] = ()
    """Mean reward of each step so far."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Last row of `metrics.jsonl`."""
    cost_usd: float | None = None
    """So far, over all attempts."""
    alarms: Mapping[str, str] = field(default_factory=dict)
    """Alarms that stand, and pools in quarantine: a name that stays, and a sentence."""
    operation: str = ""
    """The scale operation under way, in one line; empty: none."""
    events: tuple[EventLine, ...] = ()
    """Newest last."""


def state_to_dict(state: LiveState) -> dict[str, Any]:
    """JSON values; numbers that JSON does not have become None."""
    document = asdict(state)
    document["metrics"] = {
        key: float(value) if math.isfinite(value) else None for key, value in state.metrics.items()
    }
    return document


def state_from_dict(document: Mapping[str, Any]) -> LiveState:
    """The state that `state_to_dict` (or its JSON) came from; metrics without a number are left
    out."""
    fields = dict(document)
    fields["pools"] = tuple(PoolState(**pool) for pool in document["pools"])
    fields["events"] = tuple(EventLine(**event) for event in document["events"])
    fields["rewards"] = tuple(document["rewards"])
    fields["metrics"] = {k: v for k, v in document["metrics"].items() if v is not None}
    return LiveState(**fields)
