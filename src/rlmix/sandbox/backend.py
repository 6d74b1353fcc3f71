"""Sandbox backends by name.

Invariant: a backend that claims isolation has shown it on this machine before its first sandbox is
handed out; without isolation nothing is handed out unless the caller allowed that by name.
"""

import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from rlmix.core.errors import ConfigError, SandboxError
from rlmix.sandbox.namespaces import NamespaceBackend
from rlmix.sandbox.probe import explain
from rlmix.sandbox.protocol import SandboxBackend, SandboxLimits
from rlmix.sandbox.reap import run_folder
from rlmix.sandbox.uids import uid_range
from rlmix.sandbox.unisolated import UnisolatedBackend

Opener = Callable[[SandboxLimits, Path, str], Awaitable[SandboxBackend]]


async def open_namespaces(limits: SandboxLimits, folder: Path, run_id: str) -> SandboxBackend:
    """bubblewrap; as root first with a user id of its own per sandbox, then without."""
    first_error: SandboxError | None = None
    spans = [uid_range()]
    if os.geteuid() == 0 and spans[0] is not None:
        spans.append(None)
    for span in spans:
        make_folder(folder)
        backend = NamespaceBackend(limits=limits, folder=folder, run_id=run_id, uids=span)
        try:
            await backend.open()
        except SandboxError as error:
            await backend.close()
            first_error = first_error or error
            continue
        if os.geteuid() == 0 and span is None:
            reason = f" ({first_error})" if first_error else ""
            backend.warnings += (
                f"sandboxes run under root's id outside, without capabilities{reason}; "
                "sandbox.pids has no effect for root",
            )
        return backend
    assert first_error is not None
    raise SandboxError(
        f"sandbox.backend=namespaces does not work here: {first_error}. "
        f"To fix it: {explain(str(first_error))}. To run without isolation: "
        "sandbox.allow_unisolated=true"
    )


async def open_unisolated(limits: SandboxLimits, folder: Path, run_id: str) -> SandboxBackend:
    make_folder(folder)
    backend = UnisolatedBackend(limits=limits, folder=folder, run_id=run_id)
    await backend.open()
    return backend


BACKENDS: dict[str, Opener] = {"namespaces": open_namespaces, "unisolated": open_unisolated}


async def open_backend(
    name: str,
    limits: SandboxLimits,
    scratch_dir: Path,
    run_id: str,
    *,
    allow_unisolated: bool = False,
) -> SandboxBackend:
    """A backend that is ready to create sandboxes.

    Args:
        scratch_dir: existing folder for templates and shared files; fast storage helps.
        run_id: marks every process and folder, so that `reap` finds them.
        allow_unisolated: fall back to no isolation where isolation is impossible.

    Raises:
        ConfigError: unknown name, or `unisolated` without being allowed.
        SandboxError: the backend does not work here; the message says the fix.
    """
    if name not in BACKENDS:
        raise ConfigError(f"sandbox.backend={name!r}; allowed: {', '.join(sorted(BACKENDS))}")
    if name == "unisolated" and not allow_unisolated:
        raise ConfigError(
            "sandbox.backend=unisolated runs commands of a model with this user's rights; "
            "set sandbox.allow_unisolated=true if that is what you want"
        )
    parent = run_folder(scratch_dir, run_id)
    make_folder(parent)
    folder = parent / f"worker_{os.getpid()}_{secrets.token_hex(4)}"
    try:
        return await BACKENDS[name](limits, folder, run_id)
    except SandboxError:
        shutil.rmtree(folder, ignore_errors=True)
        if name == "unisolated" or not allow_unisolated:
            raise
        return await open_unisolated(limits, folder, run_id)


def make_folder(path: Path) -> None:
    """A folder that every user id can walk through, whatever the umask says."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)
