#!/usr/bin/env python
"""Measures the number formats beside the packages that define them, on one CPU core.

    python scripts/bench_formats.py [--quick] [--json]

Rates are gigabytes of BF16 weights per CPU second of one thread, read when encoding and stood for
when decoding, so that a busy machine disturbs them little. nvidia-modelopt and compressed-tensors
are in the `dev` extra; where one is missing, its column stays empty.
"""

import argparse
import importlib.util
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import make_format_goldens as reference
import torch
from torch import Tensor

from rlmix.numerics import fp8, nvfp4

EXPERT, LARGE = (512, 2048), (4096, 4096)
"""A routed expert's matrix of Qwen3.6-35B-A3B, and one that no cache holds."""
ACTIVATION_ROWS = (1, 32, 256)
ACTIVATION_WIDTH = 2048
REPEATS, QUICK_REPEATS = 7, 3
"""Each rate is the best of so many: what disturbs a run only ever slows it down."""
PACKAGES = {"modelopt": "nvidia-modelopt", "compressed_tensors": "compressed-tensors"}

Codec = tuple[Callable[[Tensor], Any], Callable[[Any], Any] | None]
"""Encode a BF16 weight; decode what that gave (None: not measured)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One row: ours, and the package that does the same."""

    name: str
    ours: Codec
    rival: str | None = None
    """Module of the package; None where none does this on a CPU."""
    rival_codec: Codec | None = None


def dequantize(made: Any) -> Tensor:
    return made.dequantize()


def modelopt_nvfp4_decode(parts: reference.Parts) -> Tensor:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    packed = parts["packed"]
    shape = torch.Size((*packed.shape[:-1], packed.shape[-1] * 2))
    tensor = NVFP4QTensor(shape, torch.bfloat16, packed)
    return tensor.dequantize(
        dtype=torch.float32,
        scale=parts["block_scale"],
        double_scale=parts["tensor_scale"],
        block_sizes={-1: 16},
    )


def modelopt_fp8_decode(parts: reference.Parts) -> Tensor:
    from modelopt.torch.quantization.qtensor import FP8QTensor

    tensor = FP8QTensor(parts["data"].shape, torch.float32, parts["data"])
    return tensor.dequantize(scale=parts["scale"], block_sizes={-1: 128, -2: 128})


def compressed_decode(preset: str, names: dict[str, str]) -> Callable[[reference.Parts], Tensor]:
    def decode(parts: reference.Parts) -> Tensor:
        from compressed_tensors.compressors import FloatQuantizationCompressor
        from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
        from compressed_tensors.quantization import preset_name_to_scheme

        scheme = preset_name_to_scheme(preset, ["Linear"])
        kind = NVFP4PackedCompressor if preset == "NVFP4A16" else FloatQuantizationCompressor
        state = {name: parts[part] for name, part in names.items()}
        return kind.decompress(state, scheme)["weight"]

    return decode


NVFP4_NAMES = {
    "weight_packed": "packed",
    "weight_scale": "block_scale",
    "weight_global_scale": "tensor_scale",
}
FP8_NAMES = {"weight": "data", "weight_scale": "scale"}

FORMATS = (
    Format(
        name="nvfp4, modelopt",
        ours=(nvfp4.quantize, dequantize),
        rival="modelopt",
        rival_codec=(reference.modelopt_nvfp4, modelopt_nvfp4_decode),
    ),
    Format(
        name="nvfp4, compressed-tensors",
        ours=(lambda w: nvfp4.quantize(w, convention="compressed-tensors"), dequantize),
        rival="compressed_tensors",
        rival_codec=(reference.compressed_nvfp4, compressed_decode("NVFP4A16", NVFP4_NAMES)),
    ),
    Format(name="nvfp4, 4 over 6", ours=(lambda w: nvfp4.quantize(w, four_over_six=True), None)),
    Format(
        name="fp8 128x128",
        ours=(fp8.quantize_blocks, dequantize),
        rival="modelopt",
        rival_codec=(reference.modelopt_fp8_blocks, modelopt_fp8_decode),
    ),
    Format(
        name="fp8 128x128",
        ours=(fp8.quantize_blocks, dequantize),
        rival="compressed_tensors",
        rival_codec=(
            lambda w: reference.compressed_fp8(w, "FP8_BLOCK"),
            compressed_decode("FP8_BLOCK", FP8_NAMES),
        ),
    ),
    Format(
        name="fp8 128x128, power-of-two scales",
        ours=(lambda w: fp8.quantize_blocks(w, scales="ue8m0"), dequantize),
    ),
    Format(
        name="fp8 channel",
        ours=(fp8.quantize_channels, dequantize),
        rival="compressed_tensors",
        rival_codec=(
            lambda w: reference.compressed_fp8(w, "FP8_DYNAMIC"),
            compressed_decode("FP8_DYNAMIC", FP8_NAMES),
        ),
    ),
    Format(
        name="fp8 tensor",
        ours=(fp8.quantize_tensor, dequantize),
        rival="compressed_tensors",
        rival_codec=(
            lambda w: reference.compressed_fp8(w, "FP8"),
            compressed_decode("FP8", FP8_NAMES),
        ),
    ),
    Format(name="fp8 kv cache", ours=(fp8.fake_quantize_kv, None)),
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "fp8 1x128, float32 scales": fp8.fake_quantize_activations,
    "fp8 1x128, power-of-two scales": lambda x: fp8.fake_quantize_activations(x, "ue8m0"),
    "fp8 per token": lambda x: fp8.fake_quantize_activations(x, group=None),
    "nvfp4, tensor scale 1": nvfp4.fake_quantize_activations,
    "nvfp4, scale per token": lambda x: nvfp4.fake_quantize_activations(x, None),
}


