"""The `unisolated` backend: the same commands in a plain folder, as this user, on this network.

For machines that forbid user namespaces, and only when the caller allowed it by name. A command
can read and write whatever this user can; a process that leaves its session and clears its
environment survives the sandbox.
"""

import contextlib
import os
import secrets
import shutil
import signal
from pathlib import Path

from rlmix.sandbox.cgroups import Group
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.placement import Placement
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sandbox.reap import marked_processes
from rlmix.sandbox.repository import RepositoryTemplate

BOX_MARK = "RLMIX_SANDBOX_BOX"
"""Environment variable by which the processes of one sandbox are found."""


class UnisolatedBackend(LaunchedBackend):
    """No isolation at all; bounded output, time and files only."""

    name = "unisolated"
    is_isolated = False
    _stop = "group"

    def __init__(self, *, limits: SandboxLimits, folder: Path, run_id: str) -> None:
        super().__init__(limits=limits, folder=folder, run_id=run_id, uids=None)
        self.warnings = (
            "commands are NOT isolated: they can read, write and connect like this user",
            "sandbox.disk_mib as a total has no effect without isolation",
        )

    async def open(self) -> None:
        self._open_groups()
        self._write_static(inside=str(self._folder / "static"), has_pids_limit=False)

    def _placement(
        self, template: RepositoryTemplate, uid: int | None, group: Group | None
    ) -> Placement:
        box = self._folder / f"box_{secrets.token_hex(6)}"
        for name in ("repo", "scratch", "home"):
            (box / name).mkdir(parents=True)
        mark = f"{BOX_MARK}={box.name}"
        loop = [
            *("/bin/bash", "--norc", "--noprofile", str(self._folder / "static/loop.sh")),
            *(str(box / "repo"), str(template.path), str(box / "scratch"), str(box / "home")),
            mark,
        ]
        return Placement(
            argv=loop,
            env={RUN_MARK: self._run_id, BOX_MARK: box.name},
            cwd="/",
            uid=None,
            has_namespaces=False,
            group=group,
            repo=str(box / "repo"),
            base=str(template.path),
            home=str(box / "home"),
            base_commit=template.base_commit,
        )

    def _clean(self, placement: Placement) -> None:
        for pid in marked_processes(BOX_MARK, placement.env[BOX_MARK]):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(Path(placement.repo).parent, ignore_errors=True)
