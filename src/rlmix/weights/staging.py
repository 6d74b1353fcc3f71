"""A machine's own copy of published versions, made from a remote store in the background.

Engines load whole folders, so a delta is applied here, to the copy of the version before.
Invariant: a folder under its final name has the bytes of the trainer's folder; every file is hashed
while it is written and compared with the manifest that the trainer wrote. Processes of one machine
that want the same version wait for the one that fetches it.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlmix.core.errors import WeightSyncError
from rlmix.weights.delta import SUFFIX, apply_file
from rlmix.weights.manifest import (
    MANIFEST_NAME,
    FileEntry,
    hash_file,
    read_manifest,
    write_synced,
)
from rlmix.weights.remote import DELTA, Offer, RemoteStore
from rlmix.weights.store import finish_folder, prune, remove_folder, version_dir

KEEP = 3
"""Newest copies of a view that stay: one that is served, one that is being loaded, and a base."""

LOOK_S = 0.1
"""How often a process looks whether another has finished fetching."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageReport:
    """A version that now lies in a folder of this machine."""

    folder: Path
    version: int
    pull_bytes: int
    """Read from the store by this call; 0 when the copy was there."""
    pull_s: float
    apply_s: float
    """Decoding, hashing and writing."""
    steps: tuple[str, ...]
    """What it was made of in order, e.g. `full 8`, `delta 9`."""
    refused: tuple[str, ...]
    """What was damaged on the way there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Way:
    """Offers to take in order, from a copy that is there or from a full snapshot."""

    offers: tuple[Offer, ...]

    @property
    def num_bytes(self) -> int:
        return sum(offer.num_bytes for offer in self.offers)


class _BadBase(WeightSyncError):
    """What a delta was applied to is not what it should be."""


class Stager:
    """Brings versions of one run into `folder`, which belongs to this machine and this run."""

    def __init__(self, remote: RemoteStore, folder: Path, *, limit_s: float) -> None:
        self._remote = remote
        self._folder = folder
        self._limit_s = limit_s
        self._pulled = 0
        self._pull_s = 0.0

    def bring(self, view: str, version: int) -> StageReport:
        """Make sure that `<folder>/<view>/v%06d` is there, by the way with the fewest bytes.

        Raises:
            WeightSyncError: the version is not in the store, every way to it is damaged, or another
                process of this machine has not finished within the limit.
        """
        (self._folder / view).mkdir(parents=True, exist_ok=True)
        started_s = time.monotonic()
        self._pulled, self._pull_s = 0, 0.0
        with self._alone(view, version):
            started_alone_s = time.monotonic()
            steps, refused = self._bring(view, version)
            prune(self._folder, view, KEEP, spared=(version,))
            ended_s = time.monotonic()
        return StageReport(
            folder=version_dir(self._folder, view, version),
            version=version,
            pull_bytes=self._pulled,
            pull_s=self._pull_s + (started_alone_s - started_s),
            apply_s=ended_s - started_alone_s - self._pull_s,
            steps=steps,
            refused=refused,
        )

    def _bring(self, view: str, version: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        refused: list[str] = []
        if self._is_staged(view, version):
            return (), ()
        bad: set[tuple[str, int]] = set()
        suspected: set[tuple[str, int]] = set()
        while True:
            ways = self._ways(view, version, bad)
            if not ways:
                why = f": {'; '.join(refused)}" if refused else ""
                raise WeightSyncError(
                    f"weights: {self._remote.url} has no whole way to version {version} of view "
                    f"{view}{why}; a full snapshot comes with one of the next versions"
                )
            way = min(ways, key=lambda way: way.num_bytes)
            for offer in way.offers:
                try:
                    self._take(view, offer)
                except _BadBase as error:
                    # The copy below is gone now; the same delta gets one chance on another one.
                    refused.append(str(error))
                    key = (offer.kind, offer.version)
                    (bad if key in suspected else suspected).add(key)
                    break
                except WeightSyncError as error:
                    refused.append(str(error))
                    bad.add((offer.kind, offer.version))
                    break
            else:
                return tuple(f"{o.kind} {o.version}" for o in way.offers), tuple(refused)

    def _ways(self, view: str, version: int, bad: set[tuple[str, int]]) -> list[_Way]:
        """Every way from a copy or a full snapshot to `version` along the chain of deltas."""
        ways: list[_Way] = []
        after: tuple[Offer, ...] = ()
        at: int | None = version
        while at is not None:
            offers = {offer.kind: offer for offer in self._remote.offers(view, at)}
            offers = {k: o for k, o in offers.items() if (k, o.version) not in bad}
            full, delta = offers.get("full"), offers.get(DELTA)
            if full is not None:
                ways.append(_Way(offers=(full, *after)))
            if delta is None or delta.base is None or delta.base >= at:
                break
            after = (delta, *after)
            at = delta.base
            if self._is_staged(view, at):
                ways.append(_Way(offers=after))
                break
        return ways

    def _is_staged(self, view: str, version: int) -> bool:
        """Whether the copy that is there is this attempt's: a resumed run makes numbers again."""
        folder = version_dir(self._folder, view, version)
        if not (folder / MANIFEST_NAME).is_file():
            return False
        if (folder / MANIFEST_NAME).read_bytes() == self._remote.target(view, version):
            return True
        remove_folder(folder)
        return False

    def _take(self, view: str, offer: Offer) -> None:
        """Make the folder of one version from an offer.

        Raises:
            WeightSyncError: the offer, or the copy that it starts from, is damaged.
        """
        final = version_dir(self._folder, view, offer.version)
        manifest_bytes = self._remote.target(view, offer.version)
        if manifest_bytes is None:
            raise WeightSyncError(f"weights: version {offer.version} has no manifest in the store")
        unfinished = final.with_name(f".new-{final.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        write_synced(unfinished / MANIFEST_NAME, manifest_bytes)
        base = None if offer.base is None else version_dir(self._folder, view, offer.base)
        for name, expected in read_manifest(unfinished).files.items():
            found: FileEntry | str = self._file(view, offer, base, name, unfinished / name)
            if found != expected:
                what = (
                    f"weights: {name} of version {offer.version}, made from {offer.kind} "
                    f"{offer.version}, is {found}, the manifest says {expected}"
                )
                if base is None:
                    raise WeightSyncError(what)
                # The delta's own bytes were right, so the copy below it must be damaged.
                remove_folder(base)
                raise _BadBase(what)
        if final.exists():
            remove_folder(final)
        finish_folder(unfinished, final)

    def _file(
        self, view: str, offer: Offer, base: Path | None, name: str, target: Path
    ) -> "FileEntry | str":
        """Write one file of the new folder; returns what was written, or why that was impossible
        with the copy in `base`."""
        if name in offer.files:
            write_synced(target, self._read(view, offer, name))
            return hash_file(target)
        if base is None:
            raise WeightSyncError(f"weights: full {offer.version} lacks {name}")
        if name + SUFFIX in offer.files:
            data = self._read(view, offer, name + SUFFIX)
            try:
                return apply_file(base / name, data, target)
            except WeightSyncError as error:
                return f"not to be had ({error})"
        try:
            os.link(base / name, target)
        except OSError as error:
            return f"not to be had ({error})"
        return hash_file(target)

    def _read(self, view: str, offer: Offer, name: str) -> bytes:
        started_s = time.monotonic()
        data = self._remote.read(offer, view, name)
        self._pull_s += time.monotonic() - started_s
        self._pulled += len(data)
        return data

    @contextmanager
    def _alone(self, view: str, version: int) -> Iterator[None]:
        """Only one process of the machine fetches a view; the lock goes with its process."""
        deadline_s = time.monotonic() + self._limit_s
        with (self._folder / view / ".fetching").open("w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise WeightSyncError(
                            f"weights: another process of this machine has been fetching view "
                            f"{view} for {self._limit_s:g} s, and version {version} waits"
                        ) from None
                    time.sleep(LOOK_S)
            yield
