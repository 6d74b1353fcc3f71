"""Sandbox backends by name.

Invariant: a backend that claims isolation has shown it on this machine before its first sandbox is
handed out; a weaker one than asked for is never taken unless the caller allowed it by name.
"""

import os
import secrets
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlmix.core.errors import ConfigError, SandboxError
from rlmix.sandbox.containers import ENGINES, ContainerBackend, find_engine
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.namespaces import NamespaceBackend
from rlmix.sandbox.probe import explain
from rlmix.sandbox.protocol import SandboxBackend, SandboxLimits
from rlmix.sandbox.reap import run_folder
from rlmix.sandbox.uids import uid_range
from rlmix.sandbox.unisolated import UnisolatedBackend
from rlmix.sandbox.weak import WeakBackend

Opener = Callable[["BackendSpec"], Awaitable[SandboxBackend]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendSpec:
    """What every backend is opened with; each takes what concerns it."""

    limits: SandboxLimits
    folder: Path
    """Of this worker alone; made by the backend."""
    run_id: str
    image: str | None
    servers: tuple[str, ...]
    allow_weak: bool
    has_images: bool
    """Tasks come with images of their own, so a container engine needs no common one."""


class Opening(SandboxBackend, Protocol):
    """A backend that was made but not opened."""

    async def open(self) -> None: ...


async def open_namespaces(spec: BackendSpec) -> SandboxBackend:
    """bubblewrap; as root first with a user id of its own per sandbox, then without."""
    first_error: SandboxError | None = None
    spans = [uid_range()]
    if os.geteuid() == 0 and spans[0] is not None:
        spans.append(None)
    for span in spans:
        make_folder(spec.folder)
        backend = NamespaceBackend(
            limits=spec.limits, folder=spec.folder, run_id=spec.run_id, uids=span
        )
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
        f"To fix it: {explain(str(first_error))}"
    )


async def open_weak(spec: BackendSpec) -> SandboxBackend:
    """Landlock; as root with a user id of its own per sandbox where that can be."""
    make_folder(spec.folder)
    backend = WeakBackend(
        limits=spec.limits, folder=spec.folder, run_id=spec.run_id, uids=uid_range()
    )
    return await _opened(backend)


def _engine_opener(name: str) -> Opener:
    async def open_engine(spec: BackendSpec) -> SandboxBackend:
        engine, program, image = find_engine(name, spec.image, has_images=spec.has_images)
        make_folder(spec.folder)
        backend = ContainerBackend(
            name=name,
            engine=engine,
            program=program,
            image=image,
            limits=spec.limits,
            folder=spec.folder,
            run_id=spec.run_id,
        )
        return await _opened(backend)

    return open_engine


async def open_remote(spec: BackendSpec) -> SandboxBackend:
    from rlmix.sandbox.remote import RemoteBackend, token_from_environment

    if not spec.servers:
        raise ConfigError(
            "sandbox.backend=remote: sandbox.servers is empty; start `python -m "
            "rlmix.sandbox.server` and list its URL"
        )
    backend = RemoteBackend(
        urls=spec.servers,
        token=token_from_environment(),
        limits=spec.limits,
        run_id=spec.run_id,
        allow_weak=spec.allow_weak,
    )
    return await _opened(backend)


async def _opened(backend: Opening) -> SandboxBackend:
    try:
        await backend.open()
    except BaseException:
        await backend.close()
        raise
    return backend


async def open_unisolated(spec: BackendSpec) -> SandboxBackend:
    make_folder(spec.folder)
    backend = UnisolatedBackend(limits=spec.limits, folder=spec.folder, run_id=spec.run_id)
    await backend.open()
    return backend


BACKENDS: dict[str, Opener] = {
    "namespaces": open_namespaces,
    "weak": open_weak,
    **{name: _engine_opener(name) for name in ENGINES},
    "remote": open_remote,
    "unisolated": open_unisolated,
}
AUTO = "auto"
"""The strongest of the allowed ones that works here."""
LOCAL_BACKENDS = (AUTO, "namespaces", "weak")
"""Those that make sandboxes on this machine without an engine of somebody else's."""


async def open_backend(
    name: str,
    limits: SandboxLimits,
    scratch_dir: Path,
    run_id: str,
    *,
    image: str | None = None,
    servers: tuple[str, ...] = (),
    allow_weak: bool = False,
    allow_unisolated: bool = False,
    has_images: bool = False,
) -> SandboxBackend:
    """A backend that is ready to create sandboxes.

    Args:
        name: of `BACKENDS`, or `auto`: `namespaces`, else what may stand in for it.
        scratch_dir: existing folder for templates and shared files; fast storage helps.
        has_images: tasks come with images of their own; a container engine needs no `image` then.
        run_id: marks every process and folder, so that `reap` finds them.
        image: what container engines start.
        servers: URLs for `remote`.
        allow_weak: `auto` may take `weak` where namespaces are forbidden.
        allow_unisolated: take no isolation where isolation is impossible.

    Raises:
        ConfigError: unknown name, or `unisolated` without being allowed.
        SandboxError: the backend does not work here; the message says the fix.
    """
    known = [*sorted(BACKENDS), AUTO]
    if name not in known:
        raise ConfigError(f"sandbox.backend={name!r}; allowed: {', '.join(known)}")
    if name == "unisolated" and not allow_unisolated:
        raise ConfigError(
            "sandbox.backend=unisolated runs commands of a model with this user's rights; "
            "set sandbox.allow_unisolated=true if that is what you want"
        )
    tries = ["namespaces" if name == AUTO else name]
    if name == AUTO and allow_weak:
        tries.append("weak")
    if allow_unisolated and name in (AUTO, "namespaces", "weak"):
        tries.append("unisolated")
    parent = run_folder(scratch_dir, run_id)
    make_folder(parent)
    errors: list[str] = []
    for one in tries:
        folder = parent / f"worker_{os.getpid()}_{secrets.token_hex(4)}"
        try:
            backend = await BACKENDS[one](
                BackendSpec(
                    limits=limits,
                    folder=folder,
                    run_id=run_id,
                    image=image,
                    servers=servers,
                    allow_weak=allow_weak,
                    has_images=has_images,
                )
            )
            if errors and isinstance(backend, LaunchedBackend):
                backend.warnings = (f"{one} stands in: {'. '.join(errors)}", *backend.warnings)
            return backend
        except SandboxError as error:
            errors.append(str(error))
            shutil.rmtree(folder, ignore_errors=True)
    raise SandboxError(". ".join([*errors, *_other_ways(name, tries)]))


def _other_ways(name: str, tried: list[str]) -> list[str]:
    """What the caller may allow instead, weakest last."""
    ways = []
    if "weak" not in tried and name in (AUTO, "namespaces"):
        key = "sandbox.allow_weak=true" if name == AUTO else "sandbox.backend=weak"
        ways.append(f"To run with weaker isolation (Landlock): {key}")
    if "unisolated" not in tried:
        ways.append("To run without isolation: sandbox.allow_unisolated=true")
    return ways


def make_folder(path: Path) -> None:
    """A folder that every user id can walk through, whatever the umask says."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)
