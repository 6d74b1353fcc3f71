import json
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from rlmix.core.errors import TrainerError, WeightSyncError
from rlmix.trainer.checkpoint import (
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_complete,
    prune_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)


@pytest.fixture
def folder(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"old weights")
    return tmp_path / "checkpoints"


def save(folder, step, *, value=1.0, extra=None):
    return save_checkpoint(
        folder,
        step=step,
        version=step + 10,
        model_state={"weight": torch.full((3,), value).bfloat16()},
        model_files=folder.parent / "model",
        optimizer_state={"master/weight": torch.full((3,), value), "num_steps": torch.tensor(step)},
        random_state=torch.get_rng_state(),
        extra=extra or {},
    )


def test_a_checkpoint_gives_back_what_was_saved(folder):
    path = save(folder, 4, value=2.5, extra={"stream": {"next_index": 64, "pending": [[3, 1]]}})
    assert path.name == "step_000004"
    assert sorted(p.name for p in path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
        "tokenizer.json",
    ]
    checkpoint = load_checkpoint(path)
    assert (checkpoint.step, checkpoint.version) == (4, 14)
    assert checkpoint.extra == {"stream": {"next_index": 64, "pending": [[3, 1]]}}
    assert checkpoint.optimizer["master/weight"].tolist() == [2.5] * 3
    assert torch.equal(checkpoint.random_state, torch.get_rng_state())
    assert load_file(path / "model.safetensors")["weight"].dtype == torch.bfloat16
    assert is_checkpoint(path)
    assert not is_checkpoint(folder.parent / "model")


def damage_cut(path):
    content = (path / "optimizer.safetensors").read_bytes()
    (path / "optimizer.safetensors").write_bytes(content[: len(content) // 2])


def damage_flip(path):
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 8
    (path / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, "optimizer.safetensors has"),
        (damage_flip, "model.safetensors has the hash"),
        (lambda path: (path / "state.json").unlink(), "lacks state.json"),
        (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
        (lambda path: (path / "manifest.json").write_text('{"format"'), "manifest.json is damaged"),
    ],
)
def test_the_newest_complete_checkpoint_is_not_the_damaged_one(folder, damage, message):
    good = save(folder, 1)
    bad = save(folder, 2)
    assert newest_complete(folder) == bad
    damage(bad)
    assert newest_complete(folder) == good
    with pytest.raises(WeightSyncError, match=message):
        verify_checkpoint(bad)
    with pytest.raises(TrainerError, match="cannot resume"):
        load_checkpoint(bad)


def test_no_complete_checkpoint_is_none(folder):
    assert newest_complete(folder) is None
    (folder / "step_000003").mkdir(parents=True)
    assert newest_complete(folder) is None


def test_an_unfinished_save_is_ignored_and_swept_by_the_next(folder):
    save(folder, 1)
    unfinished = folder / ".new-step_000002-123"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half")
    assert newest_complete(folder).name == "step_000001"
    save(folder, 2)
    assert not unfinished.exists()


def test_saving_a_step_again_replaces_it(folder):
    save(folder, 5, value=1.0)
    path = save(folder, 5, value=3.0)
    assert load_checkpoint(path).optimizer["master/weight"].tolist() == [3.0] * 3
    assert list_checkpoints(folder) == [path]


def test_steps_are_ordered_by_number_not_by_name(folder):
    steps = [save(folder, step) for step in (1_000_000, 999_999, 2)]
    assert list_checkpoints(folder) == steps[::-1]
    assert newest_complete(folder) == steps[0]


def test_retention_keeps_the_newest_complete_ones_and_leaves_damaged_ones_alone(folder):
    paths = [save(folder, step) for step in range(4)]
    (paths[3] / "manifest.json").unlink()
    assert prune_checkpoints(folder, 2) == [paths[0]]
    assert list_checkpoints(folder) == paths[1:]
    with pytest.raises(TrainerError, match="keep=0"):
        prune_checkpoints(folder, 0)


def test_state_is_readable_json(folder):
    path = save(folder, 3, extra={"seed": 7})
    assert json.loads((path / "state.json").read_text()) == {
        "step": 3,
        "version": 13,
        "extra": {"seed": 7},
    }


SAVE_FOREVER = """
import sys
from pathlib import Path
import torch
from rlmix.trainer.checkpoint import prune_checkpoints, save_checkpoint

folder, step = Path(sys.argv[1]), 0
while True:
    step += 1
    save_checkpoint(
        folder, step=step, version=step, model_files=folder.parent / "model",
        model_state={"weight": torch.full((200_000,), float(step)).bfloat16()},
        optimizer_state={"master/weight": torch.full((200_000,), float(step))},
        random_state=torch.get_rng_state(), extra={"step": step},
    )
    prune_checkpoints(folder, 2)
"""


def test_a_writer_killed_at_any_moment_leaves_a_complete_checkpoint(folder):
    child = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(folder)])
    try:
        deadline_s = time.monotonic() + 60
        while len(list_checkpoints(folder)) < 2:
            assert child.poll() is None
            assert time.monotonic() < deadline_s, "the child saved no second checkpoint in 60 s"
            time.sleep(0.01)
    finally:
        child.kill()
        child.wait()
    path = newest_complete(folder)
    checkpoint = load_checkpoint(path)
    assert checkpoint.extra == {"step": checkpoint.step}
    assert checkpoint.optimizer["master/weight"].eq(checkpoint.step).all()
    assert checkpoint.step >= 1
