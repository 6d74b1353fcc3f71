"""Where a run lives, what it runs on, and what it shows."""

from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class RunConfig:
    name: str | None
    """None: date, time and a short id."""
    dir: str
    """Folder of all runs."""
    seed: int


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    path: str
    """A Hugging Face model folder, `hf://OWNER/NAME`, or `bundled:NAME`."""
    revision: str | None
    """Commit of a model of the Hub; None for everything else."""


@dataclass(kw_only=True, slots=True)
class RouterConfig:
    policy: str
    speeds: str
    """`prior`: the plan's speeds; `observed`: fitted to what the replicas show."""
    view: str
    """`strict`: a session never changes its weight view; `prefer`: only when it must."""
    placement: str
    """Of a group's sessions over the pools: `free`, `pack` or `spread`."""
    break_affinity_s: float
    """A session leaves a living replica when it would be done this much sooner elsewhere."""
    staleness_s: float
    """Delay that a weight version behind the newest counts as."""
    ramp_s: float
    """Over this time a new replica's share of new sessions grows to its whole batch."""
    admit_batches: float
    """Batches of requests that a replica may have and still be given new sessions."""
    shards: int
    """Processes behind the router's address."""
    max_waiting: int
    """Requests that may wait for a place; one more is refused at once."""
    queue_timeout_s: float
    request_timeout_s: float
    idle_expiry_s: float


@dataclass(kw_only=True, slots=True)
class SglangConfig:
    """Where real servers are, or are started."""

    python: str | None
    """Interpreter that has SGLang; None: the one that `scripts/sglang-env` makes."""
    api_key_env: str
    """Environment variable with the API key of external servers; unset: they ask for none."""
    admin_key_env: str
    """The same for their admin key."""


@dataclass(kw_only=True, slots=True)
class NetConfig:
    bind: str
    """Address that every server listens on."""


@dataclass(kw_only=True, slots=True)
class LaunchConfig:
    """How processes are started, watched and replaced."""

    backend: str
    address: str | None
    """Of a Ray cluster that runs already; None: a Ray of the run's own."""
    place_timeout_s: float
    """Longest wait for a machine in a cluster that was joined."""
    max_parallel_boots: int
    """Replicas that start at the same time."""
    boot_timeout_s: float
    update_timeout_s: float
    """Longest wait for a replica to change weights."""
    stall_timeout_s: float
    """A replica that runs requests without a token for this long is replaced."""
    loads_every_s: float
    """Seconds between looks at each replica."""
    max_restarts: int
    """Of one replica within `restart_window_s`."""
    restart_window_s: float
    restart_delay_s: float
    """Before the first restart in the window; doubles with every further one."""
    resources: dict[str, str] = field(default_factory=dict)
    """Accelerator -> custom Ray resource by which its machines are found, in place of the label."""


@dataclass(kw_only=True, slots=True)
class ObserveConfig:
    live: bool
    tensorboard: bool
    wandb: bool
    mlflow: bool
