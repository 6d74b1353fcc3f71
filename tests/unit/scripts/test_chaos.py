"""The account of `scripts/chaos.py`: a sound run passes, and what it is there to find is found."""

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan
from rlmix.loop.ledger import SessionLedger
from rlmix.observe.run_dir import RunDir

SCRIPT = Path(__file__).parents[3] / "scripts" / "chaos.py"


@pytest.fixture(scope="module")
def chaos():
    spec = importlib.util.spec_from_file_location("chaos", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


def session(run_id, group, member, *, rehomed=0):
    turn = Turn(
        output_ids=(1,), sampler_logprobs=(-0.1,), pool="h100",
        version_spans=(VersionSpan(version=0, start=0, end=1),),
    )  # fmt: skip
    return Trajectory(
        session_id=f"{run_id}.{group}.{member}", group_id=group, task_id="t", prompt_ids=(1,),
        turns=(turn,), stop_reason=StopReason.SUBMITTED, outcome=Outcome.PASS, reward=1.0,
        rehomed=rehomed,
    )  # fmt: skip


def make_run(tmp_path, *, groups, ended=None, cut_at=None):
    """A run of one step for each group of two. `ended`: ids whose end is in the ledger, all if
    left out; `cut_at`: the attempt ends without notice after this step."""
    run = RunDir.create(tmp_path, "chaos")
    ledger = SessionLedger(run.path, attempt=1)
    for step, group in enumerate(groups, start=1):
        members = [session(run.run_id, group, m, rehomed=m) for m in range(2)]
        for member, one in enumerate(members):
            name = f"{group}.{member}"
            ledger.begun(name)
            if ended is None or name in ended:
                ledger.ended(name, one)
        ledger.group(group, "trained")
        run.write_trajectories(step, members)
        run.metrics.append({"step": step})
    ledger.close()
    if cut_at is None:
        run.close("finished")
    else:
        run._lock.release()
    return run


def checked(chaos, tmp_path, steps):
    scene = chaos.Scene(root=tmp_path, steps=steps, pace_s=1.0, random=random.Random(0))
    return chaos.checked(scene)


def test_a_sound_run_passes_with_its_numbers(chaos, tmp_path):
    make_run(tmp_path, groups=["g000000", "g000001r1"])
    result = checked(chaos, tmp_path, 2)
    assert result["problems"] == []
    assert (result["trained_sessions"], result["trained_rehomed"]) == (4, 2)
    assert result["account"]["finished"] == 4
    assert result["account"]["groups"] == {"trained": 2}


def test_missing_steps_sessions_without_an_end_and_places_trained_twice_are_problems(
    chaos, tmp_path
):
    make_run(tmp_path / "a", groups=["g000000", "g000000r1"])
    (twice, *_) = checked(chaos, tmp_path / "a", 3)["problems"][::-1]
    assert "trained on twice" in twice
    assert "steps are [1, 2]" in checked(chaos, tmp_path / "a", 3)["problems"][0]
    make_run(tmp_path / "b", groups=["g000000"], ended={"g000000.0"})
    assert checked(chaos, tmp_path / "b", 1)["problems"] == ["the ledger does not add up"]
    # Of a controller that died the same ledger is sound.
    make_run(tmp_path / "c", groups=["g000000"], ended={"g000000.0"}, cut_at=1)
    result = checked(chaos, tmp_path / "c", 1)
    assert result["problems"] == []
    assert result["account"]["lost_with_controller"] == 1


def test_every_kind_of_fault_comes_and_the_seed_decides_the_order(chaos):
    kinds = list(chaos.FAULTS)
    planned = chaos.schedule(10, kinds, random.Random(1))
    assert planned == chaos.schedule(10, kinds, random.Random(1))
    assert planned != chaos.schedule(10, kinds, random.Random(2))
    assert len(planned) == 10
    assert set(Counter(planned)) == set(kinds)
