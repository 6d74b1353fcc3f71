"""No secret that a run knows is in what it leaves behind, says, or shows in a process list."""

import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rlmix.observe.redact import is_secret_name

pytestmark = pytest.mark.slow

PLANTED = (
    "WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "SGLANG_API_KEY",
    "SGLANG_ADMIN_KEY", "RLMIX_SANDBOX_TOKEN", "RLMIX_CONTROL_KEY", "MY_REGISTRY_PASSWORD",
)  # fmt: skip
OWN = ("RLMIX_TOKEN", "RLMIX_ADMIN_TOKEN", "RAY_AUTH_TOKEN")
"""What the run makes for itself."""


def known_secrets(processes: list[psutil.Process]) -> dict[str, str]:
    """Variable -> value, over the environments that the processes were started with."""
    found = {}
    for process in processes:
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        found |= {name: value for name, value in environ.items() if is_secret_name(name) and value}
    return found


def shown_in_process_lists(values: set[bytes]) -> list[str]:
    shown = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if any(value in words for value in values):
            shown.append(f"{path}: {words[:200]!r}")
    return shown


def test_no_secret_is_in_the_run_s_folder_its_output_or_any_command_line(start_run, monkeypatch):
    planted = {name: f"canary-{secrets.token_hex(12)}" for name in PLANTED}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    typed = f"typed-{secrets.token_hex(8)}"
    run = start_run("s", "loop.steps=2", "loop.eval_tasks=0")
    run.wait_until(lambda: len(run.rows()) >= 1, "first step", limit_s=240)
    found = known_secrets(run.marked_processes())
    assert set(OWN) <= set(found), "the run's own keys must be seen to be looked for"
    looked_for = {**planted, **{name: found[name] for name in OWN}}
    values = {value.encode() for value in looked_for.values()}
    assert shown_in_process_lists(values) == []
    assert (run.path / "control.json").stat().st_mode & 0o077 == 0
    code, _ = run.finish()
    assert code == 0, run.stderr()

    # A request with a secret in it fails, and is neither repeated nor written down.
    rlmix = str(Path(sys.executable).with_name("rlmix"))
    refused = subprocess.run(
        [rlmix, "train", f"run.dir={run.root}", "run.name=t", f"+net.api_key={typed}"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode == 2
    shown = subprocess.run(
        [rlmix, "runs", "show", "s", "--dir", str(run.root), "--json"],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    values.add(typed.encode())
    places = {
        str(path.relative_to(run.root)): path.read_bytes()
        for path in run.root.rglob("*")
        if path.is_file()
    }
    places |= {"runs show": shown.stdout, "refusal": refused.stdout.encode()}
    assert {"s/report.html", "s/plan.json", "s/manifest.json", "s/logs/router.log"} <= set(places)
    leaks = [
        (place, name)
        for place, content in places.items()
        for name, value in {**looked_for, "typed": typed}.items()
        if value.encode() in content
    ]
    assert leaks == []
    assert not (run.path / "control.json").exists()
