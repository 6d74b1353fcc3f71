"""The `namespaces` backend: bubblewrap without a daemon, under an unprivileged user id.

Invariant: as root, nothing of a sandbox runs under root's id outside, unless the machine leaves no
other way; then `warnings` says so.
"""

import os
import platform
from pathlib import Path

from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit
from rlmix.sandbox import bubblewrap
from rlmix.sandbox.cgroups import Group
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.placement import Placement
from rlmix.sandbox.probe import check_isolation
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sandbox.repository import RepositoryTemplate
from rlmix.sandbox.seccomp import build_filter
from rlmix.sandbox.uids import UidRange

STAGE = "/tmp"
"""The folder that a root launcher covers for its own children, to gather there what they need."""
STAGE_TIMEOUT_S = 10.0
FIRST_KERNEL_WITH_OWN_PID_COUNT = (5, 14)
"""From here on a process limit counts per user namespace, not per user of the whole machine."""
_PROBE_HISTORY = (Commit(message="probe", files={"probe.txt": "probe\n"}),)


class NamespaceBackend(LaunchedBackend):
    """Own user, mount, pid, network, ipc and uts namespaces for every sandbox."""

    name = "namespaces"
    is_isolated = True

    def __init__(
        self, *, limits: SandboxLimits, folder: Path, run_id: str, uids: UidRange | None
    ) -> None:
        super().__init__(limits=limits, folder=folder, run_id=run_id, uids=uids)
        self._bwrap = bubblewrap.find_bwrap()
        self._filter = build_filter()
        self._fixed: list[str] = []
        self._scratch = folder

    async def open(self) -> None:
        """Write the shared files, then prove isolation in one real sandbox."""
        self._open_groups()
        is_counted = self._uids.drops or kernel_version() >= FIRST_KERNEL_WITH_OWN_PID_COUNT
        if not is_counted:
            self.warnings += (
                "sandbox.pids has no effect: before Linux 5.14 it would count all processes of "
                "this user",
            )
        self._write_static(inside=bubblewrap.STATIC, has_pids_limit=is_counted)
        template = await self.prepare(_PROBE_HISTORY)
        sandbox = await self.create(template)
        try:
            await check_isolation(
                sandbox,
                pid=sandbox.pid,
                drops_uid=self._uids.drops,
                host_file=self._folder / "static/loop.sh",
            )
        finally:
            await sandbox.destroy()

    async def _after_launch(self) -> None:
        prefix = bubblewrap.interpreter_prefix()
        bwrap, scratch = str(self._bwrap), self._folder
        if self._uids.drops:
            named = [(str(self._folder), "scratch"), (prefix, "prefix")]
            named += bubblewrap.bwrap_folders(self._bwrap)
            sources = [(path, f"{STAGE}/{name}") for path, name in named]
            error = await self._link.stage(sources, [STAGE], STAGE_TIMEOUT_S)
            if error:
                raise SandboxError(f"sandbox: root cannot prepare a mount namespace: {error}")
            bwrap = bubblewrap.staged_bwrap(self._bwrap, STAGE)
            prefix, scratch = f"{STAGE}/prefix", Path(STAGE, "scratch")
        self._scratch = scratch
        self._fixed = bubblewrap.fixed_arguments(
            bwrap,
            static=f"{scratch}/static",
            prefix=prefix,
            limits=self._limits,
            is_root_outside=os.geteuid() == 0 and not self._uids.drops,
        )

    def _placement(
        self, template: RepositoryTemplate, uid: int | None, group: Group | None
    ) -> Placement:
        return Placement(
            argv=bubblewrap.arguments(self._fixed, str(self._scratch / template.path.name)),
            env={RUN_MARK: self._run_id},
            cwd="/",
            uid=uid,
            has_namespaces=True,
            group=group,
            filter=self._filter,
            repo=bubblewrap.REPO,
            base=bubblewrap.BASE,
            home=bubblewrap.HOME,
            base_commit=template.base_commit,
        )


def kernel_version() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(char for char in minor if char.isdigit()) or 0)
