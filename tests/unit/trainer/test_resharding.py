"""A checkpoint that one number of ranks wrote is read by another."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import torch

from rlmix.core.errors import TrainerError
from rlmix.trainer.checkpoint import load_checkpoint
from tests.unit.trainer.conftest import ALGO, OPTIMIZER
from tests.unit.trainer.processes import start_ranks


@pytest.fixture
def spec(tmp_path):
    from rlmix.trainer.spec import TrainerSpec

    return TrainerSpec(
        algo=ALGO,
        optimizer=OPTIMIZER,
        micro_batch_tokens=128,
        threads=1,
        seed=5,
        checkpoints_dir=str(tmp_path / "checkpoints"),
        keep_checkpoints=3,
        weights_store=str(tmp_path / "weights"),
        views=("bf16",),
    )


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_two_ranks_save_one_resumes_saves_and_two_go_on(spec, model_dir, samples):
    from rlmix.trainer.rank import TrainerRank

    ranks, _ = start_ranks(spec, 2)

    async def first():
        await ranks.call("load", model_dir, limit_s=None)
        await ranks.call("train_step", samples, step=1, version=2, limit_s=None)
        path = await ranks.call("save", 1, {"cursor": 3}, limit_s=None)
        return path, (await ranks.call("state", limit_s=None))[1]

    async def third(path):
        await ranks.call("remake", dataclasses.replace(spec), limit_s=None)
        loaded = await ranks.call("load", path, limit_s=None)
        state = (await ranks.call("state", limit_s=None))[1]
        result = await ranks.call("train_step", samples, step=3, version=2, limit_s=None)
        return loaded, state, result

    try:
        path, held = asyncio.run(first())
        written = load_checkpoint(Path(path))
        assert (written.ranks, written.extra) == (2, {"cursor": 3})
        same(written.optimizer, held)
        assert written.random_state_of(1) is not None

        alone = TrainerRank(spec)
        assert alone.load(path)["step"] == 1
        same(alone._parts()[1].full_state(), held)
        alone.train_step(samples, step=2, version=2)
        path = alone.save(2, {"cursor": 4})
        assert load_checkpoint(Path(path)).ranks == 1

        loaded, state, result = asyncio.run(third(path))
        assert (loaded["step"], loaded["extra"]) == (2, {"cursor": 4})
        same(state, alone._parts()[1].full_state())
        assert result.applied
    finally:
        ranks.kill()


def test_two_ranks_refuse_the_checkpoint_of_another_optimizer(spec, model_dir, samples):
    sgd = dataclasses.replace(spec, optimizer=dataclasses.replace(OPTIMIZER, name="sgd"))
    ranks, _ = start_ranks(spec, 2)

    async def saved(told):
        await ranks.call("remake", told, limit_s=None)
        await ranks.call("load", model_dir, limit_s=None)
        await ranks.call("train_step", samples, step=1, version=2, limit_s=None)
        return await ranks.call("save", 1, {}, limit_s=None)

    async def resumed(told, path):
        await ranks.call("remake", told, limit_s=None)
        await ranks.call("load", path, limit_s=None)

    try:
        path = asyncio.run(saved(spec))
        with pytest.raises(TrainerError, match=r"tensors without a place: \['exp_avg/"):
            asyncio.run(resumed(sgd, path))
        path = asyncio.run(saved(sgd))
        with pytest.raises(TrainerError, match=r"has no moments.*another trainer\.optimizer"):
            asyncio.run(resumed(spec, path))
        asyncio.run(resumed(sgd, path))
    finally:
        ranks.kill()
