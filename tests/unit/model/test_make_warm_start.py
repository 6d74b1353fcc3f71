"""The script that made the bundle still runs, learns, and repeats itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_warm_start.py"


@pytest.mark.slow
def test_a_quick_rebuild_lowers_the_loss_and_writes_a_complete_bundle(tmp_path: Path):
    subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--ranks", "1", "--out", str(tmp_path)],
        check=True,
        capture_output=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    skill, spread = manifest["phases"]
    assert skill["loss_first"] > 5.0
    assert skill["loss_last"] < skill["loss_first"] - 1.5
    # The second phase starts where the first ended, on other sessions.
    assert spread["loss_last"] < skill["loss_first"] - 2.5
    from rlmix.model.bundle import resolve_model

    assert resolve_model(tmp_path) == tmp_path
