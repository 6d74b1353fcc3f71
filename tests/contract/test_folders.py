"""Folders that rlmix makes by other ways than publishing: a copy built from a delta, and an export.
An engine that loads one holds the same weights as from the published folder."""

import torch
from safetensors.torch import load_file

from rlmix.trainer.checkpoint import save_checkpoint
from rlmix.trainer.export import export_checkpoint
from rlmix.weights.files import hold_files
from rlmix.weights.remote import RemoteStore
from rlmix.weights.shipping import ship_version
from rlmix.weights.staging import Stager
from tests.contract.talking import checksum_of, load_version, run, version_of


async def checksums(engine, folder):
    """Of version 1 as it was published, and of `folder` loaded as version 2."""
    assert (await load_version(engine, 1))[0] == 200
    published = await checksum_of(engine)
    assert (await load_version(engine, 0))[0] == 200
    assert await checksum_of(engine) != published or engine.kind == "scripted"
    status, document = await load_version(engine, 1, model_path=str(folder), weight_version="2")
    assert status == 200, document
    assert await version_of(engine) == "2"
    return published, await checksum_of(engine)


def test_a_folder_made_of_a_delta_holds_the_published_weights(engine, tmp_path):
    if engine.kind == "scripted":
        return  # It has no weights; its checksum is its version.
    store = engine.folders[1].parent.parent
    remote = RemoteStore(str(tmp_path / "remote"))
    stager = Stager(remote, tmp_path / "staged", limit_s=60)
    for version in (0, 1):
        ship_version(store, "bf16", version, remote=remote, full_every=100, keep=10)
        staged = stager.bring("bf16", version)
    assert staged.steps == ("delta 1",)
    published, found = run(checksums(engine, staged.folder))
    assert found == published


def test_an_exported_checkpoint_holds_the_published_weights(engine, tmp_path):
    if engine.kind == "scripted":
        return
    save_checkpoint(
        tmp_path / "checkpoints",
        step=3,
        version=1,
        model_state=hold_files(load_file(engine.folders[1] / "model.safetensors")),
        model_files=engine.folders[1],
        optimizer_state={"num_steps": torch.tensor(3)},
        random_state=torch.get_rng_state(),
        extra={},
    )
    folder = tmp_path / "exported"
    export_checkpoint(tmp_path / "checkpoints", step=3, target=folder)
    published, found = run(checksums(engine, folder))
    assert found == published
