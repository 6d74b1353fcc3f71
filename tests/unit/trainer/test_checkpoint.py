import json

import pytest
import torch
from safetensors.torch import load_file

from rlmix.core.errors import TrainerError, VersionError, WeightSyncError
from rlmix.trainer.checkpoint import (
    is_checkpoint,
    list_checkpoints,
    load_checkpoint,
    newest_complete,
    prune_checkpoints,
    save_checkpoint,
    verify_checkpoint,
)
from rlmix.weights.files import hold_files


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
        model_state=hold_files({"weight": torch.full((3,), value).bfloat16()}),
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
        "shards",
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
    shard = path / "shards" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:100])


def damage_flip(path):
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 8
    (path / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_cut, "__0_0.distcp has 100 bytes"),
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


def test_a_checkpoint_of_a_newer_version_is_refused_and_never_passed_over(folder):
    save(folder, 1)
    newer = save(folder, 2)
    manifest = json.loads((newer / "manifest.json").read_text())
    assert manifest["schema_version"] == "1.0"
    (newer / "manifest.json").write_text(json.dumps({**manifest, "schema_version": "2.0"}))
    for read in (newest_complete, lambda _: load_checkpoint(newer)):
        with pytest.raises(VersionError, match=r"written by a newer rlmix; this one reads 1\.x"):
            read(folder)
    # A newer minor version is the same form with something more in it.
    (newer / "manifest.json").write_text(json.dumps({**manifest, "schema_version": "1.9"}))
    assert newest_complete(folder) == newer


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
        "ranks": 1,
        "extra": {"seed": 7},
    }


def test_every_optimizer_tensor_must_have_a_place_of_its_shape(folder):
    checkpoint = load_checkpoint(save(folder, 3, value=2.5))
    into = {"master/weight": torch.zeros(3), "num_steps": torch.tensor(0)}
    checkpoint.read_optimizer_into(into)
    assert into["master/weight"].tolist() == [2.5] * 3
    assert into["num_steps"] == 3
    with pytest.raises(TrainerError, match=r"without a place: \['num_steps'\]"):
        checkpoint.read_optimizer_into({"master/weight": torch.zeros(3)})
    with pytest.raises(TrainerError, match=r"lacks \['exp_avg/weight'\]"):
        checkpoint.read_optimizer_into({**into, "exp_avg/weight": torch.zeros(3)})
    with pytest.raises(TrainerError, match=r"shape \(3,\), the model needs \(4,\)"):
        checkpoint.read_optimizer_into({**into, "master/weight": torch.zeros(4)})


def test_a_rank_that_was_not_there_has_no_random_state(folder):
    checkpoint = load_checkpoint(save(folder, 3))
    assert checkpoint.ranks == 1
    assert checkpoint.random_state_of(1) is None


def test_a_large_model_is_cut_into_several_files_with_an_index(folder):
    state = {name: torch.ones(3).bfloat16() for name in ("a", "b")}
    path = save_checkpoint(
        folder,
        step=1,
        version=1,
        model_state=hold_files(state, shard_bytes=10),
        model_files=folder.parent / "model",
        optimizer_state={"num_steps": torch.tensor(1)},
        random_state=torch.get_rng_state(),
        extra={},
    )
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }
    assert verify_checkpoint(path).files.keys() >= set(index["weight_map"].values())
