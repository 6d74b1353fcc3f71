"""Removes what a run's sandboxes left behind when their worker had no chance to.

Processes are found by an environment variable that launchers and bubblewrap carry; killing those
ends everything inside them, because sandboxes die with their parent. Where control groups are in
use, each worker's folder lists them, and whoever is still in one is killed too.
"""

import contextlib
import os
import shutil
import signal
import stat
from collections.abc import Iterable
from pathlib import Path

from rlmix.sandbox.cgroups import remove_groups
from rlmix.sandbox.link import RUN_MARK

GROUP_LIST = "groups"


def marked_processes(name: str, value: str) -> list[int]:
    """Process ids whose starting environment holds name=value, the caller's own excepted."""
    wanted = f"{name}={value}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            content = Path("/proc", entry, "environ").read_bytes()
            if wanted in content.split(b"\0"):
                found.append(int(entry))
    return found


def run_folder(scratch_dir: Path, run_id: str) -> Path:
    """Where all sandboxes of a run keep their files."""
    return scratch_dir / f"rlmix_sandboxes_{run_id}"


def reap(run_id: str, scratch_dir: Path) -> int:
    """Kill the run's sandbox processes and remove its folder; returns how many were killed.

    Call it when no worker of the run lives: before a resumed run starts, and at a run's end.
    """
    pids = marked_processes(RUN_MARK, run_id)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    num_in_groups = 0
    folder = run_folder(scratch_dir, run_id)
    for listed in folder.glob(f"*/{GROUP_LIST}"):
        for line in listed.read_text().splitlines():
            num_in_groups += remove_groups(Path(line))
    remove_tree(folder)
    return len(pids) + num_in_groups


def write_group_list(folder: Path, groups: Iterable[Path]) -> None:
    """Note the control groups of a worker beside its files, for whoever finds only those."""
    (folder / GROUP_LIST).write_text("".join(f"{path}\n" for path in dict.fromkeys(groups)))


def remove_tree(path: Path) -> None:
    """Remove a folder, also one whose owner took away the rights to its folders.

    Nothing may live that could still change it.
    """
    for folder, names, _ in os.walk(path):
        for name in names:
            inner = os.path.join(folder, name)
            mode = os.lstat(inner).st_mode
            if stat.S_ISDIR(mode) and mode & 0o700 != 0o700:
                with contextlib.suppress(OSError):
                    os.chmod(inner, 0o700)
    shutil.rmtree(path, ignore_errors=True)
