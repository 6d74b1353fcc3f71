import json

import pytest
import torch

from rlmix.core.errors import ConfigError
from rlmix.trainer.export import export_checkpoint


@pytest.fixture
def trained(make_rank, model_dir, samples, tmp_path):
    """A rank after two steps, with a checkpoint of each."""
    rank = make_rank()
    rank.load(model_dir)
    for step in (1, 2):
        rank.train_step(samples, step=step, version=2)
        rank.save(step, {})
    return rank


def logits(folder, ids):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits


def test_an_exported_folder_loads_as_any_model_with_the_checkpoints_logits(trained, tmp_path):
    exported = export_checkpoint(tmp_path / "checkpoints", step=1, target=tmp_path / "out")
    assert exported.step == 1
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    ours = logits(tmp_path / "out", ids)
    assert torch.equal(ours, logits(tmp_path / "checkpoints" / "step_000001", ids))
    assert not torch.equal(ours, logits(tmp_path / "checkpoints" / "step_000002", ids))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"} <= names
    assert names.isdisjoint({"state.json", "shards", "manifest.json"})
    assert exported.num_bytes == sum(p.stat().st_size for p in (tmp_path / "out").iterdir())


def test_experts_are_one_matrix_each_as_engines_read_them(trained, tmp_path):
    from safetensors import safe_open

    export_checkpoint(tmp_path / "checkpoints", step=2, target=tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in names
    assert not any("gate_up_proj" in name for name in names)


def test_without_a_step_it_is_the_newest_whole_checkpoint(trained, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    assert export_checkpoint(checkpoints, step=None, target=tmp_path / "a").step == 2
    (checkpoints / "step_000002" / "model.safetensors").write_bytes(b"damaged")
    assert export_checkpoint(checkpoints, step=None, target=tmp_path / "b").step == 1
    with pytest.raises(ConfigError, match=r"of step 2 .*model\.safetensors has 7 bytes"):
        export_checkpoint(checkpoints, step=2, target=tmp_path / "c")


def test_what_cannot_be_done_is_one_sentence_and_leaves_nothing(trained, tmp_path):
    checkpoints, there = tmp_path / "checkpoints", tmp_path / "there"
    there.mkdir()
    (there / "mine.txt").write_text(json.dumps("kept"))
    with pytest.raises(ConfigError, match="exists and is not overwritten"):
        export_checkpoint(checkpoints, step=1, target=there)
    assert [path.name for path in there.iterdir()] == ["mine.txt"]
    with pytest.raises(ConfigError, match=r"no whole checkpoint of step 7; there are: 1, 2"):
        export_checkpoint(checkpoints, step=7, target=tmp_path / "out")
    with pytest.raises(ConfigError, match="nowhere is no folder; make it first"):
        export_checkpoint(checkpoints, step=1, target=tmp_path / "nowhere" / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*unfinished*"))
