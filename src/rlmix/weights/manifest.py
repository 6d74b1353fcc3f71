"""The list of a folder's files with sizes and hashes; the folder is complete when it is there.

Invariant: the manifest is the last file written before the folder gets its final name, so a
folder without a readable manifest, or with a file that disagrees with it, is not a version.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from rlmix.core.errors import VersionError, WeightSyncError
from rlmix.core.schema_version import require_readable

MANIFEST_NAME = "manifest.json"
FORMAT = "rlmix-folder"
SCHEMA_VERSION = "1.0"
"""Of folders of weights and of checkpoints, with everything that rlmix itself puts into them."""

READ_BYTES = 1 << 22
"""Chunk size when hashing: large enough to be disk-bound, small enough to stay in cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of the folder."""

    size_bytes: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a complete folder holds."""

    kind: str
    """`weights` or `checkpoint`."""
    version: int
    """Policy version of weights, optimizer step of a checkpoint."""
    view: str
    """Weight view; `bf16` for a checkpoint."""
    files: dict[str, FileEntry]
    facts: dict[str, Any] = field(default_factory=dict)
    """Anything a reader may want without opening the tensors; JSON values only."""

    @property
    def total_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())

    @property
    def content(self) -> str:
        """One digest of the weight files, equal for equal bytes whatever the version is; of all
        files where there is no weight file."""
        weights = {n: e for n, e in self.files.items() if n.endswith(".safetensors")} or self.files
        text = "".join(f"{name}={weights[name].xxh3_128};" for name in sorted(weights))
        return xxhash.xxh3_128_hexdigest(text.encode())

    def same_content(self, other: "Manifest") -> bool:
        """True when every file has the same bytes, whatever the facts say."""
        return self.files == other.files


def hash_file(path: Path) -> FileEntry:
    """Size and xxh3-128 of a file's bytes."""
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return FileEntry(size_bytes=size_bytes, xxh3_128=digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write and fsync the manifest; call it after every other file is on disk."""
    document = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "kind": manifest.kind,
        "version": manifest.version,
        "view": manifest.view,
        "facts": manifest.facts,
        "files": {
            name: {"size_bytes": entry.size_bytes, "xxh3_128": entry.xxh3_128}
            for name, entry in sorted(manifest.files.items())
        },
    }
    write_synced(folder / MANIFEST_NAME, json.dumps(document, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """Parse the manifest without looking at the files.

    Raises:
        VersionError: of another major version. Not a damage: nobody may pass it over.
        WeightSyncError: missing, cut short, or not of this format.
    """
    path = folder / MANIFEST_NAME
    try:
        document = json.loads(path.read_bytes())
        if document["format"] != FORMAT:
            raise WeightSyncError(
                f"weights: {path} has format {document['format']!r}, this rlmix reads {FORMAT!r}"
            )
        require_readable(document.get("schema_version"), known=SCHEMA_VERSION, where=path)
        return Manifest(
            kind=document["kind"],
            version=int(document["version"]),
            view=document["view"],
            facts=document["facts"],
            files={
                name: FileEntry(size_bytes=int(e["size_bytes"]), xxh3_128=e["xxh3_128"])
                for name, e in document["files"].items()
            },
        )
    except FileNotFoundError as error:
        raise WeightSyncError(
            f"weights: {folder} has no {MANIFEST_NAME}; it was not finished, or is no version"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, (WeightSyncError, VersionError)):
            raise
        raise WeightSyncError(
            f"weights: {path} is damaged ({type(error).__name__}: {error})"
        ) from error


def verify_folder(folder: Path) -> Manifest:
    """Read every file and compare with the manifest.

    Raises:
        WeightSyncError: names the first file that is missing, has another size or other bytes.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size_bytes = path.stat().st_size
        except FileNotFoundError as error:
            raise WeightSyncError(
                f"weights: {folder} lacks {name}, which it should hold"
            ) from error
        if size_bytes != expected.size_bytes:
            raise WeightSyncError(
                f"weights: {path} has {size_bytes} bytes, the manifest says {expected.size_bytes}"
            )
        found = hash_file(path)
        if found != expected:
            raise WeightSyncError(
                f"weights: {path} has the hash {found.xxh3_128}, the manifest says "
                f"{expected.xxh3_128}; the file is damaged, publish or save again"
            )
    return manifest


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until its bytes are on disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """fsync a file or a directory that somebody else wrote."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
