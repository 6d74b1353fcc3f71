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
    """Benchmark that checkpoints are judged on; None: none, for `rlmix eval` the bundled one."""
    path: str | None
    """Prepared set of a public benchmark; the bundled one has none."""
    subset: str
    """Its tasks; several parts joined by `+` are told apart."""
    k: int
    n: int
    """Samples of each task."""
