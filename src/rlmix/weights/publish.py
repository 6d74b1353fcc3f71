"""Writes one policy version, once per weight view, as a complete model folder.

Who reads: replicas, which pull, verify and activate on their own; nobody waits for them here.
Invariants: each view is encoded from the trainer's BF16 state, never from another view; a view
that fails leaves its siblings alone; versions of a view only grow, and one that exists is
accepted again only with the same bytes.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmix.core.errors import WeightSyncError
from rlmix.weights.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    hash_file,
    read_manifest,
    sync_path,
    verify_folder,
    write_manifest,
    write_synced,
)
from rlmix.weights.store import (
    finish_folder,
    newest_version,
    remove_folder,
    sweep_unfinished,
    version_dir,
)

if TYPE_CHECKING:
    from torch import Tensor

    from rlmix.numerics.view_spec import ViewSpec
    from rlmix.weights.shipping import ShipReport

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

SHARD_BYTES = 5 * 10**9
"""Five gigabytes, as Hugging Face cuts checkpoints."""

STALE_QUANTIZATION = ("hf_quant_config.json",)
"""Files of a model folder that speak of its own quantisation, which a view does not have."""

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")
"""Weight files of the model folder would shadow ours in a loader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewReport:
    """One view of a published version."""

    view: str
    path: str
    total_bytes: int
    encode_s: float
    write_s: float
    was_there: bool
    """True: the same bytes had been published before, nothing was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishReport:
    """What `publish_version` did."""

    version: int
    views: tuple[ViewReport, ...]
    total_s: float
    shipped: "tuple[ShipReport, ...]" = ()
    """What went to a remote store, view by view."""

    def metrics(self) -> dict[str, float]:
        metrics = {"weights/version": float(self.version), "time/publish_s": self.total_s}
        for report in self.views:
            metrics[f"weights/{report.view}_bytes"] = float(report.total_bytes)
            metrics[f"weights/{report.view}_s"] = report.encode_s + report.write_s
        for shipped in self.shipped:
            metrics |= shipped.metrics()
        return metrics


def publish_version(
    state_bf16: Mapping[str, "Tensor"],
    *,
    version: int,
    store: Path,
    views: "Sequence[str | ViewSpec]",
    model_files: Path,
    shard_bytes: int = SHARD_BYTES,
) -> PublishReport:
    """Write `<store>/<view>/v%06d/` for every view.

    Args:
        state_bf16: tensors by their names in a Hugging Face checkpoint, CPU, bfloat16.
        version: >= 0, at least the newest of each view.
        views: `bf16`, `fp8`, `nvfp4`, each once, with options as `numerics.view_spec` reads them
            (`nvfp4:experts`).
        model_files: folder with config.json, tokenizer and chat template; its weights are
            not read.
        shard_bytes: largest weight file; a tensor that is larger has one of its own.
    Raises:
        WeightSyncError: the version exists with other bytes, a newer one exists, or the model
            folder has no config.json. Views before the failing one stay published.
        DataError: an unknown view, or weights that it cannot hold.
    """
    from rlmix.numerics.view_spec import parse_view

    started_s = time.perf_counter()
    specs = [parse_view(view) for view in views]
    if version < 0 or not specs or len({spec.view for spec in specs}) != len(specs):
        raise WeightSyncError(
            f"weights: version={version}, views={[str(spec) for spec in specs]}; a version is >= 0 "
            "and every view is named once"
        )
    if not (model_files / "config.json").is_file():
        raise WeightSyncError(
            f"weights: {model_files} has no config.json; model_files must be a Hugging Face folder"
        )
    reports = tuple(
        _publish_view(
            state_bf16,
            version=version,
            store=store,
            spec=spec,
            model_files=model_files,
            shard_bytes=shard_bytes,
        )
        for spec in specs
    )
    return PublishReport(version=version, views=reports, total_s=time.perf_counter() - started_s)


def _publish_view(
    state_bf16: Mapping[str, "Tensor"],
    *,
    version: int,
    store: Path,
    spec: "ViewSpec",
    model_files: Path,
    shard_bytes: int,
) -> ViewReport:
    view = spec.view
    final = version_dir(store, view, version)
    final.parent.mkdir(parents=True, exist_ok=True)
    newest = newest_version(store, view)
    existing = _intact_manifest(final)
    if newest is not None and version < newest and existing is None:
        raise WeightSyncError(
            f"weights: version {version} of view {view} comes after {newest}; versions only grow. "
            "A resumed run discards newer versions first"
        )
    sweep_unfinished(final.parent)
    encode_started_s = time.perf_counter()
    tensors, quantization = _encode(state_bf16, spec)
    write_started_s = time.perf_counter()
    unfinished = final.with_name(f".new-{final.name}-{os.getpid()}")
    unfinished.mkdir()
    files, index = write_tensors(tensors, unfinished, shard_bytes)
    previous = None if newest is None else version_dir(store, view, newest)
    contents = _side_files(model_files, quantization) | {INDEX_FILE: index}
    files |= _write_or_link(contents, folder=unfinished, previous=previous)
    manifest = Manifest(
        kind="weights", version=version, view=view, files=files, facts=_facts(spec, state_bf16)
    )
    if existing is not None:
        shutil.rmtree(unfinished)
        if not existing.same_content(manifest):
            changed = sorted(
                name
                for name in existing.files.keys() | files.keys()
                if existing.files.get(name) != files.get(name)
            )
            raise WeightSyncError(
                f"weights: version {version} of view {view} was published before with other bytes "
                f"({', '.join(changed)}); a version is immutable, publish the next number"
            )
    else:
        write_manifest(unfinished, manifest)
        if final.exists():
            remove_folder(final)
        finish_folder(unfinished, final)
    return ViewReport(
        view=view,
        path=str(final),
        total_bytes=manifest.total_bytes,
        encode_s=write_started_s - encode_started_s,
        write_s=time.perf_counter() - write_started_s,
        was_there=existing is not None,
    )


def _intact_manifest(folder: Path) -> Manifest | None:
    """The manifest of a version whose files all agree with it. A damaged one counts as absent and
    is written again, so that a resumed run can repair its store."""
    try:
        return verify_folder(folder)
    except WeightSyncError:
        return None


def _encode(
    state_bf16: Mapping[str, "Tensor"], spec: "ViewSpec"
) -> tuple[dict[str, "Tensor"], dict[str, Any] | None]:
    """(tensors to write, quantization_config for config.json)."""
    from rlmix.numerics.views import encode_view, split_experts

    if spec.view == "bf16":
        # One matrix per expert, as engines read checkpoints: SGLang 0.5.23 skips fused names
        # without a word and computes NaN. Parts of one tensor are copied, for they share memory.
        parts = split_experts(state_bf16)
        return {n: t if n in state_bf16 else t.clone() for n, t in parts}, None
    from rlmix.numerics.view_config import quantization_config

    return encode_view(state_bf16, spec), quantization_config(spec)


def _facts(spec: "ViewSpec", state_bf16: Mapping[str, "Tensor"]) -> dict[str, Any]:
    """What a reader of the manifest learns without opening a tensor."""
    from rlmix.numerics.views import split_names

    names = split_names(state_bf16)
    quantised = sum(spec.quantises(name) for name in names)
    return {
        "spec": str(spec),
        "format": spec.view,
        "convention": spec.convention,
        "scope": spec.scope if spec.view != "bf16" else "none",
        "four_over_six": spec.four_over_six,
        "quantised_matrices": quantised,
        "bf16_tensors": len(names) - quantised,
    }


def write_tensors(
    tensors: Mapping[str, "Tensor"], folder: Path, shard_bytes: int
) -> tuple[dict[str, FileEntry], bytes]:
    """Weight files of at most `shard_bytes` (or one tensor), on disk, and the index that names
    them, which is not written."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    held = total = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and held + size > shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += size
        total += size
    entries, weight_map = {}, {}
    for number, shard in enumerate(shards, start=1):
        file = WEIGHTS_FILE
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        sync_path(folder / file)
        entries[file] = hash_file(folder / file)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return entries, json.dumps(index, indent=2).encode()


