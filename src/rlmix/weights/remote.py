"""Published versions in a store that fsspec knows: a folder, memory, S3 and others.

    <url>/bf16/v000012/target.json              what the version's folder must hold, with hashes
    <url>/bf16/v000012/delta/...  delta.json    the change from an older version
    <url>/bf16/v000012/full/...   full.json     the whole folder, every few versions

Invariants: `delta.json` and `full.json` are written after everything they name; they carry sizes
and hashes, and nothing is used that does not agree with them. Versions are immutable. One writer,
any number of readers; a reader needs nothing from anybody.
"""

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from rlmix.core.errors import WeightSyncError
from rlmix.weights.manifest import FileEntry
from rlmix.weights.store import VERSION_PATTERN

TARGET, DELTA, FULL = "target.json", "delta", "full"
ATTEMPTS = 2
"""A file that arrives damaged is read once more: the store may be right and the way was not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """One way to get a version: its change from `base`, or all of it."""

    kind: str
    """`delta` or `full`."""
    version: int
    base: int | None
    """Version that a delta is applied to; None for a full snapshot."""
    files: Mapping[str, FileEntry]

    @property
    def num_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())


class RemoteStore:
    """One run's versions below a URL. Blocking; errors of the store are WeightSyncErrors."""

    def __init__(self, url: str) -> None:
        """
        Raises:
            WeightSyncError: nothing here speaks the URL's protocol; says what to install.
        """
        import fsspec

        self.url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise WeightSyncError(
                f"weights.store={url}: {error}; install what it needs (s3://: pip install "
                "'rlmix[s3]'), or use a folder that all machines see"
            ) from error
        self._is_local = "file" in _protocols(self._fs)

    def write(
        self,
        view: str,
        version: int,
        *,
        kind: str,
        base: int | None,
        files: Mapping[str, "bytes | Path"],
    ) -> int:
        """Put one way to get a version there, its description last; returns the bytes written."""
        folder = self._folder(view, version)
        entries: dict[str, Any] = {}
        total = 0
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            self._put(posixpath.join(folder, kind, name), data)
            entries[name] = {"size_bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
            total += len(data)
        document = {"version": version, "base": base, "files": entries}
        described = json.dumps(document, indent=1).encode()
        self._put(posixpath.join(folder, f"{kind}.json"), described)
        return total + len(described)

    def write_target(self, view: str, version: int, manifest: bytes) -> int:
        """The manifest that the version's folder will have; returns its size.

        Raises:
            WeightSyncError: the version is there with another one.
        """
        there = self.target(view, version)
        if there is not None and there != manifest:
            raise WeightSyncError(
                f"weights: {self.url} holds version {version} of view {view} with other bytes; a "
                "version is immutable, publish the next number"
            )
        if there is None:
            self._put(posixpath.join(self._folder(view, version), TARGET), manifest)
        return len(manifest)

    def target(self, view: str, version: int) -> bytes | None:
        """The version's manifest as it was written; None when there is no such version."""
        return self._get(posixpath.join(self._folder(view, version), TARGET))

    def offers(self, view: str, version: int) -> list[Offer]:
        """The ways to get a version, none when it is not there."""
        found = []
        for kind in (DELTA, FULL):
            path = posixpath.join(self._folder(view, version), f"{kind}.json")
            text = self._get(path)
            if text is None:
                continue
            try:
                document = json.loads(text)
                found.append(
                    Offer(
                        kind=kind,
                        version=int(document["version"]),
                        base=document["base"],
                        files={name: FileEntry(**e) for name, e in document["files"].items()},
                    )
                )
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise WeightSyncError(f"weights: {path} is damaged: {error}") from error
        return found

    def read(self, offer: Offer, view: str, name: str) -> bytes:
        """One file of an offer.

        Raises:
            WeightSyncError: it is not there, or has other bytes than the description says.
        """
        path = posixpath.join(self._folder(view, offer.version), offer.kind, name)
        found = None
        for _ in range(ATTEMPTS):
            data = self._get(path)
            if data is None:
                continue
            found = FileEntry(size_bytes=len(data), xxh3_128=xxhash.xxh3_128_hexdigest(data))
            if found == offer.files[name]:
                return data
        if found is None:
            raise WeightSyncError(f"weights: {path} is missing in {self.url}")
        raise WeightSyncError(
            f"weights: {path} has {found.size_bytes} bytes with the hash {found.xxh3_128}, "
            f"{offer.kind}.json says {offer.files[name].size_bytes} and "
            f"{offer.files[name].xxh3_128}; it is damaged"
        )

    def versions(self, view: str) -> list[int]:
        """Versions that can be got in some way, oldest first."""
        self._fs.invalidate_cache()
        folder = posixpath.join(self._root, view)
        try:
            names = [posixpath.basename(path.rstrip("/")) for path in self._fs.ls(folder, False)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise WeightSyncError(f"weights: {self.url} cannot be listed: {error}") from error
        numbers = [int(m.group(1)) for name in names if (m := VERSION_PATTERN.fullmatch(name))]
        return sorted(n for n in numbers if self._has(view, n))

    def full_versions(self, view: str) -> list[int]:
        """Versions with a full snapshot, oldest first."""
        return [n for n in self.versions(view) if self._exists(view, n, f"{FULL}.json")]

    def remove(self, view: str, version: int) -> None:
        """Descriptions first, so that a reader finds all of a version or none."""
        folder = self._folder(view, version)
        try:
            for name in (f"{DELTA}.json", f"{FULL}.json", TARGET):
                if self._exists(view, version, name):
                    self._fs.rm_file(posixpath.join(folder, name))
            self._fs.rm(folder, recursive=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise WeightSyncError(f"weights: {folder} cannot be removed: {error}") from error
        self._fs.invalidate_cache()

    def prune(self, view: str, keep: int) -> list[int]:
        """Remove all but the newest `keep` versions and what these are made of: the newest full
        snapshot that is not younger than the oldest of them, and all after it."""
        versions = self.versions(view)
        if len(versions) <= keep:
            return []
        oldest = versions[-keep]
        start = max((n for n in self.full_versions(view) if n <= oldest), default=versions[0])
        doomed = [n for n in versions if n < start]
        for version in doomed:
            self.remove(view, version)
        return doomed

    def discard_newer(self, version: int) -> dict[str, list[int]]:
        """As `store.discard_newer`, here."""
        self._fs.invalidate_cache()
        try:
            views = [posixpath.basename(p.rstrip("/")) for p in self._fs.ls(self._root, False)]
        except FileNotFoundError:
            return {}
        discarded = {}
        for view in sorted(views):
            newer = [found for found in self.versions(view) if found > version]
            for found in newer:
                self.remove(view, found)
            if newer:
                discarded[view] = newer
        return discarded

    def _has(self, view: str, version: int) -> bool:
        return any(self._exists(view, version, f"{kind}.json") for kind in (DELTA, FULL))

    def _exists(self, view: str, version: int, name: str) -> bool:
        return bool(self._fs.exists(posixpath.join(self._folder(view, version), name)))

    def _folder(self, view: str, version: int) -> str:
        return posixpath.join(self._root, view, f"v{version:06d}")

    def _put(self, path: str, data: bytes) -> None:
        """The whole file or none of it: object stores do that, a folder needs a rename."""
        try:
            self._fs.makedirs(posixpath.dirname(path), exist_ok=True)
            if self._is_local:
                self._fs.pipe_file(path + ".part", data)
                Path(path + ".part").replace(path)
            else:
                self._fs.pipe_file(path, data)
        except OSError as error:
            raise WeightSyncError(f"weights: {path} cannot be written: {error}") from error

    def _get(self, path: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise WeightSyncError(f"weights: {path} cannot be read: {error}") from error


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
