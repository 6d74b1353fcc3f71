"""Looks twice a second at what the sandboxes of a backend without mounts hold, and stops those
that hold too much.

Fed by `add` and `remove`; the loop ends with `stop`. It is a bound with a delay: between two
looks a sandbox can go over by what the disk takes in half a second.

Invariant: a sandbox over its bound is stopped as long as it grows; one that shrinks is let be, so
that a command can clean up.
"""

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from rlmix.sandbox.confine import descendants
from rlmix.sandbox.protocol import SandboxLimits
from rlmix.sandbox.session import ShellSandbox

PERIOD_S = 0.5
MAX_ENTRIES = 200_000
"""More files than this are too many whatever their size."""
_TWO_FOLDERS = 2
"""disk_mib bounds the repository and the private folder, each."""


@dataclass(kw_only=True, slots=True)
class _Watched:
    sandbox: ShellSandbox
    has_memory_group: bool
    last_bytes: int = 0


class Watch:
    """Owns one task."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._limits = limits
        self._watched: dict[Path, _Watched] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._look_around(), name="sandbox watch")

    def add(self, sandbox: ShellSandbox, box: Path, *, has_memory_group: bool) -> None:
        self._watched[box] = _Watched(sandbox=sandbox, has_memory_group=has_memory_group)

    def remove(self, box: Path) -> None:
        self._watched.pop(box, None)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _look_around(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            for box, watched in list(self._watched.items()):
                used_bytes = await asyncio.to_thread(disk_bytes, box)
                allowed_bytes = _TWO_FOLDERS * self._limits.disk_mib << 20
                if used_bytes > max(allowed_bytes, watched.last_bytes):
                    watched.sandbox.stop(f"more than {self._limits.disk_mib} MiB of files")
                watched.last_bytes = used_bytes
                if not watched.has_memory_group and watched.sandbox.pid:
                    held = await asyncio.to_thread(resident_bytes, watched.sandbox.pid)
                    if held > self._limits.memory_mib << 20:
                        watched.sandbox.stop(f"more than {self._limits.memory_mib} MiB of memory")


def disk_bytes(folder: Path) -> int:
    """Bytes on disk of everything below `folder`; endless when there are too many entries."""
    total = entries = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            entries += 1
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(inner, name)).st_blocks * 512
        if entries > MAX_ENTRIES:
            return 1 << 62
    return total


def resident_bytes(root: int) -> int:
    """Memory of the processes below `root`; what two of them share counts twice."""
    pages = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError, IndexError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