def _side_files(model_files: Path, quantization: dict[str, Any] | None) -> dict[str, bytes]:
    """config.json with the view's quantisation, and tokenizer and template as they are. What the
    model folder says about its own quantisation is left out."""
    config = json.loads((model_files / "config.json").read_bytes())
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            section.pop("quantization_config", None)
            section.pop("compression_config", None)
    if quantization is not None:
        config["quantization_config"] = quantization
    contents = {"config.json": json.dumps(config, indent=2).encode()}
    for path in side_files(model_files):
        if path.name not in ("config.json", *STALE_QUANTIZATION):
            contents[path.name] = path.read_bytes()
    return contents


def side_files(model_folder: Path) -> list[Path]:
    """Config, tokenizer and template files of a Hugging Face folder: all but weights and the
    manifest, sorted by name."""
    return sorted(
        path
        for path in model_folder.iterdir()
        if path.is_file()
        and path.name != MANIFEST_NAME
        and not path.name.startswith(".")
        and not path.name.endswith(WEIGHT_SUFFIXES)
    )


def _write_or_link(
    contents: Mapping[str, bytes], *, folder: Path, previous: Path | None
) -> dict[str, FileEntry]:
    """Files that did not change since the previous version are hard-linked to it.

    Only links inside the store: a link into the user's model folder would let an edit there
    change a published version.
    """
    entries = {}
    for name, content in contents.items():
        target = folder / name
        source = None if previous is None else previous / name
        if source is not None and source.is_file() and source.read_bytes() == content:
            os.link(source, target)
        else:
            write_synced(target, content)
        entries[name] = hash_file(target)
    return entries


def published_views(store: Path, version: int) -> list[str]:
    """Views that have this version, sorted: what a resumed run can serve without publishing."""
    if not store.is_dir():
        return []
    return sorted(
        folder.name
        for folder in store.iterdir()
        if (version_dir(store, folder.name, version) / MANIFEST_NAME).is_file()
        and read_manifest(version_dir(store, folder.name, version)).version == version
    )
