"""From the trainer's folder of versions into a remote store: deltas, and at times full snapshots.

Invariant: a delta is the difference of two published folders of one view, in the bytes of that
view; no view is ever made from one.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

from rlmix.core.errors import WeightSyncError
from rlmix.weights.delta import SUFFIX, encode_file
from rlmix.weights.manifest import MANIFEST_NAME, read_manifest
from rlmix.weights.publish import PublishReport
from rlmix.weights.remote import DELTA, FULL, RemoteStore
from rlmix.weights.store import list_versions, version_dir

WEIGHTS_SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShipReport:
    """One version of one view, sent."""

    view: str
    version: int
    base: int | None
    """Version that the delta starts from; None: only a full snapshot was sent."""
    delta_bytes: int
    """All that a replica with the base has to read; 0 without a delta."""
    full_bytes: int
    """Of the full snapshot, 0 without one."""
    num_elements: int
    num_changed: int
    encode_s: float
    write_s: float

    def metrics(self) -> dict[str, float]:
        name = f"weights/{self.view}"
        found = {
            f"{name}_delta_bytes": float(self.delta_bytes),
            f"{name}_full_bytes": float(self.full_bytes),
            f"{name}_encode_s": self.encode_s,
            f"{name}_send_s": self.write_s,
        }
        if self.base is not None:
            found[f"{name}_changed_frac"] = self.num_changed / max(self.num_elements, 1)
        return found


def ship_version(
    store: Path, view: str, version: int, *, remote: RemoteStore, full_every: int, keep: int
) -> ShipReport:
    """Send a published version.

    Args:
        store: the trainer's folder of versions; the one before should still be there.
        full_every: versions from one full snapshot to the next, at least 1.
        keep: newest versions that stay in the remote store, with what they are made of.
    Raises:
        WeightSyncError: the version is not published here, is there with other bytes, or the store
            cannot be written.
    """
    folder = version_dir(store, view, version)
    manifest = read_manifest(folder)
    there = remote.versions(view)
    if there and there[-1] > version:
        raise WeightSyncError(
            f"weights: {remote.url} holds version {there[-1]} of view {view}, after {version}; "
            "versions only grow. A resumed run discards newer versions first"
        )
    local = list_versions(store, view)
    base = max((n for n in there if n < version and n in local), default=None)
    started_s = time.perf_counter()
    num_bytes = remote.write_target(view, version, (folder / MANIFEST_NAME).read_bytes())
    delta = None if base is None else _encode(version_dir(store, view, base), folder)
    encode_s = time.perf_counter() - started_s
    whole = manifest.total_bytes
    delta_bytes = full_bytes = 0
    if delta is not None and delta.num_bytes < whole:
        delta_bytes = num_bytes + remote.write(
            view, version, kind=DELTA, base=base, files=delta.files
        )
    fulls = remote.full_versions(view)
    if not delta_bytes or not fulls or version - fulls[-1] >= full_every:
        files = {name: folder / name for name in manifest.files}
        full_bytes = num_bytes + remote.write(view, version, kind=FULL, base=None, files=files)
    remote.prune(view, keep)
    return ShipReport(
        view=view,
        version=version,
        base=base if delta_bytes else None,
        delta_bytes=delta_bytes,
        full_bytes=full_bytes,
        num_elements=0 if delta is None else delta.num_elements,
        num_changed=0 if delta is None else delta.num_changed,
        encode_s=encode_s,
        write_s=time.perf_counter() - started_s - encode_s,
    )


def ship_report(
    report: PublishReport, store: Path, *, url: str, full_every: int, keep: int
) -> PublishReport:
    """Send every view that was published; the report with what was sent. An empty `url` sends
    nothing. Errors as of `ship_version`."""
    if not url:
        return report
    started_s = time.perf_counter()
    remote = RemoteStore(url)
    shipped = tuple(
        ship_version(
            store, view.view, report.version, remote=remote, full_every=full_every, keep=keep
        )
        for view in report.views
    )
    total_s = report.total_s + time.perf_counter() - started_s
    return replace(report, shipped=shipped, total_s=total_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FolderDelta:
    files: dict[str, bytes]
    num_elements: int
    num_changed: int

    @property
    def num_bytes(self) -> int:
        return sum(len(data) for data in self.files.values())


def _encode(old: Path, new: Path) -> _FolderDelta | None:
    """Deltas of the weight files, and the other files that changed; None: nothing in common."""
    before, after = read_manifest(old).files, read_manifest(new).files
    files: dict[str, bytes] = {}
    num_elements = num_changed = 0
    for name, entry in after.items():
        if before.get(name) == entry:
            continue
        if not name.endswith(WEIGHTS_SUFFIX):
            files[name] = (new / name).read_bytes()
            continue
        found = encode_file(old / name, new / name) if name in before else None
        if found is None:
            return None
        files[name + SUFFIX] = found.data
        num_elements += found.num_elements
        num_changed += found.num_changed
    return _FolderDelta(files=files, num_elements=num_elements, num_changed=num_changed)
