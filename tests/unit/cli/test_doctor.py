"""`rlmix doctor` looks at the real machine, so this asserts what must hold on any."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_doctor_says_what_it_found_and_the_fix_for_what_is_missing(
    tmp_path: Path, rlmix: Run
) -> None:
    done = rlmix("doctor", "--json")
    document = json.loads(done.stdout)
    checks = {check["name"]: check for check in document["checks"]}
    assert set(checks) >= {
        "python",
        "torch",
        "ray",
        "memory",
        "disk",
        "store",
        "sandbox",
        "loopback",
    }
    assert checks["python"]["ok"]
    assert checks["torch"]["detail"].startswith("2.")
    missing = [check for check in document["checks"] if not check["ok"]]
    assert all(check["fix"] for check in missing)
    is_fit = not any(check["is_needed"] for check in missing)
    assert document["can_train"] == is_fit
    assert done.returncode == (0 if is_fit else 1)
    assert len(document["nodes"]) == 1
    assert {check["node"] for check in document["checks"]} == {document["nodes"][0]["host"]}
    assert list(tmp_path.iterdir()) == []


def test_doctor_takes_the_keys_of_a_run_and_refuses_others(rlmix: Run) -> None:
    done = rlmix("doctor", "launch.adress=auto")
    assert done.returncode == 2
    assert "launch.address" in done.stderr
