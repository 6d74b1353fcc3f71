"""Exact mode on real pretrained weights, few tokens; `scripts/smollm2_exact.py` for many."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[4] / "scripts" / "smollm2_exact.py"


def model_folder() -> Path:
    spec = importlib.util.spec_from_file_location("smollm2_exact", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.model_folder()


@pytest.mark.slow
@pytest.mark.skipif(
    not (model_folder() / "model.safetensors").is_file(),
    reason="no SmolLM2 weights: run scripts/smollm2_exact.py --prepare (fetches 90 MiB)",
)
def test_not_one_logprob_of_real_weights_differs_between_trainer_and_engine() -> None:
    ran = subprocess.run(
        [sys.executable, str(SCRIPT), "--tokens", "64", "--json"],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    rows = json.loads(ran.stdout)
    assert [row["activations"] for row in rows] == ["bfloat16", "float32"]
    for row in rows:
        assert row["mismatches"] == 0
        assert row["tokens"] == 60  # All but the first of four texts.
        # The same function as Transformers' (BF16), of a model that has learnt English.
        assert row["native_mean_abs"] < 0.3
        assert -9 < row["mean_logprob"] < -2
        assert 0 < row["gradient_norm"] < float("inf")
    assert ran.returncode == 0