def best_s(action: Callable[[], object], repeats: int, inner: int = 1) -> float:
    """Least CPU seconds of one action."""
    action()
    times = []
    for _ in range(repeats):
        started_s = time.process_time()
        for _ in range(inner):
            action()
        times.append((time.process_time() - started_s) / inner)
    return min(times)


def rates(codec: Codec, weight: Tensor, repeats: int) -> tuple[float, float | None]:
    """GB/s of encoding and decoding."""
    encode, decode = codec
    num_gb = weight.numel() * 2 / 1e9
    encode_gb_s = num_gb / best_s(lambda: encode(weight), repeats)
    if decode is None:
        return encode_gb_s, None
    made = encode(weight)
    return encode_gb_s, num_gb / best_s(lambda: decode(made), repeats)


def measure_weights(shape: tuple[int, int], repeats: int) -> list[dict[str, Any]]:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = []
    for row in FORMATS:
        ours = rates(row.ours, weight, repeats)
        theirs: tuple[float | None, float | None] = (None, None)
        if row.rival_codec and row.rival and importlib.util.find_spec(row.rival):
            theirs = rates(row.rival_codec, weight, min(repeats, 3))
        rows.append(
            {
                "format": row.name,
                "shape": list(shape),
                "encode_gb_s": ours[0],
                "decode_gb_s": ours[1],
                "other": PACKAGES[row.rival] if row.rival else None,
                "other_encode_gb_s": theirs[0],
                "other_decode_gb_s": theirs[1],
                "encode_ratio": ours[0] / theirs[0] if theirs[0] else None,
                "decode_ratio": ours[1] / theirs[1] if ours[1] and theirs[1] else None,
            }
        )
    return rows


def measure_activations(repeats: int) -> list[dict[str, Any]]:
    found = []
    for name, quantise in ACTIVATIONS.items():
        times_us = {}
        for rows in ACTIVATION_ROWS:
            values = torch.randn(rows, ACTIVATION_WIDTH)
            times_us[str(rows)] = best_s(lambda x=values, q=quantise: q(x), repeats, 50) * 1e6
        found.append({"activations": name, "width": ACTIVATION_WIDTH, "us_by_rows": times_us})
    return found


def machine() -> dict[str, Any]:
    installed = {name for module, name in PACKAGES.items() if importlib.util.find_spec(module)}
    return {
        "cpus": os.cpu_count(),
        "load_1min": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in ("torch", *sorted(installed))},
        "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def print_tables(result: dict[str, Any]) -> None:
    def cell(value: float | None, width: int, digits: int = 2) -> str:
        return " " * (width - 1) + "-" if value is None else f"{value:{width}.{digits}f}"

    print("GB/s of BF16 per CPU second, one thread")
    head = f"{'format':34}{'shape':>10}{'encode':>8}{'decode':>8}   {'other':19}"
    print(f"{head}{'encode':>8}{'decode':>8}{'ratio':>7}{'ratio':>7}")
    for row in result["weights"]:
        shape = "x".join(str(size) for size in row["shape"])
        print(
            f"{row['format']:34}{shape:>10}{cell(row['encode_gb_s'], 8)}"
            f"{cell(row['decode_gb_s'], 8)}   {row['other'] or '':19}"
            f"{cell(row['other_encode_gb_s'], 8, 3)}{cell(row['other_decode_gb_s'], 8, 3)}"
            f"{cell(row['encode_ratio'], 7, 1)}{cell(row['decode_ratio'], 7, 1)}"
        )
    print(f"\nmicroseconds for rows of {ACTIVATION_WIDTH}")
    print(f"{'activations':34}" + "".join(f"{rows:>9}" for rows in ACTIVATION_ROWS))
    for row in result["activations"]:
        times = "".join(f"{value:9.0f}" for value in row["us_by_rows"].values())
        print(f"{row['activations']:34}{times}")
    about = result["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    print(f"\nload {about['load_1min']:.1f} on {about['cpus']} cpus, {versions}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 60 s")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    repeats = QUICK_REPEATS if arguments.quick else REPEATS
    shapes = (EXPERT,) if arguments.quick else (EXPERT, LARGE)
    result = {
        "weights": [row for shape in shapes for row in measure_weights(shape, repeats)],
        "activations": measure_activations(repeats),
        "machine": machine(),
    }
    if arguments.json:
        print(json.dumps(result))
    else:
        print_tables(result)


if __name__ == "__main__":
    main()
