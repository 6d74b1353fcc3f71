"""A process that saves is killed with SIGKILL: before each thing it does to a file, at each line of
the code that saves, and at random moments. What is left must always be a whole checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import rlmix
from rlmix.trainer.checkpoint import (
    list_checkpoints,
    load_checkpoint,
    newest_complete,
    prune_checkpoints,
    save_checkpoint,
)
from rlmix.weights.files import hold_files

FILE_EVENTS = ("open", "os.", "shutil.")
"""Audit events of Python that are about files. Fsync has none: it changes nothing that is seen."""
SAVING_CODE = tuple(str(Path(rlmix.__file__).parent / room) for room in ("trainer", "weights"))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    save(tmp_path / "checkpoints", 1)
    save(tmp_path / "checkpoints", 2)
    return tmp_path / "checkpoints"


def save(folder, step):
    return save_checkpoint(
        folder,
        step=step,
        version=step,
        model_state=hold_files({"weight": torch.full((64,), float(step)).bfloat16()}),
        model_files=folder.parent / "model",
        optimizer_state={"master/weight": torch.full((64,), float(step))},
        random_state=torch.get_rng_state(),
        extra={"step": step},
    )


def save_and_prune(folder):
    save(folder, 3)
    prune_checkpoints(folder, 2)


def in_a_child(folder, *, kill_at, watch):
    """Save step 3 in a forked process that kills itself at its `kill_at`-th event.

    Returns:
        Events seen when it came to its end, or None when it was killed.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            count = 0

            def event():
                nonlocal count
                count += 1
                if count == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            watch(str(folder.parent), event)
            save_and_prune(folder)
            sys.settrace(None)
            os.write(writer, str(count).encode())
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reader) as pipe:
        told = pipe.read()
    assert bool(told) != os.WIFSIGNALED(status), f"the child ended with {status}"
    return int(told) if told else None


def at_file_events(root, event):
    def hook(name, args):
        if name.startswith(FILE_EVENTS) and args and str(args[0]).startswith(root):
            event()

    sys.addaudithook(hook)


def at_lines(_, event):
    def trace(frame, what, _):
        if not frame.f_code.co_filename.startswith(SAVING_CODE):
            return None
        if what == "line":
            event()
        return trace

    sys.settrace(trace)


def check(folder):
    """The newest complete checkpoint is 2 or 3, whole, and a next save works."""
    found = load_checkpoint(newest_complete(folder))
    assert found.step in (2, 3)
    assert found.extra == {"step": found.step}
    assert found.optimizer["master/weight"].eq(found.step).all()
    return found.step


def test_killed_before_each_file_operation_of_a_save_a_whole_checkpoint_is_left(folder):
    seen, kill_at = [], 0
    while True:
        kill_at += 1
        total = in_a_child(folder, kill_at=kill_at, watch=at_file_events)
        seen.append(check(folder))
        if total is not None:
            break
    # Before the rename step 2 is the newest, after it step 3; and there are many operations.
    assert seen == sorted(seen)
    assert seen[0] == 2
    assert seen[-1] == 3
    assert len(seen) > 15
    save_and_prune(folder)
    assert [path.name for path in list_checkpoints(folder)] == ["step_000002", "step_000003"]
    assert not list(folder.glob(".*"))


@pytest.mark.slow
def test_killed_at_each_line_of_a_save_a_whole_checkpoint_is_left(folder):
    total = in_a_child(folder, kill_at=-1, watch=at_lines)
    assert total is not None
    assert total > 100
    for kill_at in range(1, total + 1, 3):
        in_a_child(folder, kill_at=kill_at, watch=at_lines)
        check(folder)


SAVE_FOREVER = """
import sys
from pathlib import Path
import torch
from rlmix.weights.files import hold_files
from rlmix.weights.writers import ALONE
from rlmix.trainer.saver import Saver

folder, step = Path(sys.argv[1]), 0
saver = Saver(folder, keep=2, writers=ALONE)
weights = torch.zeros(200_000)
while True:
    step += 1
    weights.fill_(step)
    saver.start(
        step=step, version=step, model_files=folder.parent / "model",
        model_state=hold_files({"weight": weights.bfloat16()}),
        optimizer_state={"master/weight": weights},
        random_state=torch.get_rng_state(), extra={"step": step},
    )
    weights.fill_(-1.0)  # As if the next step changed them while the save runs.
"""


def test_a_process_that_saves_in_the_background_leaves_a_whole_checkpoint_when_killed(folder):
    child = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(folder)])
    try:
        deadline_s = time.monotonic() + 120
        while not any(path.name > "step_000005" for path in list_checkpoints(folder)):
            assert child.poll() is None
            assert time.monotonic() < deadline_s, "the child saved five times in 120 s"
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    found = load_checkpoint(newest_complete(folder))
    assert found.extra == {"step": found.step}
    assert found.step >= 5
    assert found.optimizer["master/weight"].eq(found.step).all()
