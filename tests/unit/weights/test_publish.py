import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from rlmix.core.errors import WeightSyncError
from rlmix.weights.manifest import MANIFEST_NAME, read_manifest
from rlmix.weights.publish import publish_version, published_views
from rlmix.weights.store import (
    discard_newer,
    list_versions,
    newest_version,
    prune,
    verify_version,
    version_dir,
)


@pytest.fixture
def model_files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny", "vocab_size": 7}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "model.safetensors").write_bytes(b"the warm start, not to be copied")
    (folder / "manifest.json").write_text("{}")
    return folder


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(7, 4, generator=generator).bfloat16(),
        "model.norm.weight": torch.ones(4).bfloat16(),
    }


def publish(tmp_path, model_files, version, *, seed=0, views=("bf16",)):
    return publish_version(
        state(seed), version=version, store=tmp_path / "store", views=views, model_files=model_files
    )


def test_a_version_is_a_complete_model_folder_with_a_manifest(tmp_path, model_files):
    report = publish(tmp_path, model_files, 3)
    folder = tmp_path / "store" / "bf16" / "v000003"
    assert report.views[0].path == str(folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        MANIFEST_NAME,
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    loaded = load_file(folder / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state().items())
    manifest = verify_version(folder)
    assert (manifest.kind, manifest.version, manifest.view) == ("weights", 3, "bf16")
    assert manifest.total_bytes == report.views[0].total_bytes
    assert "quantization_config" not in json.loads((folder / "config.json").read_text())


def test_unchanged_side_files_are_shared_between_versions_but_never_with_the_model_folder(
    tmp_path, model_files
):
    publish(tmp_path, model_files, 0)
    publish(tmp_path, model_files, 1, seed=1)
    first, second = (version_dir(tmp_path / "store", "bf16", v) for v in (0, 1))
    assert (first / "tokenizer.json").stat().st_ino == (second / "tokenizer.json").stat().st_ino
    assert (first / "tokenizer.json").stat().st_ino != (
        model_files / "tokenizer.json"
    ).stat().st_ino
    (model_files / "tokenizer.json").write_text("edited by the user")
    verify_version(first)
    shutil.rmtree(first)
    verify_version(second)


def test_a_version_that_exists_is_accepted_only_with_the_same_bytes(tmp_path, model_files):
    publish(tmp_path, model_files, 2)
    again = publish(tmp_path, model_files, 2)
    assert again.views[0].was_there
    with pytest.raises(WeightSyncError, match=r"with other bytes \(model\.safetensors\)"):
        publish(tmp_path, model_files, 2, seed=1)
    verify_version(version_dir(tmp_path / "store", "bf16", 2))


def test_versions_only_grow_within_a_view(tmp_path, model_files):
    publish(tmp_path, model_files, 5)
    with pytest.raises(WeightSyncError, match="version 4 of view bf16 comes after 5"):
        publish(tmp_path, model_files, 4)
    assert list_versions(tmp_path / "store", "bf16") == [5]


def test_a_damaged_version_is_written_again(tmp_path, model_files):
    publish(tmp_path, model_files, 1)
    folder = version_dir(tmp_path / "store", "bf16", 1)
    (folder / "model.safetensors").write_bytes(b"")
    report = publish(tmp_path, model_files, 1)
    assert not report.views[0].was_there
    verify_version(folder)


def flip_a_byte(folder):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def cut_the_manifest(folder):
    path = folder / MANIFEST_NAME
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, "model.safetensors has the hash .* the file is damaged"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "lacks tokenizer.json"),
        (lambda folder: (folder / "config.json").write_text("{}"), "has 2 bytes, the manifest"),
        (cut_the_manifest, "manifest.json is damaged"),
        (lambda folder: (folder / MANIFEST_NAME).unlink(), "has no manifest.json"),
        (lambda folder: (folder / MANIFEST_NAME).write_text("[]"), "manifest.json is damaged"),
        (lambda f: (f / MANIFEST_NAME).write_text('{"format": "x"}'), "has format 'x'"),
    ],
)
def test_every_kind_of_damage_is_found_and_named(tmp_path, model_files, damage, message):
    publish(tmp_path, model_files, 1)
    folder = version_dir(tmp_path / "store", "bf16", 1)
    damage(folder)
    with pytest.raises(WeightSyncError, match=message):
        verify_version(folder)


def test_a_folder_moved_under_another_versions_name_is_refused(tmp_path, model_files):
    publish(tmp_path, model_files, 1)
    folder = version_dir(tmp_path / "store", "bf16", 1)
    moved = folder.with_name("v000002")
    folder.rename(moved)
    with pytest.raises(WeightSyncError, match="name must be that version"):
        verify_version(moved)


def test_unfinished_folders_are_no_versions_and_are_swept_by_the_next_publish(
    tmp_path, model_files
):
    publish(tmp_path, model_files, 1)
    parent = tmp_path / "store" / "bf16"
    (parent / ".new-v000002-99999").mkdir()
    (parent / "v000007").mkdir()  # a copy that somebody interrupted: no manifest
    assert newest_version(tmp_path / "store", "bf16") == 1
    publish(tmp_path, model_files, 2, seed=1)
    assert not (parent / ".new-v000002-99999").exists()
    assert newest_version(tmp_path / "store", "bf16") == 2
    assert newest_version(tmp_path / "store", "fp8") is None


def test_pruning_keeps_the_newest_versions(tmp_path, model_files):
    for version in range(5):
        publish(tmp_path, model_files, version, seed=version)
    assert prune(tmp_path / "store", "bf16", 2) == [0, 1, 2]
    assert list_versions(tmp_path / "store", "bf16") == [3, 4]
    verify_version(version_dir(tmp_path / "store", "bf16", 3))
    with pytest.raises(WeightSyncError, match="keep=0"):
        prune(tmp_path / "store", "bf16", 0)


def test_pruning_spares_what_a_replica_is_reading(tmp_path, model_files):
    for version in range(5):
        publish(tmp_path, model_files, version, seed=version)
    assert prune(tmp_path / "store", "bf16", 1, spared={1, 4}) == [0, 2, 3]
    assert list_versions(tmp_path / "store", "bf16") == [1, 4]


def test_a_resumed_run_discards_what_was_published_after_its_checkpoint(tmp_path, model_files):
    for version in range(4):
        publish(tmp_path, model_files, version, seed=version)
    assert discard_newer(tmp_path / "store", 1) == {"bf16": [2, 3]}
    publish(tmp_path, model_files, 2, seed=9)
    assert newest_version(tmp_path / "store", "bf16") == 2
    assert published_views(tmp_path / "store", 2) == ["bf16"]
    assert published_views(tmp_path / "store", 3) == []


def test_a_model_folder_without_config_and_senseless_requests_are_refused(tmp_path, model_files):
    with pytest.raises(WeightSyncError, match="every view is named once"):
        publish(tmp_path, model_files, 0, views=("bf16", "bf16"))
    with pytest.raises(WeightSyncError, match="version=-1"):
        publish(tmp_path, model_files, -1)
    (model_files / "config.json").unlink()
    with pytest.raises(WeightSyncError, match=r"has no config\.json"):
        publish(tmp_path, model_files, 0)


def test_the_manifest_is_readable_without_the_files(tmp_path, model_files):
    publish(tmp_path, model_files, 6)
    folder = version_dir(tmp_path / "store", "bf16", 6)
    (folder / "model.safetensors").unlink()
    assert read_manifest(folder).version == 6
