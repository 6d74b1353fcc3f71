#!/usr/bin/env python
"""Measures what a new version of the weights costs: real AdamW steps at a learning rate of 1e-6,
every version published in every view, sent as a delta, and rebuilt on the other side.

    python scripts/bench_weights.py [--quick] [--json] [--versions N] [--model smollm2|random]

`smollm2` is SmolLM2-135M-Instruct where `scripts/smollm2_exact.py` has prepared it; `random` is a
dense model of 4.5 M parameters at its usual initialisation. Texts are pages of docs/. The path is
that of a run: `publish_version`, `ship_version` into a folder, `Stager.bring` out of it.

The entropy of a change, in bytes, is computed here and not by the codec. Every element's change is
its distance in representable values of its format, and `entropy` is n times the empirical entropy
of that distance over all n elements of the view: positions and values together, what an ideal coder
pays that knows their frequencies and nothing else. `entropy_given_exponent` is the same for each
exponent of the old element by itself, which a reader has: a stricter measure, since small weights
move and large ones do not. Rates are CPU seconds of one thread, reading and hashing included.
"""

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import zstandard

from rlmix.weights.delta import read_header
from rlmix.weights.manifest import read_manifest
from rlmix.weights.publish import publish_version
from rlmix.weights.remote import RemoteStore
from rlmix.weights.shipping import ship_version
from rlmix.weights.staging import Stager
from rlmix.weights.store import prune, verify_version, version_dir

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = Path.home() / ".cache" / "rlmix" / "smollm2-135m-instruct"
LEARNING_RATE = 1e-6
BETAS = (0.9, 0.95)
TOKENS = 64
"""Of one step: how much moves is decided by AdamW, which makes every step as large as the rate."""
RIVAL_VERSIONS = 2
FULL_EVERY = 1000
FORMATS = {"BF16": (16, 7), "F8_E4M3": (8, 3), "U8": (4, 0)}
"""Data type of safetensors -> bits of an element, and where its exponent starts."""
VIEWS = ("bf16", "fp8", "nvfp4")


def random_model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


class Training:
    """AdamW on float32 masters; the forward computes in float32 with their BF16 roundings."""

    def __init__(self, name: str, side_files: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
        if name == "smollm2":
            from transformers import AutoTokenizer

            self.model: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32)
            tokens = AutoTokenizer.from_pretrained(SMOLLM2)(text[:200_000])["input_ids"]
            self._ids = torch.tensor(tokens)
        else:
            self.model = random_model()
            self._ids = torch.tensor([ord(a) % 64 * 64 + ord(b) % 64 for a, b in pairwise(text)])
        self._masters = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self._optimizer = torch.optim.AdamW(
            self._masters.values(), lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, foreach=False
        )
        self._round()
        self._step = 0
        config = {**self.model.config.to_dict(), "dtype": "bfloat16"}
        (side_files / "config.json").write_text(json.dumps(config, default=str))

    @property
    def num_parameters(self) -> int:
        return sum(master.numel() for master in self._masters.values())

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self._masters[name].bfloat16())

    def step(self) -> None:
        begin = self._step * TOKENS
        ids = self._ids[begin : begin + TOKENS][None]
        self.model(input_ids=ids, labels=ids).loss.backward()
        for name, parameter in self.model.named_parameters():
            self._masters[name].grad = parameter.grad
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        self._optimizer.step()
        self._round()
        self._step += 1

    def state(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().bfloat16() for n, p in self.model.named_parameters()}


