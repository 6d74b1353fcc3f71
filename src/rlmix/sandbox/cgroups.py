"""Memory, process and CPU limits of a whole sandbox, through the kernel's control groups.

Which kind is in force is found by trying: version 2 where a folder with its controllers is ours
to write, else version 1, each controller on its own; else none, and the caller falls back to
limits per process.

Invariant: a group that is handed out is empty and carries the limits; `close` leaves no folder.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlmix.sandbox.protocol import SandboxLimits

CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_TMP_AND_REPO = 2
_SHM_MIB = 16
_OWN_PROCESSES = 4
"""Beside the agent's: bubblewrap's monitor, and a verdict's two waiting processes."""
_REMOVE_S = 3.0
_TRY_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hierarchy:
    """One mounted tree of groups, and where this process is in it."""

    version: int
    controllers: tuple[str, ...]
    mount: str
    own: str
    """Folder of this process's group."""


def hierarchies(mountinfo: str, own_groups: str) -> list[Hierarchy]:
    """The trees that carry a controller we use, version 2 first.

    Args:
        mountinfo: text of /proc/self/mountinfo.
        own_groups: text of /proc/self/cgroup.
    """
    places = {}
    for line in own_groups.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            places[name] = path
    found = []
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        root, mount = (_unescaped(word) for word in head.split()[3:5])
        kind, _, options = tail.split(" ")[:3]
        if kind == "cgroup2" and "" in places:
            own = _below(mount, root, places[""])
            found.append(Hierarchy(version=2, controllers=CONTROLLERS, mount=mount, own=own))
        elif kind == "cgroup":
            for name in set(CONTROLLERS) & set(options.split(",")):
                if name in places:
                    own = _below(mount, root, places[name])
                    found.append(Hierarchy(version=1, controllers=(name,), mount=mount, own=own))
    return sorted(found, key=lambda tree: (-tree.version, tree.controllers))


def _below(mount: str, root: str, path: str) -> str:
    """Where `path` of the tree is on disk, when its folder `root` is mounted at `mount`."""
    if root == "/":
        return f"{mount}{path}".rstrip("/")
    return f"{mount}{path[len(root) :]}" if path.startswith(root) else mount


def _unescaped(word: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)


