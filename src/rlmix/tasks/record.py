"""One repository task from any data set, in three parts that are stored apart.

Invariant: `TaskRecord` holds nothing that helps to solve the task; `HiddenRecord` and `GoldRecord`
lie in files of their own that the rollout process never opens.
"""

from dataclasses import dataclass, field

DEFAULT_AGENT_S, DEFAULT_COMMAND_S, DEFAULT_VERIFY_S = 3000, 300, 1800


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRef:
    """A container image."""

    ref: str
    """Name with tag, such as `registry/name:tag`."""
    digest: str = ""
    """`sha256:...`; empty when the set pins none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The state that the agent starts from."""

    kind: str
    """`commit`: `commit` of the repository in the image; `tree`: the image's work tree as it is."""
    commit: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a task asks for; 0 where its set says nothing."""

    cpus: float = 0
    memory_mib: int = 0
    disk_mib: int = 0
    agent_s: int = DEFAULT_AGENT_S
    command_s: int = DEFAULT_COMMAND_S
    verify_s: int = DEFAULT_VERIFY_S


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRecord:
    """What may be known of a task while it is worked on."""

    task_id: str
    source: str
    revision: str
    repository: str
    """`owner/name`; empty when the set does not say."""
    language: str
    prompt: str
    image: ImageRef | None
    workdir: str
    base: Base
    limits: Limits = field(default_factory=Limits)
    writable: tuple[str, ...] = ()
    """Absolute folders outside of the repository that its tests fill; empty at the start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenRecord:
    """What decides a task."""

    task_id: str
    test_command: str
    runner: str = ""
    """Whose report the command writes; empty: found in the command."""
    hidden_patch: str = ""
    """Git diff that adds the hidden tests."""
    files: dict[str, str] = field(default_factory=dict)
    """Path in the sandbox -> content, written before the command runs."""
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    name_style: str = "same"
    """How names of the set follow from names of the runner (`tasks.evidence.names`)."""
    image_paths: tuple[str, ...] = ()
    """Absolute paths in the image that hold tests or verdicts and must be out of the agent's."""
    from_image: dict[str, str] = field(default_factory=dict)
    """File or folder of the image that decides -> its place in the repository when it is judged.
    Preparation takes them out of the image and into `files`."""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class GoldRecord:
    """The reference fix, for gates and scripted agents."""

    task_id: str
    patch: str
    is_reversed: bool = False
    """The patch makes the bug; the fix is its reverse."""
    commit: str = ""
    """The commit that fixes it upstream, where the set names it: must not be reachable."""
    script: dict[str, str] = field(default_factory=dict)
    """Absolute path -> content, where a script (the first of them) makes the fix, not a diff."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTask:
    """The three parts of one row."""

    public: TaskRecord
    hidden: HiddenRecord
    gold: GoldRecord | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A row that cannot be used, and why."""

    file: str
    row: int
    """From 0, within the file; a folder counts as row 0."""
    column: str
    problem: str
    task_id: str = ""

    def sentence(self) -> str:
        who = f" ({self.task_id})" if self.task_id else ""
        return f"{self.file}, row {self.row}{who}, column {self.column}: {self.problem}"
