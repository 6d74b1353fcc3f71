"""`rlmix doctor`: what this machine can and cannot do, each with its fix.

Tries things rather than guessing: a sandbox is really made, a port really bound.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rlmix.cli.answer import Answer, answered
from rlmix.cli.options import AsJson
from rlmix.core.errors import ExitCode, RlmixError

if TYPE_CHECKING:
    from rich.console import RenderableType

NEEDED_MEMORY_GIB = 10.0
"""A default run stays below this."""
NEEDED_DISK_GIB = 2.0
"""Checkpoints, weight versions and logs of a default run, with room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    ok: bool
    detail: str
    fix: str = ""
    is_needed: bool = True
    """False: nothing stops working without it."""


@answered
def doctor(as_json: AsJson = False) -> Answer:
    """What this machine can and cannot do, with the fix."""
    findings = [finding for look in LOOKS for finding in look()]
    can_train = all(finding.ok for finding in findings if finding.is_needed)
    return Answer(
        document={"can_train": can_train, "checks": [asdict(finding) for finding in findings]},
        view=lambda: _view(findings, can_train=can_train),
        code=ExitCode.GOOD if can_train else ExitCode.CHECK_FAILED,
    )


def _look_at_software() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(
        name="python",
        ok=sys.version_info >= (3, 11),
        detail=f"{version}, {sys.executable}",
        fix="install Python 3.11 or newer",
    )
    for package in ("torch", "transformers", "ray"):
        yield _installed(package, fix="run scripts/rlmix, which installs what is pinned")
    yield _look_at_sglang()


def _look_at_sglang() -> Finding:
    """In the environment that real servers start in, which is not this one."""
    from rlmix.loop.preflight import found_sglang

    python, is_there = found_sglang()
    return Finding(
        name="sglang",
        ok=is_there,
        detail=str(python) if is_there else f"not at {python}; pools can be emulated only",
        fix="run scripts/sglang-env (11 GB), or set sglang.python",
        is_needed=False,
    )


def _installed(package: str, *, fix: str, is_needed: bool = True) -> Finding:
    try:
        return Finding(name=package, ok=True, detail=metadata.version(package), is_needed=is_needed)
    except metadata.PackageNotFoundError:
        return Finding(name=package, ok=False, detail="not installed", fix=fix, is_needed=is_needed)


def _look_at_machine() -> Iterator[Finding]:
    import psutil

    cores = len(os.sched_getaffinity(0))
    yield Finding(
        name="cpu", ok=cores >= 2, detail=f"{cores} cores", fix="use 2 or more", is_needed=False
    )
    free_gib = psutil.virtual_memory().available / 2**30
    yield Finding(
        name="memory",
        ok=free_gib >= NEEDED_MEMORY_GIB,
        detail=f"{free_gib:.1f} GiB free",
        fix=f"free {NEEDED_MEMORY_GIB:g} GiB, or use fewer pools (pools=two)",
    )
    disk_gib = shutil.disk_usage(Path.cwd()).free / 2**30
    yield Finding(
        name="disk",
        ok=disk_gib >= NEEDED_DISK_GIB,
        detail=f"{disk_gib:.1f} GiB free in {Path.cwd()}",
        fix=f"free {NEEDED_DISK_GIB:g} GiB, or set run.dir to another disk",
    )
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    yield Finding(
        name="accelerators",
        ok=bool(gpus),
        detail=f"{len(gpus)} NVIDIA GPUs" if gpus else "none; pools are emulated on the CPU",
        fix="nothing: a default run needs none",
        is_needed=False,
    )


def _look_at_sandbox() -> Iterator[Finding]:
    import asyncio

    try:
        said = asyncio.run(_try_sandbox())
        yield Finding(name="sandbox", ok=True, detail=said)
    except RlmixError as error:
        yield Finding(
            name="sandbox",
            ok=False,
            detail=str(error),
            fix="as said",
        )


async def _try_sandbox() -> str:
    from rlmix.sandbox.backend import open_backend
    from rlmix.sandbox.protocol import SandboxLimits

    limits = SandboxLimits(
        memory_mib=512, pids=64, disk_mib=16, output_chars=400, command_timeout_s=10.0
    )
    with tempfile.TemporaryDirectory(prefix="rlmix-doctor-") as scratch:
        run_id = f"doctor{os.getpid()}"
        backend = await open_backend("auto", limits, Path(scratch), run_id, allow_weak=True)
        try:
            warnings = getattr(backend, "warnings", ())
            return "; ".join([f"isolated commands work ({backend.name})", *warnings])
        finally:
            await backend.close()


def _look_at_network() -> Iterator[Finding]:
    import socket

    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        yield Finding(name="loopback", ok=True, detail=f"127.0.0.1 serves (tried port {port})")
    except OSError as error:
        yield Finding(
            name="loopback", ok=False, detail=str(error), fix="bring up the loopback interface"
        )


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _look_at_software,
    _look_at_machine,
    _look_at_network,
    _look_at_sandbox,
)


def _view(findings: list[Finding], *, can_train: bool) -> "RenderableType":
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("", "what", "found", "fix"):
        table.add_column(name, overflow="fold")
    for finding in findings:
        good = ("ok", "green") if finding.ok else ("no", "red" if finding.is_needed else "yellow")
        table.add_row(Text(*good), finding.name, finding.detail, "" if finding.ok else finding.fix)
    verdict = "`rlmix train` can run here." if can_train else "`rlmix train` cannot run here yet."
    return Group(table, Text(verdict, style="bold"))
