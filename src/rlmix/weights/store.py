"""The folder of published versions: `<store>/<view>/v000012/`.

Invariant: a folder under its final name is complete and never changes; everything unfinished or
on its way out has a name that starts with a dot and is ignored.
"""

import os
import re
import shutil
from collections.abc import Collection
from pathlib import Path

from rlmix.core.errors import WeightSyncError
from rlmix.weights.manifest import Manifest, sync_path, verify_folder

VERSION_PATTERN = re.compile(r"v(\d{6,})")


def version_dir(store: Path, view: str, version: int) -> Path:
    """Where a version lives, whether or not it exists."""
    return store / view / f"v{version:06d}"


def list_versions(store: Path, view: str) -> list[int]:
    """Complete versions of a view, oldest first. Only the presence of a manifest is checked."""
    folder = store / view
    if not folder.is_dir():
        return []
    versions = []
    for entry in folder.iterdir():
        match = VERSION_PATTERN.fullmatch(entry.name)
        if match and (entry / "manifest.json").is_file():
            versions.append(int(match.group(1)))
    return sorted(versions)


def newest_version(store: Path, view: str) -> int | None:
    """The highest complete version of a view; None when there is none yet."""
    versions = list_versions(store, view)
    return versions[-1] if versions else None


def verify_version(folder: Path) -> Manifest:
    """Hash every file of a version.

    Raises:
        WeightSyncError: anything is missing, damaged, or the folder's name and manifest disagree.
    """
    manifest = verify_folder(folder)
    match = VERSION_PATTERN.fullmatch(folder.name)
    if manifest.kind != "weights" or match is None or int(match.group(1)) != manifest.version:
        raise WeightSyncError(
            f"weights: {folder} holds {manifest.kind} of version {manifest.version}; the folder's "
            "name must be that version"
        )
    return manifest


def prune(store: Path, view: str, keep: int, *, spared: Collection[int] = ()) -> list[int]:
    """Delete all but the `keep` newest versions of a view; returns the deleted ones.

    `spared` versions stay too, e.g. because a replica that boots slowly is reading them.

    A version disappears under its name in one step, so a reader either finds all of it or none.
    Raises:
        WeightSyncError: keep is below 1.
    """
    if keep < 1:
        raise WeightSyncError(f"weights: keep={keep}; at least the newest version must stay")
    doomed = [found for found in list_versions(store, view)[:-keep] if found not in spared]
    for version in doomed:
        remove_folder(version_dir(store, view, version))
    return doomed


def discard_newer(store: Path, version: int) -> dict[str, list[int]]:
    """Delete what was published after `version`, in every view; returns {view: versions}.

    For a resume: a run that continues from an older checkpoint makes these numbers again, with
    other bytes. Only safe while no replica serves from the store.
    """
    discarded = {}
    for folder in sorted(store.iterdir()) if store.is_dir() else []:
        if not folder.is_dir() or folder.name.startswith("."):
            continue
        newer = [found for found in list_versions(store, folder.name) if found > version]
        for found in newer:
            remove_folder(version_dir(store, folder.name, found))
        if newer:
            discarded[folder.name] = newer
    return discarded


def remove_folder(folder: Path) -> None:
    """Rename away, then delete, so that the folder is never half there."""
    doomed = folder.with_name(f".gone-{folder.name}-{os.getpid()}")
    folder.rename(doomed)
    shutil.rmtree(doomed)


def finish_folder(unfinished: Path, final: Path) -> None:
    """Give a completely written folder its final name and make the name durable."""
    sync_path(unfinished)
    os.rename(unfinished, final)
    sync_path(final.parent)


def sweep_unfinished(folder: Path) -> None:
    """Delete what a killed writer or deleter left behind; call it only as the single writer."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name.startswith((".new-", ".gone-")) and entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
