"""Everything a run needs to continue, under one folder: `checkpoints/step_000012/`.

Model (Hugging Face safetensors, BF16), optimizer shards (`torch.distributed.checkpoint`: float32
masters and moments, random states) and the loop's own state share one folder and one manifest, so
they cannot come from different saves. Shards know where in the whole tensor they lie, so any number
of ranks reads what any other number wrote. Torch is imported inside functions, because the driver
looks for checkpoints without it.

Invariant: the manifest is written last and the folder gets its name in one rename; whoever kills
the writer at any instruction leaves the previous checkpoint as the newest complete one.
"""

import json
import re
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmix.core.errors import TrainerError, WeightSyncError
from rlmix.weights.files import HeldFiles
from rlmix.weights.manifest import (
    Manifest,
    hash_file,
    sync_path,
    verify_folder,
    write_manifest,
    write_synced,
)
from rlmix.weights.publish import INDEX_FILE, side_files
from rlmix.weights.store import finish_folder, remove_folder, sweep_unfinished
from rlmix.weights.writers import ALONE, Writers

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILE = "model.safetensors"
SHARDS = "shards"
"""Folder inside: what `torch.distributed.checkpoint` wrote."""
STATE_FILE = "state.json"

OPTIMIZER_PREFIX = "optimizer/"
RANDOM_PREFIX = "random/"

STEP_PATTERN = re.compile(r"step_(\d{6,})")

SIDE_FOLDER = "model_files"
"""Beside the checkpoints: the run's own copy of config, tokenizer and template files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint; tensors are read when they are asked for."""

    folder: Path
    step: int
    version: int
    """Policy version of the weights."""
    ranks: int
    """How many wrote it."""
    extra: dict[str, Any]
    """The loop's state: data order, work in flight, counters, what the alarms remember."""

    @property
    def optimizer(self) -> "dict[str, Tensor]":
        """Masters, moments and `num_steps`, whole, by `<kind>/<parameter>`."""
        import torch

        sizes = _shard_sizes(self.folder, OPTIMIZER_PREFIX)
        state = {name: torch.empty(size, dtype=dtype) for name, (size, dtype) in sizes.items()}
        _read_shards(self.folder, {f"{OPTIMIZER_PREFIX}{name}": t for name, t in state.items()})
        return state

    @property
    def has_moments(self) -> bool:
        """Whether the optimizer that was saved had more than masters, as AdamW has after a step."""
        names = _shard_sizes(self.folder, OPTIMIZER_PREFIX)
        return any(name != "num_steps" and not name.startswith("master/") for name in names)

    def read_optimizer_into(self, state: "Mapping[str, Tensor]") -> None:
        """Fill `state` in place; each rank reads no more than its shards (DTensors).

        Raises:
            TrainerError: a tensor has no place, or a place no tensor of its shape.
        """
        sizes = _shard_sizes(self.folder, OPTIMIZER_PREFIX)
        unknown, missing = sorted(sizes.keys() - state.keys()), sorted(state.keys() - sizes.keys())
        if unknown or missing:
            raise TrainerError(
                f"trainer: {self.folder} has optimizer tensors without a place: {unknown[:3]} "
                f"({len(unknown)}), and lacks {missing[:3]} ({len(missing)}); it was saved by "
                "another model or optimizer"
            )
        for name, tensor in state.items():
            if tuple(sizes[name][0]) != tuple(tensor.shape):
                raise TrainerError(
                    f"trainer: {self.folder}: {name} has the shape {tuple(sizes[name][0])}, the "
                    f"model needs {tuple(tensor.shape)}"
                )
        _read_shards(self.folder, {f"{OPTIMIZER_PREFIX}{name}": t for name, t in state.items()})

    @property
    def random_state(self) -> "Tensor":
        """uint8, torch's CPU generator on rank 0."""
        state = self.random_state_of(0)
        assert state is not None
        return state

    def random_state_of(self, rank: int) -> "Tensor | None":
        """That of another rank; None when fewer ranks wrote the checkpoint."""
        import torch

        name = f"{rank:05d}"
        sizes = _shard_sizes(self.folder, RANDOM_PREFIX)
        if name not in sizes:
            return None
        state = torch.empty(sizes[name][0], dtype=sizes[name][1])
        _read_shards(self.folder, {f"{RANDOM_PREFIX}{name}": state})
        return state


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    version: int,
    model_state: HeldFiles,
    model_files: Path,
    optimizer_state: "Mapping[str, Tensor]",
    random_state: "Tensor",
    extra: Mapping[str, Any],
    writers: Writers = ALONE,
) -> Path:
    """Write `<folder>/step_%06d/`; replaces a folder of the same step. Every rank calls it.

    Args:
        folder: the run's checkpoints folder, which all ranks see; made if it is not there.
        model_state: BF16, names as in a Hugging Face checkpoint; each rank writes its share.
        model_files: folder whose config, tokenizer and template files are copied.
        optimizer_state: on the CPU; DTensors where they are sharded, else alike on all ranks.
        random_state: uint8, torch's CPU generator on this rank.
        extra: JSON values only; only rank 0's is read.
    """
    final = folder / f"step_{step:06d}"
    unfinished = folder / f".new-{final.name}"
    if writers.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        sweep_unfinished(folder)
        unfinished.mkdir()
    writers.wait()
    tensors = {f"{OPTIMIZER_PREFIX}{name}": tensor for name, tensor in optimizer_state.items()}
    tensors[f"{RANDOM_PREFIX}{writers.rank:05d}"] = random_state
    _write_shards(unfinished / SHARDS, tensors, writers)
    written = model_state.write(unfinished, writers)
    if writers.rank != 0:
        return final
    if len(written.entries) > 1:
        write_synced(unfinished / INDEX_FILE, written.index)
    copy_side_files(model_files, unfinished)
    document = {"step": step, "version": version, "ranks": writers.size, "extra": dict(extra)}
    write_synced(unfinished / STATE_FILE, json.dumps(document, indent=1).encode())
    files = dict(written.entries)
    for path in sorted(p for p in unfinished.rglob("*") if p.is_file()):
        name = path.relative_to(unfinished).as_posix()
        if name not in files:
            sync_path(path)
            files[name] = hash_file(path)
    sync_path(unfinished / SHARDS)
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
    return (folder / STATE_FILE).is_file() or (folder / SHARDS).is_dir()


