import pytest
import torch

from rlmix.core.errors import TrainerError
from rlmix.trainer.checkpoint import load_checkpoint
from rlmix.trainer.saver import Saver
from rlmix.weights.files import hold_files


@pytest.fixture
def saver(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return Saver(tmp_path / "checkpoints", keep=2)


def start(saver, tmp_path, step, weights):
    return saver.start(
        step=step,
        version=step,
        model_state=hold_files({"weight": weights.bfloat16()}),
        model_files=tmp_path / "model",
        optimizer_state={"master/weight": weights},
        random_state=torch.get_rng_state(),
        extra={"step": step},
    )


def test_what_is_saved_is_the_state_at_the_call_whatever_happens_to_it_afterwards(saver, tmp_path):
    weights = torch.full((1000,), 1.0)
    path = start(saver, tmp_path, 1, weights)
    weights.fill_(9.0)
    saver.wait()
    assert load_checkpoint(path).optimizer["master/weight"].tolist() == [1.0] * 1000


def test_a_finished_save_is_told_once_with_its_size_and_times(saver, tmp_path):
    assert saver.finished() == []
    path = start(saver, tmp_path, 4, torch.zeros(100_000))
    saver.wait()
    (report,) = saver.finished()
    assert (report.path, report.step) == (str(path), 4)
    # 200 KB of BF16 and 400 KB of float32.
    assert 600_000 < report.num_bytes < 640_000
    assert report.metrics()["trainer/checkpoint_bytes"] == report.num_bytes
    assert saver.finished() == []


def test_saves_follow_each_other_and_only_the_newest_are_kept(saver, tmp_path):
    for step in (1, 2, 3):
        start(saver, tmp_path, step, torch.full((10,), float(step)))
    saver.wait()
    assert [report.step for report in saver.finished()] == [1, 2, 3]
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_000002", "step_000003"]


def test_a_save_that_fails_is_an_error_at_the_next_call_and_leaves_the_older_one(saver, tmp_path):
    path = start(saver, tmp_path, 1, torch.zeros(3))
    saver.wait()
    (tmp_path / "model" / "config.json").unlink()
    (tmp_path / "model").rmdir()
    start(saver, tmp_path, 2, torch.zeros(3))
    with pytest.raises(TrainerError, match=r"not be written .* the one before it is complete"):
        saver.wait()
    assert load_checkpoint(path).step == 1
    assert [report.step for report in saver.finished()] == [1]
