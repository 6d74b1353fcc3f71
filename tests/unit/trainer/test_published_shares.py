"""Two real rank processes publish one version: each its share, together the bytes of one."""

import asyncio
import dataclasses

import pytest
from safetensors.torch import load_file

from rlmix.core.errors import DataError
from rlmix.trainer.policy import Policy
from rlmix.weights.manifest import verify_folder
from rlmix.weights.publish import publish_version
from tests.unit.trainer.conftest import ALGO, OPTIMIZER
from tests.unit.trainer.model_classes import CONFIGS, save_model
from tests.unit.trainer.processes import start_ranks

VIEWS = ("bf16", "fp8", "nvfp4")
FILE_BYTES = 40_000
"""Three to nine files of these models."""


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    from rlmix.trainer.spec import TrainerSpec

    folder = tmp_path_factory.mktemp("ranks")
    return TrainerSpec(
        algo=ALGO, optimizer=OPTIMIZER, micro_batch_tokens=128, threads=1, seed=5,
        checkpoints_dir=str(folder / "checkpoints"), keep_checkpoints=2,
        weights_store=str(folder / "weights"), views=VIEWS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(spec):
    ranks, _ = start_ranks(spec, 2)
    yield ranks
    ranks.kill()


def ask(ranks, *calls):
    async def run():
        answer = None
        for method, *args in calls:
            answer = await ranks.call(method, *args, limit_s=None)
        return answer

    return asyncio.run(run())


def loaded(ranks, spec, folder):
    ask(ranks, ("remake", dataclasses.replace(spec)), ("load", folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_two_ranks_publish_the_bytes_of_one(name, two_ranks, spec, tmp_path):
    model = tmp_path / "model"
    save_model(name, model)
    loaded(two_ranks, spec, model)
    ask(two_ranks, ("publish_in_files", 3, tmp_path / "two", VIEWS, FILE_BYTES))
    publish_version(
        Policy.load(model).parts(), version=3, store=tmp_path / "one", views=VIEWS,
        model_files=model, shard_bytes=FILE_BYTES,
    )  # fmt: skip
    for view in VIEWS:
        mine, theirs = (
            verify_folder(tmp_path / store / view / "v000003") for store in ("one", "two")
        )
        assert mine.same_content(theirs)
        assert sum(file.endswith(".safetensors") for file in theirs.files) > 2


@pytest.mark.parametrize("name", CONFIGS)
def test_the_parts_of_a_model_are_its_checkpoint(name, tmp_path):
    save_model(name, tmp_path)
    parts = Policy.load(tmp_path).parts()
    saved = load_file(tmp_path / "model.safetensors")
    found = {}
    for number, places in enumerate(parts.layout):
        read = parts.read(number)
        assert {n: (t.shape, t.dtype) for n, t in read.items()} == {
            n: (t.shape, t.dtype) for n, t in places.items()
        }
        assert not found.keys() & read.keys()
        found |= read
    assert len(parts.layout) > 10
    assert found.keys() == saved.keys()
    assert all(tensor.equal(saved[n]) for n, tensor in found.items())


# One of the first file, which rank 0 writes, and one of a file of rank 1.
@pytest.mark.parametrize("place", ["layers.0.mlp.down_proj", "layers.1.mlp.down_proj"])
def test_what_one_rank_cannot_encode_is_raised_by_all_and_leaves_nothing(
    place, two_ranks, spec, tmp_path
):
    model = tmp_path / "model"
    save_model("dense, head of its own", model)
    loaded(two_ranks, spec, model)
    ask(two_ranks, ("spoil", f"model.{place}.weight"))
    with pytest.raises(DataError, match=f"{place}.*(NaN|finite)"):
        ask(two_ranks, ("publish_in_files", 1, tmp_path / "store", ("nvfp4",), FILE_BYTES))
    assert list((tmp_path / "store" / "nvfp4").iterdir()) == []
    # Nobody is out of step: the same ranks publish the next good weights.
    loaded(two_ranks, spec, model)
    ask(two_ranks, ("publish_in_files", 1, tmp_path / "store", ("nvfp4",), FILE_BYTES))
    verify_folder(tmp_path / "store" / "nvfp4" / "v000001")
