"""A run under random faults finishes, and no session is missing or counted twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "scripts" / "chaos.py"
KINDS = "sigkill,disk_full,failed_boot,controller_restart"
"""Those that are quick to notice; `scripts/chaos.py` does all seven, ten faults in twenty steps."""


def can_unshare() -> bool:
    as_user = [] if os.geteuid() == 0 else ["--map-root-user"]
    words = ["unshare", "--mount", "--net", *as_user, "ip", "link", "set", "lo", "up"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not can_unshare(), reason="no namespaces for a disk and a network of its own")
def test_every_session_of_a_run_under_faults_ends_once(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "--seed", "3", "--steps", "6", "--kinds", KINDS,
         "--pace-s", "3", "--out", str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=900, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["problems"] == [], done.stderr[-3000:]
    assert sorted(fault["kind"] for fault in result["faults"]) == sorted(KINDS.split(","))
    noticed = {fault["kind"]: fault["noticed"] for fault in result["faults"]}
    assert "SIGKILL" in noticed["sigkill"]
    assert "No space left on device" in noticed["disk_full"]
    assert result["attempts"] == 2
    assert (result["steps"], result["trained_sessions"]) == (6, 6 * 8)
    account = result["account"]
    assert account["is_sound"]
    assert account["missing"] == account["twice"] == 0
    assert account["groups"]["trained"] >= 6 * 2