def list_checkpoints(folder: Path) -> list[Path]:
    """Folders named `step_NNNNNN`, oldest step first, complete or not."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if STEP_PATTERN.fullmatch(path.name)]
    return sorted(found, key=_step_of)


def newest_complete(folder: Path) -> Path | None:
    """The newest checkpoint whose every file agrees with its manifest; None when there is none.

    Raises:
        VersionError: it is of another major version. Going back to an older one would lose steps
            that are not damaged.
    """
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
    """Verify a checkpoint; the model itself is loaded from the same folder.

    Raises:
        TrainerError: damaged or not a checkpoint; says which file.
    """
    try:
        manifest = verify_checkpoint(folder)
    except WeightSyncError as error:
        raise TrainerError(f"trainer: cannot resume: {error}") from error
    document = json.loads((folder / STATE_FILE).read_bytes())
    return Checkpoint(
        folder=folder,
        step=manifest.version,
        version=int(document["version"]),
        ranks=int(document["ranks"]),
        extra=document["extra"],
    )


def _write_shards(folder: Path, tensors: "dict[str, Tensor]", writers: Writers) -> None:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        # It warns that nobody else takes part; with one rank that is so.
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(
            tensors,
            storage_writer=dcp.FileSystemWriter(folder, thread_count=1),
            process_group=writers.group,
            no_dist=writers.size == 1,
        )


def _read_shards(folder: Path, tensors: "dict[str, Tensor]") -> None:
    """Each process reads what it needs by itself: a broken rank cannot stop the others."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder / SHARDS), no_dist=True)


def _shard_sizes(folder: Path, prefix: str) -> dict[str, tuple[Any, Any]]:
    """Name without prefix -> (whole shape, dtype)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = dcp.FileSystemReader(folder / SHARDS).read_metadata()
    return {
        name.removeprefix(prefix): (entry.size, entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _step_of(path: Path) -> int:
    match = STEP_PATTERN.fullmatch(path.name)
    assert match is not None
    return int(match.group(1))
