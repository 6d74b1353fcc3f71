"""A repository task as the rest of the system sees it: what the agent may know, and what it
must not. The two halves are separate types, so that a rollout can be given only the first."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One commit of the repository's history before the agent starts. Files are whole texts."""

    message: str
    files: dict[str, str]
    """Path -> content; files not named stay as they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedRepository:
    """A repository that `rlmix tasks prepare` made: a folder with `repo` and `capture`."""

    folder: str
    commit: str
    """The base in it; part of a template's identity, so a folder made anew is not mixed up."""
    workdir: str = ""
    """Where the task's own commands expect the repository; empty: wherever the sandbox has it."""
    image: str = ""
    """Name of its image, for container engines; empty: the one of `sandbox.image`."""
    rootfs: str = ""
    """Its unpacked image on this machine, for namespaces; empty: the machine's own programs."""
    writable: tuple[str, ...] = ()
    """Absolute folders outside of the repository that tests write to: empty at the start."""


Repository = tuple[Commit, ...] | PreparedRepository
"""What a sandbox is filled with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublicTask:
    """All that the agent, the rollout process and the prompt may see."""

    task_id: str
    split: str
    """`train` or `eval`."""
    issue: str
    history: tuple[Commit, ...] = ()
    """Oldest first; the state after the last commit is the base that the agent edits."""
    prepared: PreparedRepository | None = None
    """Instead of a history, for tasks of public sets."""
    verify_s: float | None = None
    """Longest run of its tests, seconds; None: whatever judges it decides."""
    tags: dict[str, str] = field(default_factory=dict)
    """`kind`, `difficulty`, `num_edits`, ... for reports only, never in the prompt."""

    @property
    def repository(self) -> Repository:
        return self.prepared or self.history

    def base_files(self) -> dict[str, str]:
        """Path -> content of the working tree that the agent starts from."""
        files: dict[str, str] = {}
        for commit in self.history:
            files.update(commit.files)
        return files


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenTask:
    """What only the verdict opens."""

    task_id: str
    tests: dict[str, str]
    """Path -> content, written over the base after the diff was applied."""
    required_tests: tuple[str, ...]
    """Names that must all run and pass, e.g. `test_hidden.TestTotals.test_empty`; of unittest ids
    without a test command, else as the command's runner names them."""
    reference_diff: str
    """Unified diff that fixes the base; used by gates and scripted agents, never by rollouts."""
    test_command: str = ""
    """Bash command that runs the tests at the repository's root; empty runs `tests` as unittest."""
    runner: str = ""
    """Whose report the command writes (`tasks.evidence.runners`); empty finds it in the command."""
    scripts: dict[str, str] = field(default_factory=dict)
    """`run_script.sh` and `parser.py` of SWE-bench Pro, whose command is the script's argument; or,
    with the runner `harbor`, files by absolute path, the command being one of them."""
    hidden_patch: bytes = b""
    """Git diff of the hidden tests, applied after the submitted one."""
    skippable_tests: tuple[str, ...] = ()
    """Names that passed before the fix and must still pass, or be skipped."""
    name_style: str = "same"
    """How those names follow from the runner's (`tasks.evidence.names`)."""
    test_env: dict[str, str] = field(default_factory=dict)
    """Environment of the test command beside the sandbox's own."""
