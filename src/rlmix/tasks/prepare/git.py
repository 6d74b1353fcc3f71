"""git as this room uses it: our configuration only, bytes in and out, never a hook or a filter.

Invariant: nothing of the inspected repository's configuration is obeyed, so a hostile one can run
no program.
"""

import os
import subprocess
from pathlib import Path

from rlmix.core.errors import DataError

TIMEOUT_S = 600.0
SAFE = (
    "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false", "-c", "core.fsync=none",
    "-c", "protocol.allow=never", "-c", "safe.directory=*", "-c", "gc.auto=0",
    "-c", "core.attributesFile=/dev/null", "-c", "core.excludesFile=/dev/null",
    "-c", "core.autocrlf=false", "-c", "core.quotePath=false", "-c", "core.logAllRefUpdates=false",
)  # fmt: skip
IDENTITY = "Developer <developer@localhost> 1700000000 +0000"
"""A commit id must not depend on who prepared it or when."""


def environment(**extra: str) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin"),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        # Stronger than `protocol.allow`, which a repository's own configuration can narrow: a
        # partial clone would otherwise fetch what it lacks, over `ext::` by running a program.
        "GIT_ALLOW_PROTOCOL": "none",
        "GIT_NO_LAZY_FETCH": "1",
        **extra,
    }


def git(
    *args: str,
    cwd: Path,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    check: bool = True,
) -> bytes:
    """stdout of a git command.

    Raises:
        DataError: git failed; the message holds what it said.
    """
    try:
        done = subprocess.run(
            ["git", *SAFE, *args],
            cwd=cwd,
            env=environment(**(env or {})),
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise DataError(f"tasks prepare: git {args[0]} in {cwd}: {error}") from None
    if check and done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().split("\n")[-1]
        raise DataError(f"tasks prepare: git {args[0]} in {cwd} failed: {said}")
    return done.stdout


def objects_in(folder: Path, *, env: dict[str, str] | None = None) -> dict[str, str]:
    """Every object of the store, reachable or not: id -> kind."""
    listing = git(
        "cat-file", "--batch-all-objects", "--batch-check=%(objectname) %(objecttype)",
        cwd=folder, env=env,
    )  # fmt: skip
    return dict(line.split(" ", 1) for line in listing.decode().splitlines())


def closure_of(folder: Path, *tips: str) -> set[str]:
    """Every object that `tips` (or, without any, all references) reach."""
    listing = git("rev-list", "--objects", "--no-object-names", *(tips or ("--all",)), cwd=folder)
    return set(listing.decode().split())
