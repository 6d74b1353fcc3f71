"""Everything a run needs to continue, under one folder: `checkpoints/step_000012/`.

Model (Hugging Face safetensors, BF16), optimizer (float32 masters and moments), random state and
the loop's own state share one folder and one manifest, so they cannot come from different saves.
Torch is imported inside functions, because the driver looks for checkpoints without it.

Invariant: the manifest is written last and the folder gets its name in one rename; whoever kills
the writer at any instruction leaves the previous checkpoint as the newest complete one.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmix.core.errors import TrainerError, WeightSyncError
from rlmix.weights.manifest import (
    Manifest,
    hash_file,
    sync_path,
    verify_folder,
    write_manifest,
    write_synced,
)
from rlmix.weights.publish import side_files
from rlmix.weights.store import finish_folder, remove_folder, sweep_unfinished

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"

STEP_PATTERN = re.compile(r"step_(\d{6,})")

SIDE_FOLDER = "model_files"
"""Beside the checkpoints: the run's own copy of config, tokenizer and template files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint, read back."""

    folder: Path
    step: int
    optimizer: dict[str, "Tensor"]
    random_state: "Tensor"
    """uint8, torch's CPU generator."""
    version: int
    """Policy version of the weights."""
    extra: dict[str, Any]
    """The loop's state: data cursor, counters."""


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    version: int,
    model_state: Mapping[str, "Tensor"],
    model_files: Path,
    optimizer_state: Mapping[str, "Tensor"],
    random_state: "Tensor",
    extra: Mapping[str, Any],
) -> Path:
    """Write `<folder>/step_%06d/`; replaces a folder of the same step.

    Args:
        folder: the run's checkpoints folder; made if it is not there.
        model_state: BF16, names as in a Hugging Face checkpoint.
        model_files: folder whose config, tokenizer and template files are copied.
        extra: JSON values only.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    sweep_unfinished(folder)
    final = folder / f"step_{step:06d}"
    unfinished = folder / f".new-{final.name}-{os.getpid()}"
    unfinished.mkdir()
    save_file(dict(model_state), unfinished / MODEL_FILE, metadata={"format": "pt"})
    tensors = {f"optimizer/{name}": t.contiguous() for name, t in optimizer_state.items()}
    save_file({**tensors, "random/torch": random_state}, unfinished / OPTIMIZER_FILE)
    copy_side_files(model_files, unfinished)
    document = {"step": step, "version": version, "extra": dict(extra)}
    write_synced(unfinished / STATE_FILE, json.dumps(document, indent=1).encode())
    files = {}
    for path in sorted(unfinished.iterdir()):
        sync_path(path)
        files[path.name] = hash_file(path)
    write_manifest(
        unfinished,
        Manifest(kind="checkpoint", version=step, view="bf16", files=files),
    )
    if final.exists():
        remove_folder(final)
    finish_folder(unfinished, final)
    return final


def copy_side_files(source: Path, target: Path) -> None:
    """Copy what a model folder holds besides weights; the loop's state file stays behind."""
    target.mkdir(parents=True, exist_ok=True)
    for path in side_files(source):
        if path.name != STATE_FILE:
            shutil.copyfile(path, target / path.name)


def verify_checkpoint(folder: Path) -> Manifest:
    """Hash every file.

    Raises:
        WeightSyncError: not a checkpoint, unfinished, or damaged; names the file.
    """
    manifest = verify_folder(folder)
    if manifest.kind != "checkpoint" or STATE_FILE not in manifest.files:
        raise WeightSyncError(f"checkpoint: {folder} holds {manifest.kind}, not a checkpoint")
    return manifest


def is_checkpoint(folder: Path) -> bool:
    """True for a folder that `save_checkpoint` made, damaged or not; False for a plain model."""
    return (folder / STATE_FILE).is_file() or (folder / OPTIMIZER_FILE).is_file()


def list_checkpoints(folder: Path) -> list[Path]:
    """Folders named `step_NNNNNN`, oldest step first, complete or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP_PATTERN.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint whose every file agrees with its manifest; None when there is none."""
    for path in reversed(list_checkpoints(folder)):
        try:
            verify_checkpoint(path)
        except WeightSyncError:
            continue
        return path
    return None


def prune_checkpoints(folder: Path, keep: int) -> list[Path]:
    """Delete older complete checkpoints than the newest `keep`; returns the deleted ones.

    Damaged ones are left for a person to look at and do not count as kept.
    """
    if keep < 1:
        raise TrainerError(f"checkpoint: keep={keep}; at least the newest must stay")
    complete = [path for path in list_checkpoints(folder) if (path / "manifest.json").is_file()]
    for path in complete[:-keep]:
        remove_folder(path)
    return complete[:-keep]


def load_checkpoint(folder: Path) -> Checkpoint:
    """Verify and read a checkpoint; the model itself is loaded from the same folder.

    Raises:
        TrainerError: damaged or not a checkpoint; says which file.
    """
    from safetensors.torch import load_file

    try:
        manifest = verify_checkpoint(folder)
    except WeightSyncError as error:
        raise TrainerError(f"trainer: cannot resume: {error}") from error
    document = json.loads((folder / STATE_FILE).read_bytes())
    tensors = load_file(folder / OPTIMIZER_FILE)
    random_state = tensors.pop("random/torch")
    return Checkpoint(
        folder=folder,
        step=manifest.version,
        optimizer={name.removeprefix("optimizer/"): t for name, t in tensors.items()},
        random_state=random_state,
        version=int(document["version"]),
        extra=document["extra"],
    )


def _step_of(path: Path) -> int:
    match = STEP_PATTERN.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))
