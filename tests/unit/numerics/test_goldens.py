"""Our bytes against those of the packages that define the formats.

`goldens.json` was made by scripts/make_format_goldens.py, which says with which versions; where a
package is installed, its live output is compared as well.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlmix.numerics import fp8, nvfp4

HERE = Path(__file__).parent
GOLDENS = json.loads((HERE / "goldens.json").read_text())


def _script():
    path = HERE.parents[2] / "scripts" / "make_format_goldens.py"
    spec = importlib.util.spec_from_file_location("make_format_goldens", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = _script()


def ours_nvfp4(weight, convention):
    made = nvfp4.quantize(weight, convention=convention)
    return {
        "packed": made.packed_uint8,
        "block_scale": made.block_scale_e4m3,
        "tensor_scale": made.tensor_scale_f32.reshape(1),
    }


def ours_fp8(made):
    return {"data": made.data_e4m3, "scale": made.scale_inv_f32}


OURS = {
    "modelopt nvfp4": lambda weight: ours_nvfp4(weight, "modelopt"),
    "compressed-tensors nvfp4": lambda weight: ours_nvfp4(weight, "compressed-tensors"),
    "modelopt fp8 128x128": lambda weight: ours_fp8(fp8.quantize_blocks(weight)),
    "compressed-tensors fp8 128x128": lambda weight: ours_fp8(fp8.quantize_blocks(weight)),
    "compressed-tensors fp8 channel": lambda weight: ours_fp8(fp8.quantize_channels(weight)),
    "compressed-tensors fp8 tensor": lambda weight: ours_fp8(fp8.quantize_tensor(weight)),
}


def differing(ours, theirs):
    """Parts whose bytes differ, as text."""
    found = []
    for part, expected in theirs.items():
        got = ours[part].reshape(expected.shape)
        assert got.dtype == expected.dtype, part
        unequal = got.contiguous().view(torch.uint8) != expected.contiguous().view(torch.uint8)
        if unequal.any():
            found.append(f"{part}: {int(unequal.sum())} of {unequal.numel()} bytes")
    return found


CASES = [(reference, name) for reference, outputs in GOLDENS["outputs"].items() for name in outputs]


def compare(document, reference, name, texts):
    weight = SCRIPT.from_text(document["inputs"][name])
    theirs = {part: SCRIPT.from_text(text) for part, text in texts.items()}
    return differing(OURS[reference](weight), theirs)


@pytest.mark.parametrize(("reference", "name"), CASES)
def test_our_bytes_are_those_of_the_package(reference, name):
    assert compare(GOLDENS, reference, name, GOLDENS["outputs"][reference][name]) == []


@pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module, _, _ in SCRIPT.REFERENCES.values()),
    reason="needs nvidia-modelopt and compressed-tensors (extra: dev)",
)
def test_our_bytes_are_those_of_the_installed_packages(tmp_path):
    # In a process of its own: the packages change global state when they are imported.
    target = tmp_path / "live.json"
    subprocess.run(
        [sys.executable, SCRIPT.__file__, "--target", target], check=True, capture_output=True
    )
    live = json.loads(target.read_text())
    found = [
        f"{reference}, {name}: {part}"
        for reference, outputs in live["outputs"].items()
        for name, texts in outputs.items()
        for part in compare(live, reference, name, texts)
    ]
    assert found == []
