"""The `weak` backend: Landlock, a system call filter and limits, for machines that forbid user
namespaces (stock Ubuntu 24.04, unprivileged pods).

Weaker than `namespaces`: the host's file names, process numbers and command lines are seen; there
is no network at all, not even loopback; totals of disk are watched twice a second, not enforced.
As root every sandbox gets a user id of its own; an ordinary user's sandboxes share the user's.

Invariant: nothing outside the sandbox's folder can be written or made, nothing outside the system's
programs read, and no process outlives its sandbox: a supervisor outside adopts and ends them.
"""

import contextlib
import os
import secrets
import stat
from pathlib import Path

from rlmix.core.errors import SandboxError
from rlmix.core.task import Commit
from rlmix.sandbox import landlock
from rlmix.sandbox.bubblewrap import interpreter_prefix
from rlmix.sandbox.cgroups import Group
from rlmix.sandbox.launched import LaunchedBackend
from rlmix.sandbox.link import RUN_MARK
from rlmix.sandbox.placement import Placement
from rlmix.sandbox.probe import check_weak
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sandbox.reap import remove_tree
from rlmix.sandbox.repository import RepositoryTemplate
from rlmix.sandbox.seccomp import SUPERVISOR, build_filter
from rlmix.sandbox.session import ShellSandbox
from rlmix.sandbox.uids import UidPool, UidRange
from rlmix.sandbox.watch import Watch

STAGE_TIMEOUT_S = 10.0
SPARE_PROCESSES = 256
"""An ordinary user's limit counts all of the user's processes, so it cannot be tight."""
_PROBE_HISTORY = (Commit(message="probe", files={"probe.txt": "probe\n"}),)


class WeakBackend(LaunchedBackend):
    """A plain folder and plain processes that the kernel keeps in it."""

    name = "weak"
    is_isolated = True

    def __init__(
        self,
        *,
        limits: SandboxLimits,
        folder: Path,
        run_id: str,
        uids: UidRange | None,
        landlock_abi: int | None = None,
    ) -> None:
        """
        Args:
            landlock_abi: use no more than this version of Landlock; None takes what is there.
        """
        super().__init__(limits=limits, folder=folder, run_id=run_id, uids=uids)
        there = landlock.abi()
        self._abi = there if landlock_abi is None else min(there, landlock_abi)
        self._own_ids = uids is not None and uids.count > 1
        self._has_scopes = self._abi >= landlock.SCOPES_FROM_ABI
        self._watch = Watch(limits)
        self._outside = folder / "outside.txt"

    @property
    def _is_contained(self) -> bool:
        return self._has_scopes or self._own_ids

    async def open(self) -> None:
        """Write the shared files, then prove in one sandbox what this backend promises."""
        if self._abi < landlock.MIN_ABI:
            raise SandboxError(
                f"sandbox.backend=weak: Landlock has version {self._abi} here (0: none) and "
                f"{landlock.MIN_ABI} is needed; use Linux 6.2 or later with `landlock` in the "
                "boot option `lsm=`"
            )
        self._open_groups()
        self._say_what_is_missing()
        self._stop = "all" if self._is_contained else "tree"
        self._write_static(inside=str(self._folder / "static"), has_pids_limit=False)
        self._outside.write_text("not for sandboxes\n")
        self._watch.start()
        sandbox = await self.create(await self.prepare(_PROBE_HISTORY))
        try:
            await check_weak(
                sandbox,
                pid=sandbox.pid,
                drops_uid=self._uids.drops,
                is_contained=self._is_contained,
                host_file=self._outside,
            )
        finally:
            await sandbox.destroy()

    def _say_what_is_missing(self) -> None:
        self.warnings += (
            "weak isolation: commands see the host's file names and processes, have no sockets, "
            "and `sandbox.disk_mib` is watched, not enforced",
        )
        if not self._uids.drops:
            self.warnings += (
                "weak isolation under this user's own id: commands can change modes and times of "
                "this user's files",
            )
        if not self._is_contained:
            self.warnings += (
                f"weak isolation with Landlock {self._abi} (before Linux 6.12): commands can "
                "signal other processes of this user, but not rlmix's own",
            )

    async def _after_launch(self) -> None:
        if not self._uids.drops:
            return
        needed = [str(self._folder), interpreter_prefix()]
        covers = sorted({cover for path in needed if (cover := closed_ancestor(path))})
        if not covers:
            return
        inside = [path for path in needed if any(_is_below(path, cover) for cover in covers)]
        error = await self._link.stage([(path, path) for path in inside], covers, STAGE_TIMEOUT_S)
        if not error:
            return
        if not self._has_scopes:
            raise SandboxError(
                f"sandbox.backend=weak: another user id cannot enter {', '.join(covers)}; run "
                f"`chmod o+x {' '.join(covers)}`, or use Linux 6.12 or later"
            )
        self.warnings += (
            f"weak sandboxes keep root's id, without capabilities: another id cannot enter "
            f"{', '.join(covers)}",
        )
        self._uids = UidPool(None)
        self._own_ids = False

    def _placement(
        self, template: RepositoryTemplate, uid: int | None, group: Group | None
    ) -> Placement:
        box = self._folder / f"box_{secrets.token_hex(6)}"
        box.mkdir()
        box.chmod(0o755)
        for name in ("repo", "scratch", "home"):
            (box / name).mkdir()
            if uid is not None:
                os.chown(box / name, uid, uid)
        static = self._folder / "static"
        folders = [str(box / name) for name in ("repo", "scratch", "home")]
        repo, scratch, home = folders
        protected = () if self._is_contained else (os.getpid(), self._link.pid, SUPERVISOR)
        return Placement(
            argv=[
                *("/bin/bash", "--norc", "--noprofile", str(static / "loop.sh")),
                *(repo, str(template.path), scratch, home),
            ],
            env={RUN_MARK: self._run_id},
            cwd=repo,
            uid=uid,
            has_namespaces=False,
            group=group,
            filter=build_filter(sockets=False, protected_pids=protected),
            rules=landlock.rules(
                version=self._abi,
                writable=folders,
                readable=[str(static), str(template.path)],
                prefix=interpreter_prefix(),
            ),
            is_contained=self._is_contained,
            limits={"RLIMIT_NPROC": self._process_limit()},
            repo=repo,
            base=str(template.path),
            home=home,
            base_commit=template.base_commit,
        )

    def _process_limit(self) -> int:
        if self._own_ids:
            return self._limits.pids
        return threads_of(os.geteuid()) + self._limits.pids + SPARE_PROCESSES

    def _on_start(self, sandbox: ShellSandbox, placement: Placement) -> None:
        has_memory_group = "memory" in self._groups.in_force
        self._watch.add(sandbox, Path(placement.repo).parent, has_memory_group=has_memory_group)

    def _clean(self, placement: Placement) -> None:
        box = Path(placement.repo).parent
        self._watch.remove(box)
        remove_tree(box)

    async def close(self) -> None:
        await self._watch.stop()
        await super().close()


def closed_ancestor(path: str) -> str | None:
    """The outermost folder on the way to `path` that other user ids may not walk through."""
    parts = Path(path).parts
    for count in range(2, len(parts) + 1):
        folder = os.path.join(*parts[:count])
        mode = os.stat(folder).st_mode
        if stat.S_ISDIR(mode) and not mode & stat.S_IXOTH:
            return folder
    return None


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def threads_of(uid: int) -> int:
    """Threads that run under a user id now; the kernel's process limit counts these."""
    count = 0
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{entry}").st_uid == uid:
                    count += len(os.listdir(f"/proc/{entry}/task"))
    return count
