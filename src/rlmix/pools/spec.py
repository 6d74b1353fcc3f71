"""What a fleet is made of and what it says about itself. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from rlmix.core.errors import EngineError
from rlmix.core.machine import Machine
from rlmix.launch.handle import Needs


class PlanMismatch(EngineError):
    """A started engine is not what the plan says; starting it again gives the same."""


class AdmissionRefused(EngineError):
    """A replica answered its canary prompts in a way that must not reach the trainer."""


class SlotState(StrEnum):
    """Where a replica stands. A slot keeps its name over all the replicas that fill it."""

    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"
    DEAD = "dead"
    RESTARTING = "restarting"
    """Dead or quarantined before; waiting to be started again."""
    QUARANTINED = "quarantined"
    """Alive and not trusted: it failed an update or the admission gate, or its pool was put in
    quarantine (then it is also held, and not started again by itself). It is killed."""
    RETIRED = "retired"
    """Given up: the restart budget is spent, or restarting cannot help."""
    STOPPED = "stopped"

    @property
    def is_final(self) -> bool:
        return self in (SlotState.RETIRED, SlotState.STOPPED)


class BringUp(StrEnum):
    """How far the replica in a slot has come on its way into routing."""

    BOOTING = "booting"
    CATCHING_UP = "catching_up"
    VERIFYING = "verifying"
    ROTATING_IN = "rotating_in"
    """Verified; the router is being told, or was."""


class Leaving(StrEnum):
    """Whether a slot is on its way out."""

    NO = "no"
    DRAINING = "draining"
    """It keeps its sessions and gets no new one."""
    EMPTIED = "emptied"
    """Its sessions go on elsewhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PushSpec:
    """How weights reach an engine through a process group instead of a folder."""

    host: str
    """Address at which the engine reaches its replica's process."""
    backend: str
    """`gloo` or `nccl`."""
    num_ranks: int
    """Tensor-parallel ranks of the engine."""
    bucket_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagingSpec:
    """Where a replica's machine fetches versions from, and where it keeps them."""

    url: str
    """Of the run's versions, in any store that fsspec knows."""
    folder: Path
    """Shared by all replicas of a run on one machine."""
    limit_s: float
    """Longest wait for another process of the machine that fetches the same view."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSpec:
    """One replica, ready to be started on its node."""

    name: str
    """Of the slot, e.g. `b300-0`; stays when the replica is replaced."""
    pool: str
    view: str
    """Weight view that the pool reads: `bf16`, `fp8` or `nvfp4`."""
    argv: tuple[str, ...]
    """Command of the engine. `{model_path}`, `{weight_version}` and `{ready_file}` are filled in
    at every start; a replacement starts right from the newest version."""
    env: Mapping[str, str] = field(default_factory=dict)
    log_path: Path
    ready_path: Path
    expected: Mapping[str, str]
    """Fields of `/server_info` that must read as planned, e.g. accelerator, weights, kv."""
    speed: float
    """Relative speed that the plan expects; the router's prior."""
    max_running: int
    boot_timeout_s: float
    update_timeout_s: float
    """Longest wait for an update, the verification of its files included."""
    canary_tolerance_nats: float
    """Largest mean absolute difference between the canary's sampler logprobs and the trainer's
    that the pool's number format explains."""
    engine: str = "embedded"
    """`embedded`, `sglang`, or `sglang_external`: a server that runs already, at `url`."""
    url: str | None = None
    """Of an external server; it is joined and left, never started or stopped."""
    token_env: str | None = None
    """Environment variable that holds the run's bearer token; None: the engine asks for none."""
    admin_token_env: str | None = None
    """The same for what changes the engine: weights, pauses. None: the token does."""
    needs: Needs | None = None
    """What its machine must have; None: any will do."""
    push: PushSpec | None = None
    """None: the engine reads new versions from their folder."""
    staging: StagingSpec | None = None
    """None: the replica's machine sees the trainer's folder of versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetSpec:
    """All replicas and the rules for keeping them."""

    replicas: tuple[ReplicaSpec, ...]
    store: Path
    """Root of the published versions, `<store>/<view>/v%06d`."""
    pause_mode: str
    """`retract`, `in_place` or `abort`: what running requests do during an update."""
    max_parallel_boots: int
    max_parallel_pulls: int = 4
    """Replicas that fetch a version from a remote store at a time."""
    max_restarts: int
    """Of one slot within `restart_window_s`; one more and the slot is retired."""
    restart_window_s: float
    restart_delay_s: float
    """Before the first restart in the window; doubles with every further one."""
    loads_every_s: float
    """How often each replica is asked for its load."""
    stall_timeout_s: float
    """A replica that answers nothing, or runs requests without a token, for this long is dead."""
    canary_prompts: tuple[tuple[int, ...], ...] = ()
    canary_tokens: int = 8
    """Greedy tokens per canary prompt."""
    checks_identity: bool = True
    """Load the same weights again before a replica serves, and compare its answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaInfo:
    """What a replica says after its start."""

    url: str
    pid: int
    """Of the engine process."""
    numerics_key: str
    version: int
    unverified: tuple[str, ...] = ()
    """Planned settings of which the engine says nothing, e.g. the chip of a server on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaLoad:
    """What a replica does now."""

    running: int
    queued: int
    tokens_per_s: float
    kv_used_frac: float
    """Of the KV cache's tokens, 0 to 1."""
    progress_tokens: int
    """Tokens computed since the start, sampled and prefilled; advances while work is done."""
    version: int
    is_paused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReport:
    """One activation of a version."""

    version: int
    pull_s: float
    """Fetching, reading and verifying the files; the replica served meanwhile."""
    pause_s: float
    """From pause to continue: no token was sampled."""
    pull_bytes: int = 0
    """Read from a remote store by this replica; 0 when another one of its machine did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightProof:
    """What an engine holds, as read back from it."""

    version: int
    content: str
    """Digest of the version's files."""
    checksum: str
    """The engine's own, of the weights that it serves; "" when it cannot tell."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CanaryOutput:
    """One canary prompt answered greedily."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    """Full-vocabulary logprobs at temperature 1, one per output id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaStatus:
    """One slot, now, for the live view and `scale pools`."""

    name: str
    pool: str
    state: SlotState
    reason: str
    """Why it is in this state."""
    incarnation: int
    """Counts the replicas that have filled the slot, from 1."""
    version: int | None
    """Weight version that it serves; None before its start."""
    url: str | None
    pid: int | None
    running: int
    queued: int
    tokens_per_s: float
    kv_used_frac: float
    restarts: int
    since_s: float
    """Seconds in this state."""
    is_held: bool
    """Its pool is in quarantine: nothing fills the slot until the pool is released."""
    is_leaving: bool
    """It gets no new session, and is not filled again."""
    is_routed: bool
    """The router was told of it."""
    has_served: bool
    """Some replica of the slot was verified."""
    bring_up: BringUp
    boot_s: float | None
    """From the last start to the first session; None before it."""
    machine: Machine | None
    """Where its process is; None: nowhere yet, or on the run's one machine."""
    waits_for_machine: bool
    """It was ordered and has no machine yet."""

    def is_on(self, machine: Machine) -> bool:
        return self.machine is not None and self.machine.id == machine.id
