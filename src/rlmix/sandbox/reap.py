"""Removes what a run's sandboxes left behind when their worker had no chance to.

Processes are found by an environment variable that launchers and bubblewrap carry; killing those
ends everything inside them, because sandboxes die with their parent. Where control groups are in
use, each worker's folder lists them, and whoever is still in one is killed too.

`python -m rlmix.sandbox.reap RUN_ID SCRATCH_DIR` does it for a run whose driver was killed.
"""

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from rlmix.sandbox.cgroups import remove_groups
from rlmix.sandbox.link import RUN_MARK

GROUP_LIST = "groups"
ENGINE_LIST = "engine"
"""In a worker's folder: the client of the container engine it used."""
RUN_LABEL = "rlmix.run"
ENGINE_TIMEOUT_S = 60.0


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
    programs = {path.read_text().strip() for path in folder.glob(f"*/{ENGINE_LIST}")}
    num_containers = sum(remove_containers(program, run_id) for program in programs)
    remove_tree(folder)
    return len(pids) + num_in_groups + num_containers


def reap_command(run_id: str, scratch_dir: Path) -> list[str]:
    """What does `reap` in a process of its own."""
    return [sys.executable, "-m", "rlmix.sandbox.reap", run_id, str(scratch_dir)]


def remove_containers(program: str, run_id: str) -> int:
    """Remove the run's containers through the engine's client `program`; returns how many."""
    filters = ["--filter", f"label={RUN_LABEL}={run_id}"]
    try:
        listed = subprocess.run(
            [program, "ps", "--all", "--quiet", *filters],
            capture_output=True,
            text=True,
            timeout=ENGINE_TIMEOUT_S,
            check=True,
        )
        names = listed.stdout.split()
        if names:
            subprocess.run(
                [program, "rm", "--force", *names], capture_output=True, timeout=ENGINE_TIMEOUT_S
            )
    except (OSError, subprocess.SubprocessError):
        return 0  # The engine is gone, and its containers' requests ended with their clients.
    return len(names)


def reap_folders(scratch_dir: Path) -> int:
    """`reap` of every run that has a folder here; for the sole user of `scratch_dir`."""
    prefix = run_folder(scratch_dir, "").name
    found = [path.name.removeprefix(prefix) for path in scratch_dir.glob(f"{prefix}*")]
    return sum(reap(run_id, scratch_dir) for run_id in found)


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


if __name__ == "__main__":
    reap(sys.argv[1], Path(sys.argv[2]))
