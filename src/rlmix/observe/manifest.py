"""The facts of a run: what ran where, in how many attempts, and how each ended.

Invariant: one run keeps one `run_id` over all its attempts. An attempt without an end was either
still running when the file was read, or died without a chance to say so.
"""

import os
import platform
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as fields_of
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from rlmix.core.errors import DataError
from rlmix.core.schema_version import require_readable
from rlmix.observe.jsonl import write_atomically
from rlmix.observe.lock import Owner

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = "1.0"
"""Of the manifest, and by it of the files of a run that have no number of their own."""
PACKAGES = ("torch", "transformers", "ray", "numpy", "tokenizers", "safetensors", "sglang")
"""Their versions change numbers or scheduling; read from metadata, never imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One process's time with the run."""

    number: int
    """From 1."""
    owner: Owner
    argv: tuple[str, ...]
    started_s: float
    """Unix time."""
    from_step: int = 0
    """Optimizer steps that the attempt took over; 0 for a fresh run."""
    ended_s: float | None = None
    exit_reason: str | None = None
    """`finished`, `interrupted` or `failed`; None while it runs, or when it was killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    run_id: str
    """Durable over attempts; names the run at every sink."""
    name: str
    created_s: float
    """Unix time."""
    software: dict[str, Any]
    machine: dict[str, Any]
    attempts: tuple[Attempt, ...] = ()
    sinks: dict[str, str] = field(default_factory=dict)
    """What a sink needs to continue its own run, by sink name."""
    schema_version: str = SCHEMA_VERSION

    def with_attempt(self, attempt: Attempt) -> "Manifest":
        """Add the attempt, or replace the one of the same number."""
        others = tuple(known for known in self.attempts if known.number != attempt.number)
        return replace(self, attempts=(*others, attempt))

    def write(self, run_path: Path) -> None:
        write_atomically(
            run_path / MANIFEST_FILE, orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)
        )


def new_manifest(name: str) -> Manifest:
    return Manifest(
        run_id=uuid.uuid4().hex[:12],
        name=name,
        created_s=round(time.time(), 3),
        software=software_facts(),
        machine=machine_facts(),
    )


def read_manifest(run_path: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        VersionError: it is of another major version.
        DataError: there is none, or it is not one of ours.
    """
    path = run_path / MANIFEST_FILE
    try:
        fields = orjson.loads(path.read_bytes())
        require_readable(fields.get("schema_version"), known=SCHEMA_VERSION, where=path)
        attempts = tuple(_attempt(entry) for entry in fields.pop("attempts"))
        return Manifest(**_known(Manifest, fields), attempts=attempts)
    except FileNotFoundError:
        raise DataError(f"{run_path} is no run directory: it has no {MANIFEST_FILE}") from None
    except (orjson.JSONDecodeError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: not a manifest of rlmix ({error})") from error


def _attempt(entry: dict[str, Any]) -> Attempt:
    owner, argv = Owner(**_known(Owner, entry["owner"])), tuple(entry["argv"])
    return Attempt(**{**_known(Attempt, entry), "owner": owner, "argv": argv})


def _known(cls: type, entry: dict[str, Any]) -> dict[str, Any]:
    """Without what a newer minor version added."""
    names = {one.name for one in fields_of(cls)}
    return {name: value for name, value in entry.items() if name in names}


def software_facts() -> dict[str, Any]:
    """Versions of rlmix, Python and what computes; git revision of the checkout, if it is one."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "rlmix": metadata.version("rlmix"),
        "git": _git_revision(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": versions,
    }


def machine_facts() -> dict[str, Any]:
    import psutil

    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "arch": platform.machine(),
        "cpu_cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }


def _git_revision(folder: Path) -> dict[str, Any] | None:
    """Revision of the checkout that holds our code; None for an installed wheel."""
    if not any((parent / ".git").exists() for parent in folder.parents[:4]):
        return None
    try:
        revision = _git(folder, "rev-parse", "HEAD")
        return {
            "revision": revision,
            "is_dirty": bool(_git(folder, "status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=5,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


def command_line(argv: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(argv if argv is not None else sys.argv)
