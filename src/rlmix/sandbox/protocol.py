"""What the rest of rlmix sees of a sandbox, whatever makes it.

Invariant: a fault that the agent may have caused is a value (a `CommandResult`, a
`WorkTreeError`); only faults it cannot have caused are a `SandboxError`, and only those make a
session void.
"""

from dataclasses import dataclass
from types import CodeType
from typing import Protocol

from rlmix.core.errors import RlmixError
from rlmix.core.task import Repository

EXIT_TIMED_OUT = 124
"""As the `timeout` command reports it."""
EXIT_KILLED = 137
EXIT_NOT_RUN = 126
"""The command was refused before a shell saw it."""


class WorkTreeError(RlmixError):
    """The agent left a tree that cannot be recorded as a diff; its fault, so reward 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Bounds of one sandbox."""

    memory_mib: int
    """Of all processes together where a control group counts it, else address space of each."""
    pids: int
    """Processes and threads at once."""
    disk_mib: int
    """Size of the repository's file system, and of /tmp beside it."""
    output_chars: int
    """Characters of a command's output that are kept, half from its start, half from its end."""
    command_timeout_s: float
    """Default limit of a command; its CPU time is bounded by twice that."""
    cpus: float | None = None
    """Cores of the whole sandbox, where a control group can say so; None: all there are."""
    lease_s: float | None = None
    """A sandbox older than this is killed by its launcher, whatever its owner does; None: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """What one bash command did."""

    exit_code: int
    output: str
    """stdout and stderr as they came, readable text, cut to the limit."""
    truncated: bool = False
    timed_out: bool = False
    oom: bool = False
    """The kernel's out-of-memory killer ran while the command was killed."""
    duration_s: float = 0.0
    submitted: bool = False
    """`submit` ran inside, was the command's last word, and the exit code is 0."""
    sandbox_lost: bool = False
    """The command ended its own sandbox and its edits with it; no further command can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonResult:
    """What a Python program of ours did inside a sandbox."""

    report: bytes
    """What it wrote to its report descriptor."""
    output: str
    exit_code: int
    timed_out: bool = False


class Template(Protocol):
    """A repository at its base commit, built once, copied into each sandbox."""

    @property
    def base_commit(self) -> str: ...


class Sandbox(Protocol):
    """One private machine for one session. One call at a time."""

    async def run(
        self, command: str, timeout_s: float | None = None, output_chars: int | None = None
    ) -> CommandResult:
        """Run a bash command in a fresh shell at the repository's root.

        None takes the backend's limit. Background processes and files stay for the next
        command; a time-out ends every process.

        Raises:
            SandboxError: the sandbox broke for a reason the agent did not cause.
        """
        ...

    async def run_python(
        self, code: CodeType, data: dict[str, object], timeout_s: float
    ) -> PythonResult:
        """Execute `code` in a fresh interpreter at the repository's root, without rights.

        It finds the globals `data` (plus the keys `repo`, `base` and `home`: the work tree, the
        pristine template and a private folder) and `report_fd`. A time-out ends the sandbox.
        """
        ...

    async def capture_diff(self) -> bytes:
        """The work tree against its base as a binary git diff. Ends every process first.

        Raises:
            WorkTreeError: the tree cannot be recorded.
            SandboxError: the sandbox broke for a reason the agent did not cause.
        """
        ...

    async def destroy(self) -> None:
        """Kill every process and drop every file. May be called twice, and in any state."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes of one kind."""

    @property
    def name(self) -> str: ...

    @property
    def is_isolated(self) -> bool: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What this machine does not allow, in sentences; empty when nothing is weaker."""
        ...

    async def prepare(self, repository: Repository) -> Template:
        """Build (or find) the repository that a task starts from."""
        ...

    async def create(self, template: Template) -> Sandbox:
        """Make a sandbox whose work tree is a copy of the template.

        Raises:
            SandboxError: it did not start in time; the message holds what was printed.
        """
        ...

    async def close(self) -> None:
        """Destroy what is left, end the launcher, remove the scratch folder."""
        ...
