import json
import multiprocessing
import shutil
import uuid

import pytest
import torch

from rlmix.core.errors import WeightSyncError
from rlmix.weights.manifest import read_manifest
from rlmix.weights.publish import publish_version
from rlmix.weights.remote import RemoteStore
from rlmix.weights.shipping import ship_version
from rlmix.weights.staging import Stager
from rlmix.weights.store import list_versions, verify_version, version_dir


@pytest.fixture
def model_files(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "tiny", "vocab_size": 7}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(params=["file", "memory"])
def remote(request, tmp_path):
    url = str(tmp_path / "remote") if request.param == "file" else f"memory://{uuid.uuid4().hex}"
    return RemoteStore(url)


@pytest.fixture
def stager(remote, tmp_path):
    return Stager(remote, tmp_path / "node", limit_s=30)


def weights(version):
    """Two matrices of 64 x 256; a version moves every hundredth element by one unit."""
    torch.manual_seed(0)
    state = {
        "model.layers.0.self_attn.q_proj.weight": torch.randn(256, 64).bfloat16(),
        "model.norm.weight": torch.ones(64).bfloat16(),
    }
    for step in range(version):
        for tensor in state.values():
            tensor.view(torch.int16).view(-1)[step::100] += 1
    return state


def publish(tmp_path, model_files, remote, version, *, views=("bf16",), full_every=4, keep=50):
    store = tmp_path / "store"
    publish_version(
        weights(version), version=version, store=store, views=views, model_files=model_files
    )
    return [
        ship_version(store, view, version, remote=remote, full_every=full_every, keep=keep)
        for view in views
    ]


def same_folder(tmp_path, report, view="bf16"):
    published = version_dir(tmp_path / "store", view, report.version)
    assert verify_version(report.folder) == read_manifest(published)
    for path in published.iterdir():
        assert (report.folder / path.name).read_bytes() == path.read_bytes(), path.name


def damage(remote, path, *, view="bf16"):
    """Flip one bit of a file in the store."""
    found = remote._fs.cat_file(f"{remote._root}/{view}/{path}")
    remote._fs.pipe_file(f"{remote._root}/{view}/{path}", found[:-1] + bytes([found[-1] ^ 1]))


def test_the_first_version_is_whole_and_the_next_ones_are_small(tmp_path, model_files, remote):
    (first,) = publish(tmp_path, model_files, remote, 0)
    (second,) = publish(tmp_path, model_files, remote, 1)
    assert (first.base, first.delta_bytes) == (None, 0)
    assert first.full_bytes > 32_768
    assert (second.base, second.full_bytes) == (0, 0)
    # 164 of 16,384 elements and 1 of 64, and a manifest of about a kilobyte.
    assert (second.num_elements, second.num_changed) == (16_448, 165)
    assert second.delta_bytes < 3_000
    assert second.metrics()["weights/bf16_changed_frac"] == pytest.approx(165 / 16_448)


@pytest.mark.parametrize("view", ["bf16", "fp8", "nvfp4"])
def test_twenty_deltas_one_after_another_give_the_trainers_bytes(
    tmp_path, model_files, remote, stager, view
):
    for version in range(21):
        publish(tmp_path, model_files, remote, version, views=(view,), full_every=100)
        report = stager.bring(view, version)
        assert report.steps == (f"{'delta' if version else 'full'} {version}",)
        same_folder(tmp_path, report, view)


def test_a_replica_that_missed_versions_follows_the_chain_and_a_late_one_the_last_snapshot(
    tmp_path, model_files, remote, stager
):
    publish(tmp_path, model_files, remote, 0)
    stager.bring("bf16", 0)
    for version in (1, 2, 3, 4, 5):
        publish(tmp_path, model_files, remote, version)
    report = stager.bring("bf16", 5)
    assert report.steps == ("delta 1", "delta 2", "delta 3", "delta 4", "delta 5")
    assert 0 < report.pull_bytes < 15_000
    same_folder(tmp_path, report)
    late = Stager(remote, tmp_path / "late", limit_s=30).bring("bf16", 5)
    assert late.steps == ("full 4", "delta 5")
    same_folder(tmp_path, late)


def test_what_is_there_is_not_fetched_again(tmp_path, model_files, remote, stager):
    publish(tmp_path, model_files, remote, 0)
    assert stager.bring("bf16", 0).pull_bytes > 0
    again = stager.bring("bf16", 0)
    assert (again.pull_bytes, again.steps) == (0, ())


def test_a_damaged_delta_is_refused_and_the_snapshot_is_taken(
    tmp_path, model_files, remote, stager
):
    publish(tmp_path, model_files, remote, 0, full_every=1)
    stager.bring("bf16", 0)
    publish(tmp_path, model_files, remote, 1, full_every=1)
    damage(remote, "v000001/delta/model.safetensors.delta")
    report = stager.bring("bf16", 1)
    assert report.steps == ("full 1",)
    assert "v000001/delta/model.safetensors.delta has" in report.refused[0]
    same_folder(tmp_path, report)


