#!/usr/bin/env python
"""Writes the golden bytes of the number formats, made by the packages that define them.

    pip install nvidia-modelopt==0.47.0 compressed-tensors==0.20.1
    python scripts/make_format_goldens.py

Nothing of rlmix takes part: inputs are made here, outputs come from the packages, both go into
tests/unit/numerics/goldens.json. The tests compare with that file everywhere, and with the
packages themselves where they are installed.
"""

import argparse
import base64
import json
import warnings
import zlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TARGET = Path(__file__).parents[1] / "tests" / "unit" / "numerics" / "goldens.json"
PACKAGES = ("nvidia-modelopt", "compressed-tensors", "torch")

Parts = dict[str, Tensor]


def inputs() -> dict[str, Tensor]:
    """Name -> bfloat16 [N, K]."""
    generator = torch.Generator().manual_seed(2026)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    largest, smallest = torch.finfo(torch.bfloat16).max, torch.finfo(torch.bfloat16).tiny
    cases = {
        "random": normal(16, 64),
        "wide": normal(16, 64) * (normal(16, 64) * 3).exp(),
        "rows of other sizes": normal(32, 48) * torch.logspace(-6, 2, 32)[:, None],
        # Repeats, so that the file stays small.
        "ragged": normal(13, 20).repeat(10, 10) * torch.linspace(0.1, 3, 130)[:, None].round(),
        "partial": normal(3, 20),
        "ties": _ties(),
        "zero blocks": torch.cat((normal(2, 32), torch.zeros(2, 32), normal(2, 32)), dim=1),
        "signed zeros": torch.tensor([[-0.0, 0.0, 1.0, -1.0] * 4, [-1e-6, 1e-6, -0.0, 3.0] * 4]),
        "an outlier": torch.cat((normal(4, 31) * 1e-3, torch.full((4, 1), 300.0)), dim=1),
        "blocks that vanish": normal(4, 64) * torch.tensor([1.0, 1e-5, 1e-10, 1e-20])[:, None],
        "large": normal(4, 32).clamp(-1, 1) * largest,
        "small": normal(4, 32) * smallest * 1e6,
        "zeros": torch.zeros(2, 16),
        "one value": torch.full((2, 16), 0.7),
    }
    return {name: values.bfloat16() for name, values in cases.items()}


def _ties() -> Tensor:
    """Every tie of E2M1 and some of E4M3, and their BF16 neighbours, under scales of 2^k."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]).bfloat16()
    around = torch.cat((ties, *((ties.view(torch.int16) + by).view(ties.dtype) for by in (1, -1))))
    rows = []
    for scale in (448.0, 2.0, 0.5, 2.0**-6):
        for start in (0, 7, 14):
            values = around[start : start + 7].float()
            row = torch.cat((torch.tensor([6.0, 0.0]), values, -values))
            rows.append(row * scale)
    return torch.stack(rows)


def modelopt_nvfp4(weight: Tensor) -> Parts:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    quantised, block_scale, tensor_scale = NVFP4QTensor.quantize(weight.clone(), 16)
    return {
        "packed": quantised._quantized_data,
        "block_scale": block_scale,
        "tensor_scale": tensor_scale.reshape(1),
    }


def modelopt_fp8_blocks(weight: Tensor) -> Parts:
    """On float32: from BF16 this function makes BF16 scales, which no checkpoint holds."""
    from modelopt.torch.quantization.qtensor import FP8QTensor

    quantised, scale = FP8QTensor.quantize(weight.float(), block_sizes={-1: 128, -2: 128})
    return {"data": quantised._quantized_data, "scale": scale}


def compressed_nvfp4(weight: Tensor) -> Parts:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    low, high = torch.aminmax(weight.float())
    tensor_scale = generate_gparam(low, high)
    groups = weight.float().unflatten(-1, (-1, 16))
    scale, _ = calculate_qparams(
        groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=tensor_scale
    )
    parts = {"weight": weight, "weight_scale": scale, "weight_global_scale": tensor_scale}
    made = NVFP4PackedCompressor.compress(parts, scheme)
    return {
        "packed": made["weight_packed"],
        "block_scale": made["weight_scale"],
        "tensor_scale": made["weight_global_scale"],
    }


def compressed_fp8(weight: Tensor, preset: str) -> Parts:
    """Presets: FP8 (tensor), FP8_DYNAMIC (channel), FP8_BLOCK (128 x 128)."""
    from compressed_tensors.compressors import FloatQuantizationCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = preset_name_to_scheme(preset, ["Linear"])
    values = weight.float()
    if preset == "FP8_BLOCK":
        rows, columns = values.shape
        padded = torch.nn.functional.pad(values, (0, -columns % 128, 0, -rows % 128))
        blocks = padded.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    elif preset == "FP8_DYNAMIC":
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    else:
        low, high = values.amin().reshape(1), values.amax().reshape(1)
    scale, _ = calculate_qparams(low, high, scheme.weights)
    made = FloatQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return {"data": made["weight"], "scale": made["weight_scale"]}


REFERENCES: dict[str, tuple[str, Callable[[Tensor], Parts], tuple[str, ...]]] = {
    "modelopt nvfp4": ("modelopt", modelopt_nvfp4, ("zeros",)),
    "modelopt fp8 128x128": ("modelopt", modelopt_fp8_blocks, ("zeros",)),
    "compressed-tensors nvfp4": ("compressed_tensors", compressed_nvfp4, ("partial", "ragged")),
    "compressed-tensors fp8 128x128": (
        "compressed_tensors",
        lambda weight: compressed_fp8(weight, "FP8_BLOCK"),
        ("zeros",),
    ),
    "compressed-tensors fp8 channel": (
        "compressed_tensors",
        lambda weight: compressed_fp8(weight, "FP8_DYNAMIC"),
        (),
    ),
    "compressed-tensors fp8 tensor": (
        "compressed_tensors",
        lambda weight: compressed_fp8(weight, "FP8"),
        (),
    ),
}
"""What is made -> (module that makes it, how, inputs left out: the convention has no such blocks,
ModelOpt makes NaN of a tensor of zeros, and compressed-tensors' scale for 128 x 128 zeros is 2^-23,
where checkpoints of that kind hold 1)."""


def to_text(values: Tensor) -> dict[str, Any]:
    data = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {
        "dtype": str(values.dtype).removeprefix("torch."),
        "shape": list(values.shape),
        "zlib": base64.b64encode(zlib.compress(data, 9)).decode(),
    }


def from_text(text: dict[str, Any]) -> Tensor:
    data = bytearray(zlib.decompress(base64.b64decode(text["zlib"])))
    values = torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, text["dtype"]))
    return values.view(text["shape"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=TARGET)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    cases = inputs()
    document = {
        "command": "python scripts/make_format_goldens.py",
        "versions": {name: version(name) for name in PACKAGES},
        "inputs": {name: to_text(values) for name, values in cases.items()},
        "outputs": {
            reference: {
                name: {part: to_text(tensor) for part, tensor in make(values).items()}
                for name, values in cases.items()
                if name not in without
            }
            for reference, (_, make, without) in REFERENCES.items()
        },
    }
    arguments.target.write_text(json.dumps(document, indent=1) + "\n")
    print(f"{arguments.target}: {arguments.target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
