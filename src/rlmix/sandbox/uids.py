"""User ids outside the sandbox: one per live sandbox when the worker is root.

Invariant: two live sandboxes of one worker never share an id, and workers of one machine draw from
different ranges.
"""

import os
from dataclasses import dataclass

from rlmix.core.errors import SandboxError

NUM_PER_WORKER = 1024
BASE = 1 << 30
"""Far above the ids that systems and container tools hand out."""
NOBODY = 65534


@dataclass(frozen=True, kw_only=True, slots=True)
class UidRange:
    first: int
    count: int


def uid_range(map_text: str | None = None, pid: int | None = None) -> UidRange | None:
    """The ids this process may give to its sandboxes; None when it is not root or has no other.

    Args:
        map_text: content of /proc/self/uid_map; in a rootless container few ids exist.
        pid: this worker's, which picks its share of the range.
    """
    if map_text is None:
        if os.geteuid() != 0:
            return None
        with open("/proc/self/uid_map") as file:
            map_text = file.read()
    spans = [(int(row.split()[0]), int(row.split()[2])) for row in map_text.splitlines()]
    share = (os.getpid() if pid is None else pid) % (1 << 20)
    wanted = UidRange(first=BASE + share * NUM_PER_WORKER, count=NUM_PER_WORKER)
    for start, count in spans:
        if start <= wanted.first and wanted.first + wanted.count <= start + count:
            return wanted
    for start, count in spans:
        if start <= NOBODY < start + count:
            return UidRange(first=NOBODY, count=1)
    return None


class UidPool:
    """Hands out ids; with a range of one, everybody gets that one."""

    def __init__(self, span: UidRange | None) -> None:
        self._shared = span.first if span is not None and span.count == 1 else None
        self._free = list(range(span.first, span.first + span.count)) if span is not None else []
        self.drops = span is not None

    def take(self) -> int | None:
        if not self.drops or self._shared is not None:
            return self._shared
        if not self._free:
            raise SandboxError(
                f"sandbox: {NUM_PER_WORKER} live sandboxes in one worker, all user ids are taken; "
                "lower session.concurrency"
            )
        return self._free.pop(0)

    def give_back(self, uid: int | None) -> None:
        if uid is not None and self._shared is None:
            self._free.append(uid)
