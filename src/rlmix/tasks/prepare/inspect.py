"""What an image's repository knows beyond its base: a list for the manifest, never the proof.

The proof is what the re-created repository holds (`proof.py`); this only says what was left behind.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlmix.core.errors import DataError
from rlmix.tasks.prepare.git import git, objects_in
from rlmix.tasks.prepare.image import git_dir_of, git_environment

CHANNELS = {
    "objects/info/alternates": "alternates",
    "shallow": "shallow",
    "info/grafts": "grafts",
    "worktrees": "worktrees",
    "modules": "submodule git folders",
    "logs": "reflogs",
    "refs/stash": "stash",
    "refs/notes": "notes",
    "refs/replace": "replaced objects",
    "refs/remotes": "remotes",
    "packed-refs": "packed references",
    "ORIG_HEAD": "ORIG_HEAD",
    "FETCH_HEAD": "FETCH_HEAD",
    "MERGE_HEAD": "MERGE_HEAD",
    "rr-cache": "recorded conflict resolutions",
    "hooks": "hooks",
}
"""Path below a git folder -> what it can carry."""


WANTED = ((), ("--tags",), ("--tags", "--match", "*[0-9]*"), ("--tags", "--match", "v[0-9]*"))
"""How versions are asked for: by git, by most tools, by setuptools-scm, by versioneer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """A tag of the base's past."""

    name: str
    distance: int
    """Commits from it to the base."""
    is_annotated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Original:
    """An image's repository as it was found."""

    env: Mapping[str, str]
    """Names the git folder to git, and keeps it inside the image; empty where there is none."""
    head: str
    """Commit of HEAD; empty when there is none."""
    base: str
    """Commit that the task starts from; the head's where the work tree is the base."""
    num_refs: int
    num_objects: int
    num_beyond_base: int
    """Objects that the base does not reach: future commits, dangling ones, other branches."""
    channels: tuple[str, ...]
    """What of CHANNELS is there, in words."""
    tags: tuple["Tag", ...]
    """The tags at or before the base that a version can be derived from; empty when none is."""


def inspect(rootfs: Path, repo: Path, commit: str) -> Original:
    """Read a repository without changing it.

    Args:
        rootfs: the image; nothing outside of it is read.
        commit: the base that the record names; empty takes HEAD.

    Raises:
        DataError: no repository, one that points out of the image, or it lacks the base.
    """
    if not commit and not os.path.lexists(repo / ".git"):
        return _without_git()
    git_dir = git_dir_of(rootfs, repo)
    env = git_environment(rootfs, repo, git_dir)
    head = git("rev-parse", "--verify", "--quiet", "HEAD^{commit}", cwd=repo, env=env, check=False)
    found = head.decode().strip()
    base = commit or found
    if base:
        known = git(
            "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}", cwd=repo, env=env, check=False
        )
        if not known:
            raise DataError(f"the repository has no commit {base}")
        base = known.decode().strip()
    everything = objects_in(repo, env=env)
    reached: set[str] = set()
    if base:
        listing = git("rev-list", "--objects", "--no-object-names", base, cwd=repo, env=env)
        reached = set(listing.decode().split())
    refs = git("for-each-ref", "--format=%(refname)", cwd=repo, env=env, check=False)
    return Original(
        env=env,
        head=found,
        base=base,
        num_refs=len(refs.decode().split()),
        num_objects=len(everything),
        num_beyond_base=len(set(everything) - reached),
        channels=tuple(said for path, said in CHANNELS.items() if (git_dir / path).exists()),
        tags=_nearest_tags(repo, base, env) if base else (),
    )


def _without_git() -> Original:
    """A folder that no repository records: its files are the base, and nothing is behind them."""
    return Original(
        env={},
        head="",
        base="",
        num_refs=0,
        num_objects=0,
        num_beyond_base=0,
        channels=(),
        tags=(),
    )


def _nearest_tags(repo: Path, base: str, env: dict[str, str]) -> tuple[Tag, ...]:
    found: dict[str, Tag] = {}
    for options in WANTED:
        said = git("describe", "--long", *options, base, cwd=repo, env=env, check=False)
        name, *facts = said.decode("utf-8", "surrogateescape").strip().rsplit("-", 2)
        if len(facts) == 2:
            kind = git("cat-file", "-t", f"refs/tags/{name}", cwd=repo, env=env, check=False)
            is_annotated = kind.strip() == b"tag"
            found[name] = Tag(name=name, distance=int(facts[0]), is_annotated=is_annotated)
    return tuple(found.values())
