"""The bundle loads with the real classes, is small, and is what its manifest says."""

import hashlib
import json
from pathlib import Path

import pytest

from rlmix.core.errors import ConfigError
from rlmix.model.bundle import resolve_model


def test_bundled_files_match_their_hashes_and_stay_below_eight_megabytes():
    folder = resolve_model("bundled:tiny")
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, digest in manifest["files_sha256"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 8 * 1024 * 1024
    assert {"seed", "data_sha256", "phases", "wall_s"} <= set(manifest)


@pytest.mark.slow
def test_transformers_loads_the_bundle_in_bf16_with_its_own_classes():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model("bundled:tiny")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.dtype == torch.bfloat16
    assert 1e6 <= sum(weight.numel() for weight in model.parameters()) <= 3e6
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == tokenizer.eos_token_id


def test_unknown_bundles_and_incomplete_folders_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="bundled:tiny"):
        resolve_model("bundled:tinny")
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve_model(tmp_path)