def test_without_a_whole_way_the_error_says_what_was_damaged_and_later_versions_heal(
    tmp_path, model_files, remote, stager
):
    publish(tmp_path, model_files, remote, 0, full_every=3)
    stager.bring("bf16", 0)
    for version in (1, 2):
        publish(tmp_path, model_files, remote, version, full_every=3)
    damage(remote, "v000001/delta/model.safetensors.delta")
    with pytest.raises(WeightSyncError, match=r"no whole way to version 2 .*it is damaged"):
        stager.bring("bf16", 2)
    assert list_versions(tmp_path / "node", "bf16") == [0]
    publish(tmp_path, model_files, remote, 3, full_every=3)
    assert stager.bring("bf16", 3).steps == ("full 3",)


def test_a_damaged_copy_is_found_by_the_delta_on_it_and_replaced(
    tmp_path, model_files, remote, stager
):
    publish(tmp_path, model_files, remote, 0)
    folder = stager.bring("bf16", 0).folder
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    publish(tmp_path, model_files, remote, 1)
    report = stager.bring("bf16", 1)
    assert report.steps == ("full 0", "delta 1")
    assert len(report.refused) == 1
    same_folder(tmp_path, report)


def test_the_copy_of_an_attempt_that_died_is_not_taken_for_the_new_one(
    tmp_path, model_files, remote, stager
):
    """Version 1 is published, fetched, and after a resume made again with other bytes."""
    publish(tmp_path, model_files, remote, 0)
    publish(tmp_path, model_files, remote, 1)
    stager.bring("bf16", 1)
    assert remote.discard_newer(0) == {"bf16": [1]}
    shutil.rmtree(version_dir(tmp_path / "store", "bf16", 1))
    state = weights(7)
    publish_version(
        state, version=1, store=tmp_path / "store", views=("bf16",), model_files=model_files
    )
    ship_version(tmp_path / "store", "bf16", 1, remote=remote, full_every=4, keep=50)
    same_folder(tmp_path, stager.bring("bf16", 1))


def test_a_version_is_immutable_and_versions_only_grow(tmp_path, model_files, remote):
    publish(tmp_path, model_files, remote, 3)
    with pytest.raises(WeightSyncError, match="with other bytes"):
        remote.write_target("bf16", 3, b"{}")
    (tmp_path / "other").mkdir()
    with pytest.raises(WeightSyncError, match="versions only grow"):
        publish(tmp_path / "other", model_files, remote, 2)


def test_pruning_keeps_what_the_kept_versions_are_made_of(tmp_path, model_files, remote):
    for version in range(11):
        publish(tmp_path, model_files, remote, version, keep=3)
    # 8, 9, 10 are kept; 8 is a snapshot, so nothing before it is needed.
    assert remote.versions("bf16") == [8, 9, 10]
    publish(tmp_path, model_files, remote, 11, keep=4)
    publish(tmp_path, model_files, remote, 12, keep=4)
    publish(tmp_path, model_files, remote, 13, keep=3)
    assert remote.full_versions("bf16") == [8, 12]
    # 11 is the oldest of three and is made of 8.
    assert remote.versions("bf16") == [8, 9, 10, 11, 12, 13]


def test_a_changed_tokenizer_travels_with_the_delta(tmp_path, model_files, remote, stager):
    publish(tmp_path, model_files, remote, 0)
    stager.bring("bf16", 0)
    (model_files / "tokenizer.json").write_text('{"version": "2.0"}')
    publish(tmp_path, model_files, remote, 1)
    report = stager.bring("bf16", 1)
    assert report.steps == ("delta 1",)
    assert (report.folder / "tokenizer.json").read_text() == '{"version": "2.0"}'


def fetch(url, folder, results):
    report = Stager(RemoteStore(url), folder, limit_s=60).bring("bf16", 1)
    results.put(report.pull_bytes)


def test_processes_of_one_machine_fetch_a_version_once(tmp_path, model_files):
    remote = RemoteStore(str(tmp_path / "remote"))
    publish(tmp_path, model_files, remote, 1)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [
        context.Process(target=fetch, args=(remote.url, tmp_path / "node", results))
        for _ in range(4)
    ]
    for child in children:
        child.start()
    pulled = sorted(results.get(timeout=60) for _ in children)
    for child in children:
        child.join()
    assert pulled[:3] == [0, 0, 0]
    assert pulled[3] > 32_768


def test_a_protocol_that_nobody_speaks_is_told_with_what_to_do():
    with pytest.raises(WeightSyncError, match=r"weights\.store=nosuch://x: .*install"):
        RemoteStore("nosuch://x")


def test_a_description_that_was_cut_is_damage_and_names_the_file(tmp_path, model_files):
    remote = RemoteStore(str(tmp_path / "remote"))
    publish(tmp_path, model_files, remote, 0)
    path = tmp_path / "remote" / "bf16" / "v000000" / "full.json"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(WeightSyncError, match=r"full\.json is damaged"):
        remote.offers("bf16", 0)
    assert json.loads((path.parent / "target.json").read_text())["version"] == 0
