"""What backends that start processes on this machine have in common: one launcher, templates,
live sandboxes, one folder of the worker's own.

Invariant: `close` leaves no process and no folder, however many sandboxes were alive.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from rlmix.core.errors import SandboxError
from rlmix.core.task import Repository
from rlmix.sandbox.cgroups import Group, GroupPool, group_name, open_groups
from rlmix.sandbox.link import LauncherLink, interpreter
from rlmix.sandbox.placement import Placement
from rlmix.sandbox.protocol import SandboxLimits, Template
from rlmix.sandbox.reap import remove_tree, write_group_list
from rlmix.sandbox.repository import RepositoryTemplate, TemplateStore
from rlmix.sandbox.session import ShellSandbox
from rlmix.sandbox.shell import StaticOptions, write_static
from rlmix.sandbox.uids import UidPool, UidRange

MAX_LAUNCHES = 5
"""A launcher that keeps dying is a fault to show, not to hide."""


class LaunchedBackend(ABC):
    """Base of the local backends. A subclass says how one sandbox is started and cleaned up."""

    name: str
    is_isolated: bool
    _stop = "all"
    """How the first process ends the others: `all`, `tree` or `group`; see loop.sh."""

    def __init__(
        self, *, limits: SandboxLimits, folder: Path, run_id: str, uids: UidRange | None
    ) -> None:
        self._limits = limits
        self._folder = folder
        self._run_id = run_id
        self._uids = UidPool(uids)
        self._groups = GroupPool(limits=limits, parents={}, version=0)
        self._link = LauncherLink()
        self._launching = asyncio.Lock()
        self._launches = 0
        self._templates = TemplateStore(folder)
        self._sandboxes: set[ShellSandbox] = set()
        self.warnings: tuple[str, ...] = ()

    # --- what a subclass adds

    async def _after_launch(self) -> None:  # noqa: B027
        """Prepare a fresh launcher."""

    async def _before(self, template: RepositoryTemplate) -> None:
        """Make ready what a sandbox of `template` needs; the launcher is there.

        Raises:
            SandboxError: this backend cannot give it.
        """
        if template.has_machine:
            assert template.prepared is not None
            what = (
                f"its image {template.prepared.rootfs}"
                if template.prepared.rootfs
                else (f"folders of its own ({', '.join(template.prepared.writable)})")
            )
            raise SandboxError(
                f"sandbox.backend={self.name}: the task {template.prepared.folder} needs {what}; "
                "allowed for it: namespaces, docker, podman"
            )

    @abstractmethod
    def _placement(
        self, template: RepositoryTemplate, uid: int | None, group: Group | None
    ) -> Placement:
        """How one sandbox of `template` is started under `uid`, counted by `group`."""

    def _make_sandbox(self, placement: Placement, on_end: Callable[[], None]) -> ShellSandbox:
        return ShellSandbox(self._link, placement, self._limits, on_end=on_end)

    @property
    def _static_options(self) -> StaticOptions:
        """How this backend's first process differs from the others'."""
        return StaticOptions(interpreter=interpreter())

    def _on_start(self, sandbox: ShellSandbox, placement: Placement) -> None:  # noqa: B027
        """A sandbox is ready."""

    def _clean(self, placement: Placement) -> None:  # noqa: B027  (most have nothing to do)
        """Remove what one ended sandbox left on this machine."""

    # --- shared

    def _open_groups(self) -> None:
        """Find the control groups that this worker may use; says so where there are none."""
        self._groups = open_groups(self._limits, group_name(self._run_id, self._folder.name))
        write_group_list(self._folder, self._groups.parents.values())
        missing = [name for name in ("memory", "pids") if name not in self._groups.in_force]
        if missing:
            self.warnings += (
                f"no control group for {' and '.join(missing)} may be made here: bounds are per "
                "process, not per sandbox",
            )
        if self._limits.cpus is not None and "cpu" not in self._groups.in_force:
            self.warnings += ("sandbox.cpus has no effect: no control group for cpu",)

    def _write_static(self, *, inside: str, has_pids_limit: bool) -> None:
        write_static(
            self._folder / "static",
            inside=inside,
            options=self._static_options,
            limits=self._limits,
            stop=self._stop,
            has_pids_limit=has_pids_limit,
            has_memory_group="memory" in self._groups.in_force,
        )

    async def _ensure_launcher(self) -> None:
        async with self._launching:
            if self._link.is_open:
                return
            if self._launches >= MAX_LAUNCHES:
                raise SandboxError(
                    f"sandbox: the launcher process ended {MAX_LAUNCHES} times; "
                    "see the worker's log"
                )
            self._launches += 1
            self._link = LauncherLink()
            self._link.start(self._run_id, [str(path) for path in self._groups.parents.values()])
            await self._after_launch()

    async def prepare(self, repository: Repository) -> RepositoryTemplate:
        return await self._templates.get(repository)

    async def create(self, template: Template) -> ShellSandbox:
        assert isinstance(template, RepositoryTemplate)
        await self._ensure_launcher()
        await self._before(template)
        return await self._start(template)

    async def _start(self, template: RepositoryTemplate) -> ShellSandbox:
        uid = self._uids.take()
        try:
            group = self._groups.take()
            placement = self._placement(template, uid, group)
        except OSError as error:
            self._uids.give_back(uid)
            raise SandboxError(f"sandbox: cannot be prepared in {self._folder}: {error}") from None
        self._templates.hold(template)

        def on_end() -> None:
            self._uids.give_back(uid)
            self._groups.give_back(group)
            self._templates.let_go(template)
            self._sandboxes.discard(sandbox)
            self._clean(placement)

        sandbox = self._make_sandbox(placement, on_end)
        self._sandboxes.add(sandbox)
        try:
            await sandbox.start()
        except BaseException:
            await sandbox.destroy()
            raise
        self._on_start(sandbox, placement)
        return sandbox

    @property
    def num_live(self) -> int:
        return len(self._sandboxes)

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.destroy() for sandbox in list(self._sandboxes)))
        await self._link.close()
        await self._templates.close()
        await asyncio.to_thread(self._groups.close)
        await asyncio.to_thread(remove_tree, self._folder)
        with contextlib.suppress(OSError):
            self._folder.parent.rmdir()  # The run's folder, when this was its last worker.
