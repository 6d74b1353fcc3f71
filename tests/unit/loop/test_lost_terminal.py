"""The terminal of a run goes away: what the run prints goes on in a file of the run."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

SHOWS = """
import signal, sys, time
from pathlib import Path
from rlmix.cli.train import facts_of
from rlmix.config.compose import load_config
from rlmix.loop.view import RunView
from rlmix.observe.run_dir import RunDir
from rlmix.plan.build import build_plan

signal.signal(signal.SIGHUP, signal.SIG_IGN)
config = load_config("train", ["experiment=tiny"]).config
plan = build_plan(config, facts=facts_of(config), python=sys.executable)
with RunDir.create(Path(sys.argv[1]), "r", plan=plan.to_dict()) as run:
    with RunView(plan, config, run, as_json=False) as view:
        view.note("before")
        while not Path(sys.argv[2]).exists():
            time.sleep(0.02)
        view.phase = "training"
        view.note("after")
        view.phase = "ending"
"""


def test_a_view_without_its_terminal_writes_into_the_run_s_logs(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    gone = tmp_path / "gone"
    process = subprocess.Popen(
        [sys.executable, "-c", SHOWS, str(tmp_path), str(gone)],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(theirs)
    try:
        shown = b""
        deadline_s = time.monotonic() + 60
        while b"before" not in shown:
            assert time.monotonic() < deadline_s
            shown += os.read(ours, 1 << 16)
        os.close(ours)
        gone.touch()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    written = (tmp_path / "r" / "logs" / "driver.log").read_text()
    assert "after" in written
    assert "r: ending" in written
    assert "\x1b[" not in written
    kinds = [
        json.loads(line)["kind"]
        for line in (tmp_path / "r" / "events.jsonl").read_text().splitlines()
    ]
    assert kinds.count("terminal_lost") == 1
    assert kinds[-1] == "attempt_ended"
