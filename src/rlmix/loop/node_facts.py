"""What one machine says of itself: versions, accelerators, disks, sandboxes. Runs on that machine.

Tries things rather than guessing: a sandbox is made, a port bound, the shared folder written and
read. Every value is plain JSON. Invariant: no secret is read further than whether it is there, and
nothing stays behind.
"""

import asyncio
import json
import os
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rlmix.core.errors import RlmixError
from rlmix.engine.sglang.environment import is_being_made, is_runnable, sglang_python
from rlmix.plan.capabilities import SGLANG_VERSION

PACKAGES = ("rlmix", "torch", "transformers", "ray")
STORE_BYTES = 32 << 20
"""Written and read for the store's speed: enough to pass a cache of small writes, quick on a slow
network."""
BLOCK_BYTES = 4 << 20
HUB_LIMIT_S = 3.0
COMMAND_LIMIT_S = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAsk:
    """What is to be looked at, the same on every machine."""

    store: str
    """Folder that all machines of a run must see: that of all runs."""
    sglang_python: str | None
    """`sglang.python`; None: the default place on that machine."""
    sandbox: str
    """Backend."""
    marker: str = ""
    """Name of a file in `store` that the asking machine wrote; empty: none."""


def node_facts(ask: NodeAsk) -> dict[str, Any]:
    """Everything about this machine; takes a few seconds."""
    import psutil

    store = Path(ask.store)
    return {
        "host": socket.gethostname(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "sglang": sglang_facts(ask.sglang_python),
        "gpus": gpus(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_free_gib": round(psutil.virtual_memory().available / 2**30, 1),
        "scratch": {
            "path": tempfile.gettempdir(),
            "free_gib": round(shutil.disk_usage(tempfile.gettempdir()).free / 2**30, 1),
        },
        "store": store_facts(store, marker=ask.marker),
        "sandbox": sandbox_facts(ask.sandbox),
        "registry": registry_facts(os.environ, home=Path.home()),
        "hub": hub_facts(os.environ),
        "loopback": _loopback(),
    }


def sglang_facts(named: str | None) -> dict[str, Any]:
    """Of the environment that real servers start in; nothing in it is run."""
    python = sglang_python(named, version=SGLANG_VERSION, environ=os.environ)
    is_there = is_runnable(python) and not is_being_made(python)
    return {
        "python": str(python),
        "is_there": is_there,
        "version": installed_version(python, "sglang") if is_there else None,
    }


def installed_version(python: Path, package: str) -> str | None:
    """From the package's metadata beside an interpreter of a virtual environment."""
    pattern = f"lib/python3*/site-packages/{package}-*.dist-info"
    for folder in sorted(python.parent.parent.glob(pattern)):
        return folder.name.removeprefix(f"{package}-").removesuffix(".dist-info")
    return None


def gpus() -> list[dict[str, Any]]:
    """Accelerators as the driver itself reports them; none where there is no driver."""
    command = [
        "nvidia-smi", "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader,nounits",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(done.stdout)


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """One for each line `NAME, MIB, DRIVER`; a value that the driver does not know becomes None."""
    found = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == 3:
            name, memory, driver = parts
            mib = int(memory) if memory.isdecimal() else None
            found.append({"name": name, "memory_mib": mib, "driver": driver})
    return found


def store_facts(folder: Path, *, marker: str) -> dict[str, Any]:
    """Whether a folder is the shared one, may be written, and how fast it is, GB/s."""
    facts: dict[str, Any] = {
        "path": str(folder), "is_shared": None, "error": None, "free_gib": None,
        "write_gb_s": None, "read_gb_s": None,
    }  # fmt: skip
    if marker:
        facts["is_shared"] = (folder / marker).is_file()
        if not facts["is_shared"]:
            return facts
    is_new = not folder.exists()
    probe = folder / f".rlmix-doctor-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        facts["free_gib"] = round(shutil.disk_usage(folder).free / 2**30, 1)
        facts["write_gb_s"], facts["read_gb_s"] = _speeds(probe)
    except OSError as error:
        facts["error"] = f"{error.strerror or error}"
    finally:
        probe.unlink(missing_ok=True)
        if is_new and folder.is_dir():
            folder.rmdir()
    return facts


def _speeds(path: Path) -> tuple[float, float]:
    """Writing to the medium, and reading back with the page cache asked to forget."""
    block = os.urandom(BLOCK_BYTES)
    started_s = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(STORE_BYTES // BLOCK_BYTES):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written_s = time.perf_counter() - started_s
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started_s = time.perf_counter()
        while file.read(BLOCK_BYTES):
            pass
        read_s = time.perf_counter() - started_s
    return round(STORE_BYTES / written_s / 1e9, 3), round(STORE_BYTES / read_s / 1e9, 3)


def sandbox_facts(backend: str) -> dict[str, Any]:
    """A sandbox is opened as a run would, weak ones allowed so that their strength is told."""
    try:
        name, warnings = asyncio.run(_try_sandbox(backend))
    except RlmixError as error:
        return {"backend": None, "warnings": [], "error": str(error)}
    return {"backend": name, "warnings": warnings, "error": None}


async def _try_sandbox(backend: str) -> tuple[str, list[str]]:
    from rlmix.sandbox.backend import open_backend
    from rlmix.sandbox.protocol import SandboxLimits

    limits = SandboxLimits(
        memory_mib=512, pids=64, disk_mib=16, output_chars=400, command_timeout_s=10.0
    )
    with tempfile.TemporaryDirectory(prefix="rlmix-doctor-") as scratch:
        run_id = f"doctor{os.getpid()}"
        opened = await open_backend(backend, limits, Path(scratch), run_id, allow_weak=True)
        try:
            return opened.name, [str(text) for text in getattr(opened, "warnings", ())]
        finally:
            await opened.close()


def registry_facts(environ: Mapping[str, str], *, home: Path) -> dict[str, Any]:
    """Which container engines there are, and to how many registries this user is logged in."""
    files = {home / ".docker" / "config.json"}
    if folder := environ.get("DOCKER_CONFIG"):
        files.add(Path(folder) / "config.json")
    if folder := environ.get("XDG_RUNTIME_DIR"):
        files.add(Path(folder) / "containers" / "auth.json")
    if file := environ.get("REGISTRY_AUTH_FILE"):
        files.add(Path(file))
    logins: set[str] = set()
    for path in files:
        try:
            document = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        logins |= set(document.get("auths") or {}) | set(document.get("credHelpers") or {})
        if document.get("credsStore"):
            logins.add("the engine's credential store")
    return {
        "engines": [name for name in ("docker", "podman", "apptainer") if shutil.which(name)],
        "logins": len(logins),
    }


def hub_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """Whether the model hub can be reached, and whether a token for it is there (never which)."""
    import urllib.error
    import urllib.request

    from huggingface_hub import constants, get_token

    has_token = bool(get_token())
    if constants.HF_HUB_OFFLINE:
        return {"is_offline_mode": True, "is_reachable": None, "has_token": has_token}
    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        urllib.request.urlopen(request, timeout=HUB_LIMIT_S).close()
        is_reachable = True
    except urllib.error.HTTPError:
        is_reachable = True  # It answered.
    except (OSError, ValueError):
        is_reachable = False
    return {"is_offline_mode": False, "is_reachable": is_reachable, "has_token": has_token}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _loopback() -> str | None:
    """None when it serves, else why not."""
    try:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
    except OSError as error:
        return str(error)
    return None