def words(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(data type, elements) of every tensor whose elements are counted."""
    for file in sorted(folder.glob("*.safetensors")):
        content = np.memmap(file, dtype=np.uint8, mode="r")
        for place in read_header(file)[1]:
            raw = np.asarray(content[place.begin : place.end])
            if place.dtype == "BF16":
                yield place.dtype, np.frombuffer(raw.tobytes(), dtype=np.uint16)
            elif place.dtype == "F8_E4M3":
                yield place.dtype, raw
            elif place.dtype == "U8":
                yield place.dtype, np.concatenate([raw & 15, raw >> 4])


def rank_of(codes: np.ndarray, bits: int) -> np.ndarray:
    """Place among the representable values, minus zero below zero."""
    wide = codes.astype(np.int64)
    sign = 1 << (bits - 1)
    return np.where(wide < sign, wide, sign - 1 - wide)


def entropy_of(counts: np.ndarray) -> float:
    """n times the empirical entropy, in bytes."""
    found = counts[counts > 0].astype(np.float64)
    return float(-(found * np.log2(found / found.sum())).sum()) / 8


def entropies(old: Path, new: Path) -> dict[str, float]:
    """Sums over the data types of a view."""
    counts: dict[str, dict[int, np.ndarray]] = {}
    num_elements = num_changed = 0
    for (dtype, before), (_, after) in zip(words(old), words(new), strict=True):
        bits, shift = FORMATS[dtype]
        span = 1 << (bits + 1)
        change = rank_of(after, bits) - rank_of(before, bits) + span // 2
        exponent = ((before & ((1 << (bits - 1)) - 1)) >> shift).astype(np.int64)
        held = counts.setdefault(dtype, {})
        for value in np.unique(exponent):
            found = np.bincount(change[exponent == value], minlength=span)
            held[int(value)] = held.get(int(value), 0) + found
        num_elements += len(before)
        num_changed += int(np.count_nonzero(before != after))
    return {
        "elements": num_elements,
        "changed_frac": num_changed / num_elements,
        "entropy_bytes": sum(
            entropy_of(np.sum(list(held.values()), axis=0)) for held in counts.values()
        ),
        "entropy_given_exponent_bytes": sum(
            entropy_of(found) for held in counts.values() for found in held.values()
        ),
    }


def rivals(old: Path, new: Path) -> dict[str, dict[str, float]]:
    """What else could be sent for the BF16 view: bytes and CPU seconds."""
    before = np.concatenate([w for _, w in words(old)])
    after = np.concatenate([w for _, w in words(new)])

    def xor_planes() -> bytes:
        planes = (before ^ after).view(np.uint8).reshape(-1, 2).T
        return zstandard.ZstdCompressor(level=9).compress(np.ascontiguousarray(planes))

    def sparse() -> bytes:
        places = np.flatnonzero(before != after)
        gaps = np.diff(places, prepend=0).astype(np.uint32).view(np.uint8).reshape(-1, 4).T
        values = (after[places] - before[places]).view(np.uint8).reshape(-1, 2).T
        raw = np.ascontiguousarray(gaps).tobytes() + np.ascontiguousarray(values).tobytes()
        return zstandard.ZstdCompressor(level=9).compress(raw)

    def whole() -> bytes:
        return zstandard.ZstdCompressor(level=3).compress(after.tobytes())

    found = {}
    for name, encode in (("xor_planes_zstd9", xor_planes), ("gaps_values_zstd9", sparse),
                         ("whole_zstd3", whole)):  # fmt: skip
        started_s = time.process_time()
        size = len(encode())
        found[name] = {"bytes": size, "encode_cpu_s": time.process_time() - started_s}
    return found


def measure(name: str, num_versions: int, views: tuple[str, ...], scratch: Path) -> dict[str, Any]:
    side = scratch / "side"
    side.mkdir()
    training = Training(name, side)
    store, remote = scratch / "store", RemoteStore(str(scratch / "remote"))
    stager = Stager(remote, scratch / "staged", limit_s=60.0)
    rows: list[dict[str, Any]] = []
    others: list[dict[str, dict[str, float]]] = []
    for version in range(num_versions + 1):
        if version:
            training.step()
        publish_version(
            training.state(), version=version, store=store, views=views, model_files=side
        )
        for view in views:
            started_s = time.process_time()
            sent = ship_version(
                store, view, version, remote=remote, full_every=FULL_EVERY, keep=num_versions + 2
            )
            encode_cpu_s = time.process_time() - started_s
            started_s = time.process_time()
            staged = stager.bring(view, version)
            apply_cpu_s = time.process_time() - started_s
            folder = version_dir(store, view, version)
            if read_manifest(folder).files != verify_version(staged.folder).files:
                raise SystemExit(f"version {version} of {view} was not rebuilt bit for bit")
            if version == 0:
                continue
            old, full = version_dir(store, view, version - 1), read_manifest(folder).total_bytes
            row = {
                "version": version, "view": view, "full_bytes": full,
                "published_bytes": sent.delta_bytes, **entropies(old, folder),
                "encode_cpu_s": encode_cpu_s, "apply_cpu_s": apply_cpu_s,
            }  # fmt: skip
            row["of_full"] = sent.delta_bytes / full
            row["of_entropy"] = sent.delta_bytes / row["entropy_bytes"]
            row["of_entropy_given_exponent"] = (
                sent.delta_bytes / row["entropy_given_exponent_bytes"]
            )
            rows.append(row)
            if view == "bf16" and version <= RIVAL_VERSIONS:
                others.append(rivals(old, folder))
        for view in views:
            prune(store, view, 2)
        if version:
            print(line(rows[-len(views)]), file=sys.stderr, flush=True)
    return {
        "model": name,
        "parameters": training.num_parameters,
        "learning_rate": LEARNING_RATE,
        "tokens_per_step": TOKENS,
        "versions": num_versions,
        "bit_identical": True,
        "views": {view: summary([row for row in rows if row["view"] == view]) for view in views},
        "rivals": {
            key: {
                "bytes": mean([other[key]["bytes"] for other in others]),
                "encode_cpu_s": mean([other[key]["encode_cpu_s"] for other in others]),
            }
            for key in others[0]
        },
        "rows": rows,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    keys = ("full_bytes", "published_bytes", "changed_frac", "of_full", "of_entropy",
            "of_entropy_given_exponent", "encode_cpu_s", "apply_cpu_s")  # fmt: skip
    found = {key: mean([row[key] for row in rows]) for key in keys}
    for key in ("of_full", "of_entropy", "of_entropy_given_exponent"):
        found[f"{key}_max"] = max(row[key] for row in rows)
    for what in ("encode", "apply"):
        found[f"{what}_mb_per_cpu_s"] = found["full_bytes"] / 1e6 / found[f"{what}_cpu_s"]
    return found


def mean(values: list[float]) -> float:
    return float(np.mean(values))


def line(row: dict[str, Any]) -> str:
    return (
        f"version {row['version']:>2} {row['view']}: {100 * row['changed_frac']:.2f} % changed, "
        f"{row['published_bytes'] / 1e3:,.0f} KB = {100 * row['of_full']:.2f} % of a full copy, "
        f"{row['of_entropy']:.3f} x entropy, {row['of_entropy_given_exponent']:.3f} x given the "
        "exponent"
    )


def report(found: dict[str, Any]) -> str:
    lines = [
        f"{found['model']}, {found['parameters'] / 1e6:.1f} M parameters, {found['versions']} "
        f"versions, AdamW at {found['learning_rate']:g}; every version rebuilt bit for bit",
        "view   changed   published        of full   x entropy  (max)  x given exponent (max)  "
        "encode  apply MB/cpu-s",
    ]
    for view, row in found["views"].items():
        given, most = row["of_entropy_given_exponent"], row["of_entropy_given_exponent_max"]
        lines.append(
            f"{view:<6} {100 * row['changed_frac']:>6.2f} %"
            f" {row['published_bytes'] / 1e3:>9,.0f} KB"
            f" {100 * row['of_full']:>9.2f} % {row['of_entropy']:>10.3f}"
            f" ({row['of_entropy_max']:.3f}) {given:>11.3f} ({most:.3f})"
            f"      {row['encode_mb_per_cpu_s']:>8.0f} {row['apply_mb_per_cpu_s']:>6.0f}"
        )
    ours = found["views"]["bf16"]["published_bytes"]
    for name, rival in found["rivals"].items():
        lines.append(
            f"  {name}: {rival['bytes'] / 1e3:,.0f} KB, {rival['bytes'] / ours:.1f} times ours, "
            f"{rival['encode_cpu_s']:.1f} cpu-s"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the random model, under 60 s")
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--model", choices=("smollm2", "random"), default=None)
    parser.add_argument("--views", default=",".join(VIEWS))
    arguments = parser.parse_args()
    has_weights = (SMOLLM2 / "model.safetensors").is_file()
    name = arguments.model or ("smollm2" if has_weights and not arguments.quick else "random")
    if name == "smollm2" and not has_weights:
        raise SystemExit(f"{SMOLLM2} is not there; run scripts/smollm2_exact.py first")
    views = ("bf16",) if arguments.quick else tuple(arguments.views.split(","))
    scratch = Path(tempfile.mkdtemp(prefix="rlmix-bench-weights-"))
    try:
        found = measure(name, arguments.versions, views, scratch)
    finally:
        shutil.rmtree(scratch)
    found["machine"] = {"python": platform.python_version(), "torch": torch.__version__,
                        "cores": os.cpu_count()}  # fmt: skip
    print(json.dumps(found) if arguments.json else report(found))


if __name__ == "__main__":
    main()
