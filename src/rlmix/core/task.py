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
class PublicTask:
    """All that the agent, the rollout process and the prompt may see."""

    task_id: str
    split: str
    """`train` or `eval`."""
    issue: str
    history: tuple[Commit, ...]
    """Oldest first; the state after the last commit is the base that the agent edits."""
    tags: dict[str, str] = field(default_factory=dict)
    """`kind`, `difficulty`, `num_edits`, ... for reports only, never in the prompt."""

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
    """unittest ids that must all run and pass, e.g. `test_hidden.TestTotals.test_empty`."""
    reference_diff: str
    """Unified diff that fixes the base; used by gates and scripted agents, never by rollouts."""
