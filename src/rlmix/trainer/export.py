"""A checkpoint's model as a folder of its own, for whoever loads Hugging Face folders.

Invariant: the folder is there as a whole or not at all, what stood at its place before is never
touched, and its files are those of the checkpoint, hashed against the manifest.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from rlmix.core.errors import ConfigError, WeightSyncError
from rlmix.trainer.checkpoint import (
    SHARDS,
    STATE_FILE,
    list_checkpoints,
    verify_checkpoint,
)
from rlmix.weights.manifest import Manifest, hash_file, sync_path


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What `export_checkpoint` wrote."""

    folder: Path
    step: int
    num_bytes: int


def export_checkpoint(checkpoints: Path, *, step: int | None, target: Path) -> Exported:
    """Copy the model, config, tokenizer and template of a checkpoint.

    Args:
        checkpoints: the run's folder of checkpoints.
        step: optimizer steps of the checkpoint; None takes the newest complete one.
        target: folder to make; its parent must be there.
    Raises:
        ConfigError: no such checkpoint, or it is damaged; the target exists or cannot be made.
    """
    source, manifest = _choose(checkpoints, step)
    if target.exists() or target.is_symlink():
        raise ConfigError(
            f"runs export: {target} exists and is not overwritten; name a folder that does not"
        )
    if not target.parent.is_dir():
        raise ConfigError(f"runs export: {target.parent} is no folder; make it first")
    unfinished = target.with_name(f".{target.name}.unfinished-{os.getpid()}")
    files = {
        name: entry
        for name, entry in manifest.files.items()
        if name != STATE_FILE and not name.startswith(f"{SHARDS}/")
    }
    try:
        unfinished.mkdir()
        for name, entry in files.items():
            shutil.copyfile(source / name, unfinished / name)
            if hash_file(unfinished / name) != entry:
                raise ConfigError(f"runs export: {source / name} changed while it was copied")
            sync_path(unfinished / name)
        sync_path(unfinished)
        # Refuses a folder that somebody has filled meanwhile.
        unfinished.rename(target)
        sync_path(target.parent)
    except OSError as error:
        raise ConfigError(
            f"runs export: {target} cannot be written: {error.strerror}; choose a folder with "
            "room that you may write to"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(
        folder=target,
        step=manifest.version,
        num_bytes=sum(entry.size_bytes for entry in files.values()),
    )


def _choose(checkpoints: Path, step: int | None) -> tuple[Path, Manifest]:
    there = {int(path.name.removeprefix("step_")): path for path in list_checkpoints(checkpoints)}
    wanted = [step] if step is not None else sorted(there, reverse=True)
    damage = ""
    for number in wanted:
        if number not in there:
            continue
        try:
            return there[number], verify_checkpoint(there[number])
        except WeightSyncError as error:
            damage = f" ({error})"
    steps = ", ".join(map(str, sorted(there))) or "none"
    asked = "complete" if step is None else f"of step {step}"
    raise ConfigError(
        f"runs export: {checkpoints} has no whole checkpoint {asked}{damage}; there are: {steps}"
    )
