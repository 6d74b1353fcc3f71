"""The `namespaces` backend: bubblewrap without a daemon, under an unprivileged user id.

Invariant: as root, nothing of a sandbox runs under root's id outside, unless the machine leaves no
other way; then `warnings` says so.
"""

import asyncio
import os
import platform
from dataclasses import dataclass
from pathlib import Path

from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit
from rlmix.sandbox import bubblewrap
from rlmix.sandbox.cgroups import Group
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.layers import bubblewrap_mounts, changes_in, image_arguments, reachable
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
LOGIN_PATH_S = 10.0
ENVIRONMENTS = ("/opt/miniconda3/envs/testbed/bin", "/testbed/.venv/bin", "/root/.venv/bin")
"""Where images of the public sets keep their tests' interpreter: their own harnesses activate it in
every command, a login shell does not."""
_LOGIN_PATH = (
    """bash -lc 'printf "\\n%s" "$PATH"' | tail -n 1; """
    f"""for d in {" ".join(ENVIRONMENTS)}; do [ -d "$d" ] && printf '\\n%s' "$d"; done; true"""
)
_PROBE_HISTORY = (Commit(message="probe", files={"probe.txt": "probe\n"}),)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMachine:
    """What differs between the sandboxes of one task and those of another."""

    fixed: list[str]
    repo: str = bubblewrap.REPO


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
        self._scratch = folder
        self._prefix = bubblewrap.interpreter_prefix()
        self._starter = str(self._bwrap)
        self._machines: dict[Path, TaskMachine] = {}
        self._images: dict[str, str] = {}
        """Unpacked image -> its place as the launcher's children find it."""
        self._login_paths: dict[str, str] = {}
        self._staging, self._asking = asyncio.Lock(), asyncio.Lock()

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
        self._images.clear()
        self._machines.clear()
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
        self._scratch, self._prefix, self._starter = scratch, prefix, bwrap

    def _fixed(self, system: list[str], repo: str, writable: tuple[str, ...]) -> list[str]:
        return bubblewrap.fixed_arguments(
            self._starter,
            static=f"{self._scratch}/static",
            prefix=self._prefix,
            limits=self._limits,
            is_root_outside=os.geteuid() == 0 and not self._uids.drops,
            system=system,
            repo=repo,
            writable=writable,
        )

    async def _before(self, template: RepositoryTemplate) -> None:
        """The task's machine, once per template; and its image's PATH, once per image."""
        async with self._staging:
            if template.path not in self._machines:
                self._machines[template.path] = await self._machine(template)
        rootfs = "" if template.prepared is None else template.prepared.rootfs
        if rootfs and rootfs not in self._login_paths:
            async with self._asking:
                if rootfs not in self._login_paths:
                    self._login_paths[rootfs] = await self._ask_login_path(template)

    async def _machine(self, template: RepositoryTemplate) -> TaskMachine:
        prepared = template.prepared
        if prepared is None:
            return TaskMachine(fixed=self._fixed([], bubblewrap.REPO, ()))
        repo = prepared.workdir or bubblewrap.REPO
        for place in (repo, *prepared.writable):
            bubblewrap.check_place(place, has_image=bool(prepared.rootfs))
        system: list[str] = []
        if prepared.rootfs:
            own = (repo, bubblewrap.interpreter_prefix(), *prepared.writable)
            system = await self._image(template, Path(prepared.rootfs), own)
        return TaskMachine(fixed=self._fixed(system, repo, prepared.writable), repo=repo)

    async def _image(
        self, template: RepositoryTemplate, rootfs: Path, own: tuple[str, ...]
    ) -> list[str]:
        if bubblewrap.interpreter_prefix().startswith("/usr"):
            raise SandboxError(
                "sandbox.backend=namespaces: tasks with an image need an interpreter of rlmix "
                f"outside of /usr, which the image has of its own; this one is in {self._prefix}"
            )
        if not rootfs.is_dir():
            raise SandboxError(f"sandbox: the unpacked image {rootfs}: No such file or directory")
        seen_as = self._images.get(str(rootfs), str(rootfs))
        if self._uids.drops and str(rootfs) not in self._images:
            seen_as = f"{STAGE}/images/{len(self._images)}"
            error = await self._link.stage([(str(rootfs), seen_as)], [], STAGE_TIMEOUT_S)
            if error:
                raise SandboxError(f"sandbox: the unpacked image {rootfs}: {error}")
            self._images[str(rootfs)] = seen_as
        system = await asyncio.to_thread(
            image_arguments, rootfs, seen_as, own, must_be_public=self._uids.drops
        )
        changes = await asyncio.to_thread(changes_in, template.path / "overlay")
        if self._uids.drops:
            changes = await asyncio.to_thread(reachable, changes, rootfs)
        place = self._scratch / template.path.name / "overlay"
        mounts = bubblewrap_mounts(changes, overlay=str(place), static=f"{self._scratch}/static")
        return [*system, *mounts]

    async def _ask_login_path(self, template: RepositoryTemplate) -> str:
        sandbox = await self._start(template)
        try:
            found = await sandbox.run(_LOGIN_PATH, timeout_s=LOGIN_PATH_S)
        finally:
            await sandbox.destroy()
        path, *environments = found.output.strip().splitlines() or [bubblewrap.DEFAULT_PATH]
        return ":".join([*environments, path])

    def _placement(
        self, template: RepositoryTemplate, uid: int | None, group: Group | None
    ) -> Placement:
        machine = self._machines[template.path]
        rootfs = "" if template.prepared is None else template.prepared.rootfs
        path = self._login_paths.get(rootfs, bubblewrap.DEFAULT_PATH)
        env = [f"PATH={bubblewrap.STATIC}/bin:{path}"] if rootfs else []
        return Placement(
            argv=bubblewrap.arguments(
                machine.fixed,
                str(self._scratch / template.path.name),
                repo=machine.repo,
                env=env,
            ),
            path=path,
            env={RUN_MARK: self._run_id},
            cwd="/",
            uid=uid,
            has_namespaces=True,
            group=group,
            filter=self._filter,
            repo=machine.repo,
            base=bubblewrap.BASE,
            home=bubblewrap.HOME,
            base_commit=template.base_commit,
        )


def kernel_version() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int("".join(char for char in minor if char.isdigit()) or 0)
