import pytest

from rlmix.batch.groups import build_batch, group_lag
from rlmix.core.errors import DataError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan


def member(reward, *, group="g0", void=False, version=3, tokens=2):
    spans = (VersionSpan(version=version, start=0, end=tokens),) if tokens else ()
    turn = Turn(
        output_ids=(5,) * tokens,
        sampler_logprobs=(-0.5,) * tokens,
        version_spans=spans,
        pool="a100",
    )
    return Trajectory(
        session_id=f"{group}-{reward}-{version}",
        group_id=group,
        task_id="t",
        prompt_ids=(1, 2),
        turns=(turn,),
        stop_reason=StopReason.SANDBOX_LOST if void else StopReason.SUBMITTED,
        outcome=Outcome.VOID if void else (Outcome.PASS if reward else Outcome.FAIL),
        reward=reward,
    )


def test_void_members_leave_the_baseline_alone():
    # valid rewards 1, 0, 0: mean 1/3. With the void as a 0 it would be 1/4.
    batch = build_batch(
        [[member(1.0), member(0.0), member(0.0), member(0.0, void=True)]],
        scale="none",
        baseline="mean",
    )
    assert [s.advantage for s in batch.samples] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert batch.num_void_members == 1
    assert batch.num_policy_tokens == 6


def test_a_group_without_signal_stays_in_the_batch_with_advantage_zero():
    groups = [[member(1.0), member(1.0)], [member(1.0, group="g1"), member(0.0, group="g1")]]
    batch = build_batch(groups, scale="none", baseline="mean")
    assert [s.advantage for s in batch.samples] == [0.0, 0.0, 0.5, -0.5]
    assert batch.num_groups == 2
    assert batch.num_groups_without_signal == 1
    assert batch.metrics()["batch/no_signal_frac"] == 0.5


def test_a_group_with_fewer_than_two_valid_members_is_left_out_and_counted():
    batch = build_batch([[member(1.0), member(0.0, void=True)], []], scale="none", baseline="mean")
    assert batch.samples == ()
    assert batch.num_small_groups == 2
    assert batch.num_groups == 0
    assert batch.metrics()["batch/no_signal_frac"] == 0.0


def test_a_session_without_tokens_counts_in_the_baseline_but_is_no_sample():
    batch = build_batch(
        [[member(1.0), member(0.0), member(0.0, tokens=0)]], scale="none", baseline="mean"
    )
    assert [s.advantage for s in batch.samples] == pytest.approx([2 / 3, -1 / 3])
    assert batch.num_tokenless_members == 1


def test_members_of_different_groups_are_refused():
    with pytest.raises(DataError, match=r"\['g0', 'g1'\]"):
        build_batch([[member(1.0), member(0.0, group="g1")]], scale="none", baseline="mean")


def test_staleness_is_counted_from_the_oldest_token_of_valid_members():
    group = [member(1.0, version=5), member(0.0, version=3), member(0.0, version=1, void=True)]
    assert group_lag(group, trainer_version=7) == 4
    assert group_lag([member(0.0, tokens=0)], trainer_version=7) is None


def test_a_token_from_the_future_is_an_error_not_a_negative_lag():
    with pytest.raises(DataError, match="version 9, but the trainer is at 7"):
        group_lag([member(1.0, version=9)], trainer_version=7)
