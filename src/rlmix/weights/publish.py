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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlmix.core.errors import WeightSyncError
from rlmix.weights.files import SHARD_BYTES, Written, write_files
from rlmix.weights.manifest import (
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    hash_file,
    read_manifest,
    verify_folder,
    write_manifest,
    write_synced,
)
from rlmix.weights.parts import StateParts, as_parts
from rlmix.weights.store import (
    finish_folder,
    newest_version,
    remove_folder,
    sweep_unfinished,
    version_dir,
)
from rlmix.weights.writers import ALONE, Writers

if TYPE_CHECKING:
    from torch import Tensor

    from rlmix.numerics.view_spec import ViewSpec
    from rlmix.weights.shipping import ShipReport

INDEX_FILE = "model.safetensors.index.json"

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
    seconds: float
    """Encoding and writing its files, of the slowest writer."""
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
            metrics[f"weights/{report.view}_s"] = report.seconds
        for shipped in self.shipped:
            metrics |= shipped.metrics()
        return metrics


def publish_version(
    state_bf16: "Mapping[str, Tensor] | StateParts",
    *,
    version: int,
    store: Path,
    views: "Sequence[str | ViewSpec]",
    model_files: Path,
    shard_bytes: int = SHARD_BYTES,
    writers: Writers = ALONE,
) -> PublishReport:
    """Write `<store>/<view>/v%06d/` for every view. Every writer calls it, and all raise the same.

    Args:
        state_bf16: tensors by their names in a Hugging Face checkpoint, CPU, bfloat16; of several
            writers each holds and encodes its share only, see `weights.files`.
        version: >= 0, at least the newest of each view.
        views: `bf16`, `fp8`, `nvfp4`, each once, with options as `numerics.view_spec` reads them
            (`nvfp4:experts`).
        model_files: folder with config.json, tokenizer and chat template; its weights are
            not read.
        shard_bytes: of BF16 tensors that go to one weight file; a tensor that is larger has one of
            its own.
    Raises:
        WeightSyncError: the version exists with other bytes, a newer one exists, or the model
            folder has no config.json.
        DataError: an unknown view, or weights that it cannot hold; the other views are
            published first.
    """
    from rlmix.numerics.view_spec import parse_view
    from rlmix.numerics.views import check_scope, split_names

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
    parts = as_parts(state_bf16)
    names = [name for part in parts.layout for name in split_names(part)]
    for spec in specs:
        check_scope(names, spec)
    places = [
        _Place(version=version, store=store, spec=spec, model_files=model_files) for spec in specs
    ]
    try:
        there = writers.first(lambda: [_begin(place) for place in places])
        written = write_files(
            parts,
            [(place.unfinished, _encoder(place.spec)) for place in places],
            shard_bytes=shard_bytes,
            writers=writers,
        )
        reports = writers.first(lambda: _finish_all(places, written, names, there))
    finally:
        # On a full disk the half of a version would be in the way of everything else.
        if writers.rank == 0:
            for place in places:
                shutil.rmtree(place.unfinished, ignore_errors=True)
    return PublishReport(version=version, views=reports, total_s=time.perf_counter() - started_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where one view of a version goes."""

    version: int
    store: Path
    spec: "ViewSpec"
    model_files: Path

    @property
    def final(self) -> Path:
        return version_dir(self.store, self.spec.view, self.version)

    @property
    def unfinished(self) -> Path:
        return self.final.with_name(f".new-{self.final.name}")

    @property
    def newest(self) -> int | None:
        return newest_version(self.store, self.spec.view)


def _begin(place: _Place) -> Manifest | None:
    """Make the folder to write into; returns the manifest of what is there already."""
    final, newest = place.final, place.newest
    final.parent.mkdir(parents=True, exist_ok=True)
    existing = _intact_manifest(final)
    if newest is not None and place.version < newest and existing is None:
        raise WeightSyncError(
            f"weights: version {place.version} of view {place.spec.view} comes after {newest}; "
            "versions only grow. A resumed run discards newer versions first"
        )
    sweep_unfinished(final.parent)
    place.unfinished.mkdir()
    return existing


def _finish_all(
    places: Sequence[_Place],
    written: Sequence[Written | Exception],
    names: Sequence[str],
    there: Sequence[Manifest | None],
) -> tuple[ViewReport, ...]:
    """Finish every view that can be; the first error of one that cannot is raised at the end."""
    reports, failures = [], []
    for place, found, existing in zip(places, written, there, strict=True):
        try:
            if isinstance(found, Exception):
                raise found
            reports.append(_finish(place, found, _facts(place.spec, names), existing))
        except Exception as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return tuple(reports)


def _finish(
    place: _Place, written: Written, facts: dict[str, Any], existing: Manifest | None
) -> ViewReport:
    """Add the side files and the manifest, and give the folder its name."""
    from rlmix.numerics.view_config import quantization_config

    view, version, final, unfinished = place.spec.view, place.version, place.final, place.unfinished
    newest = place.newest
    previous = None if newest is None else version_dir(place.store, view, newest)
    quantization = None if view == "bf16" else quantization_config(place.spec)
    contents = _side_files(place.model_files, quantization) | {INDEX_FILE: written.index}
    files = written.entries | _write_or_link(contents, folder=unfinished, previous=previous)
    manifest = Manifest(kind="weights", version=version, view=view, files=files, facts=facts)
    if existing is not None:
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
        seconds=written.seconds,
        was_there=existing is not None,
    )


def _intact_manifest(folder: Path) -> Manifest | None:
    """The manifest of a version whose files all agree with it. A damaged one counts as absent and
    is written again, so that a resumed run can repair its store."""
    try:
        return verify_folder(folder)
    except WeightSyncError:
        return None


def _encoder(spec: "ViewSpec") -> "Callable[[Mapping[str, Tensor]], dict[str, Tensor]]":
    from rlmix.numerics.views import encode_tensors, split_experts

    def plain(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
        # One matrix per expert, as engines read checkpoints: SGLang 0.5.23 skips fused names
        # without a word and computes NaN. Parts of one tensor are copied, for they share memory.
        return {n: t if n in tensors else t.clone() for n, t in split_experts(tensors)}

    return plain if spec.view == "bf16" else partial(encode_tensors, spec=spec)


def _facts(spec: "ViewSpec", names: Sequence[str]) -> dict[str, Any]:
    """What a reader of the manifest learns without opening a tensor."""
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
