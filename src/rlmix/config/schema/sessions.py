"""Tasks, the sandboxes they are worked on in, the limits of a session, and the benchmark."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class TasksConfig:
    source: str
    path: str | None
    """Prepared set of a public source; generated tasks have none."""
    limit: int | None
    """Training tasks to use; None takes all of the source."""
    seed: int


@dataclass(kw_only=True, slots=True)
class SandboxConfig:
    backend: str
    image: str | None
    """What a container engine starts."""
    servers: list[str]
    """URLs of sandbox servers, for `remote`."""
    command_timeout_s: float
    memory_mib: int
    pids: int
    cpus: float | None
    """Cores of one sandbox; None: all there are."""
    disk_mib: int
    output_chars: int
    """Characters of a command's output that the model sees."""
    allow_weak: bool | None
    """Take weak isolation where namespaces are forbidden; None: for the bundled tasks."""
    allow_unisolated: bool
    """Run commands without isolation where namespaces are forbidden."""


@dataclass(kw_only=True, slots=True)
class SessionConfig:
    max_turns: int
    max_turn_tokens: int
    max_context_tokens: int
    time_limit_s: float
    workers: int
    """Processes that run sessions."""
    concurrency: int
    """Sessions of one worker at a time."""


@dataclass(kw_only=True, slots=True)
class EvalConfig:
    data: str | None
    """What checkpoints are judged on; None: the bundled benchmark, in a run generated tasks."""
    path: str | None
    """Prepared set or release of a public benchmark; the bundled one has none."""
    subset: str
    """Its tasks; several parts joined by `+` are told apart."""
    limit: int | None
    """Tasks to take, from the front; None: all."""
    k: int
    n: int
    """Samples of each task."""
    checkpoint: str | None
    """Policy to judge, `RUN[:STEP]`; None: `model.path`, or the newest checkpoint."""
    replicas: int
    """Engines of the pool that serves it."""
    concurrency: int
    """Sessions at a time."""
    endpoint_model: str | None
    """Model that an endpoint is asked for; None: the first it lists."""
    every_steps: int
    """Optimizer steps between evaluations in a run; 0: none."""