@dataclass(kw_only=True, slots=True)
class Group:
    """The limits of one sandbox: a folder in each tree in use."""

    folders: dict[str, Path]
    """Controller -> folder; under version 2 they are the same one."""
    version: int
    oom_kills_before: int = 0

    @property
    def join_files(self) -> list[str]:
        """Writing "0" to each puts the writer in."""
        return [str(folder / "cgroup.procs") for folder in dict.fromkeys(self.folders.values())]

    def oom_kills(self) -> int:
        """How often the kernel killed for memory in this group since it was handed out."""
        return self._oom_counter() - self.oom_kills_before

    def _oom_counter(self) -> int:
        folder = self.folders.get("memory")
        if folder is None:
            return 0
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError):
            for line in (folder / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def processes(self) -> set[int]:
        found: set[int] = set()
        for path in self.join_files:
            with contextlib.suppress(OSError):
                found |= set(map(int, Path(path).read_text().split()))
        return found


@dataclass(kw_only=True)
class GroupPool:
    """Groups of one worker. Making a group costs about 2 ms, so ended sandboxes hand theirs on."""

    limits: SandboxLimits
    parents: dict[str, Path]
    """Controller -> folder that this worker made; empty where nothing is allowed."""
    version: int
    _free: list[Group] = field(default_factory=list)
    _made: list[Group] = field(default_factory=list)

    @property
    def in_force(self) -> tuple[str, ...]:
        return tuple(name for name in CONTROLLERS if name in self.parents)

    def take(self) -> Group | None:
        """An empty group with the limits set; None when no controller is in force."""
        if not self.parents:
            return None
        for group in self._free:
            if not group.processes():
                self._free.remove(group)
                break
        else:
            group = self._make()
        group.oom_kills_before = group._oom_counter()
        return group

    def _make(self) -> Group:
        name = f"box{len(self._made)}"
        group = Group(
            folders={controller: path / name for controller, path in self.parents.items()},
            version=self.version,
        )
        for folder in dict.fromkeys(group.folders.values()):
            folder.mkdir()
        self._made.append(group)
        set_limits(group, self.limits)
        return group

    def give_back(self, group: Group | None) -> None:
        if group is not None:
            for pid in group.processes():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._free.append(group)

    def close(self) -> None:
        for path in dict.fromkeys(self.parents.values()):
            remove_groups(path)
        self.parents = {}


def open_groups(
    limits: SandboxLimits,
    name: str,
    trees: list[Hierarchy] | None = None,
) -> GroupPool:
    """Find out what this process may limit, by doing it once.

    Args:
        name: of the folders to make; `remove_groups` takes the returned parents.
        trees: None looks at this machine.
    """
    if trees is None:
        mountinfo = Path("/proc/self/mountinfo").read_text()
        trees = hierarchies(mountinfo, Path("/proc/self/cgroup").read_text())
    for version in (2, 1):
        parents: dict[str, Path] = {}
        for tree in trees:
            if tree.version == version:
                parents |= _parents_in(tree, name, limits)
        if parents:
            return GroupPool(limits=limits, parents=parents, version=version)
    return GroupPool(limits=limits, parents={}, version=0)


def _parents_in(tree: Hierarchy, name: str, limits: SandboxLimits) -> dict[str, Path]:
    for folder in _candidates(tree):
        path = folder / name
        try:
            if tree.version == 2:
                known = (folder / "cgroup.subtree_control").read_text().split()
                wanted = [one for one in tree.controllers if one in known]
                if "memory" not in wanted or "pids" not in wanted:
                    continue
            else:
                wanted = list(tree.controllers)
            path.mkdir()
        except OSError:
            continue
        try:
            if tree.version == 2:
                enable = " ".join(f"+{one}" for one in wanted)
                (path / "cgroup.subtree_control").write_text(enable)
            _try(path, wanted, tree.version, limits)
            return dict.fromkeys(wanted, path)
        except (OSError, subprocess.SubprocessError):
            remove_groups(path)
    return {}


def _candidates(tree: Hierarchy) -> Iterator[Path]:
    """The own group; under version 2 also those above it, since a group with processes in it can
    hand no controller on."""
    folder = Path(tree.own)
    yield folder
    while tree.version == 2 and str(folder) != tree.mount and folder != folder.parent:
        folder = folder.parent
        yield folder


def _try(path: Path, controllers: list[str], version: int, limits: SandboxLimits) -> None:
    """Make a group, limit it and let one process in; raises what the machine says against it."""
    group = Group(folders=dict.fromkeys(controllers, path / "try"), version=version)
    (path / "try").mkdir()
    set_limits(group, limits)
    shell = "".join(f"echo 0 >'{file}' || exit 1\n" for file in group.join_files)
    subprocess.run(
        ["/bin/sh", "-c", shell],
        check=True,
        timeout=_TRY_S,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (path / "try").rmdir()


def set_limits(group: Group, limits: SandboxLimits) -> None:
    """Write the limits. Files in memory count as memory, so their own bound comes on top."""
    # The file systems of a sandbox live in memory: /repo, /tmp and /dev/shm.
    in_memory_mib = limits.memory_mib + _TMP_AND_REPO * limits.disk_mib + _SHM_MIB
    memory_bytes = str(in_memory_mib << 20)
    folders, is_v2 = group.folders, group.version == 2
    if "memory" in folders:
        _write(
            folders["memory"] / ("memory.max" if is_v2 else "memory.limit_in_bytes"), memory_bytes
        )
        # Not every kernel counts swap.
        with contextlib.suppress(OSError):
            if is_v2:
                _write(folders["memory"] / "memory.swap.max", "0")
            else:
                _write(folders["memory"] / "memory.memsw.limit_in_bytes", memory_bytes)
    if "pids" in folders:
        _write(folders["pids"] / "pids.max", str(limits.pids + _OWN_PROCESSES))
    if "cpu" in folders and limits.cpus is not None:
        quota = str(max(1000, round(limits.cpus * _PERIOD_US)))
        if is_v2:
            _write(folders["cpu"] / "cpu.max", f"{quota} {_PERIOD_US}")
        else:
            _write(folders["cpu"] / "cpu.cfs_period_us", str(_PERIOD_US))
            _write(folders["cpu"] / "cpu.cfs_quota_us", quota)


def _write(path: Path, text: str) -> None:
    # One write, and no file is ever created: a controller's file that is not there is an error.
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def remove_groups(path: Path) -> int:
    """End every process below `path` and remove its folders; returns how many were ended."""
    ended: set[int] = set()
    deadline_s = time.monotonic() + _REMOVE_S
    while path.is_dir():
        for folder in sorted((found for found in path.rglob("*") if found.is_dir()), reverse=True):
            ended |= _end(folder)
            with contextlib.suppress(OSError):
                folder.rmdir()
        with contextlib.suppress(OSError):
            path.rmdir()
        if path.is_dir():
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.01)
    return len(ended)


def _end(folder: Path) -> set[int]:
    pids: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        pids = set(map(int, (folder / "cgroup.procs").read_text().split()))
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return pids


def group_name(run_id: str, worker: str) -> str:
    """A folder name that no run id can break out of."""
    return "rlmix-" + re.sub(r"[^A-Za-z0-9_-]", "_", f"{run_id}-{worker}")
