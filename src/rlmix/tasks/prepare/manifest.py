"""What was done to a task and what was proven; written last, read before any work is repeated."""

from dataclasses import asdict, dataclass
from typing import Any

SCHEMA_VERSION = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One prepared task."""

    task_id: str
    inputs: str
    """Digest of the task that was prepared: another fix or hidden test makes another one."""
    commit: str
    """The base in the re-created repository."""
    tree: str
    """Its tree, equal to that of the original base."""
    num_objects: int
    left_behind: tuple[str, ...]
    """What the original repository carried beyond its base, in words."""
    purged: tuple[str, ...]
    """Paths of the work tree that were not taken over."""
    overlaid: tuple[str, ...]
    """Paths of the image outside the repository that are removed or replaced by `overlay/`."""
    ignored: tuple[str, ...]
    """Files that git ignores and that were kept (build outputs), at most 100 named."""
    num_ignored: int
    workdir: str
    """Where the repository lies in the image, links resolved."""
    has_programs: bool
    """The image brings its own programs; without them commands run with this machine's."""
    image_bytes: int
    """Of all regular files of the image."""
    repository_bytes: int
    """Of what a sandbox copies."""
    proof: tuple[str, ...] = ()
    """Sentences, each one checked."""
    schema_version: int = SCHEMA_VERSION

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Excluded:
    """A task that could not be proven clean."""

    task_id: str
    reason: str
