"""What a step says about the sessions it trained on."""

import dataclasses

import numpy as np
import pytest

from rlmix.core.candidates import Candidates
from rlmix.core.sample import TrainSample
from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn
from rlmix.loop.step_metrics import (
    prompt_tokens,
    serving_pool,
    tokens_by_pool,
    trained_by_pool,
    trajectory_metrics,
)


def session(pools: list[tuple[str, int]], *, reward: float = 0.0, void: bool = False) -> Trajectory:
    turns = tuple(
        Turn(
            output_ids=tuple(range(count)),
            sampler_logprobs=(0.0,) * count,
            observation_ids=(7, 7),
            pool=pool,
            cached_tokens=3,
        )
        for pool, count in pools
    )
    return Trajectory(
        session_id="s",
        group_id="g",
        task_id="t",
        prompt_ids=(1, 2, 3, 4),
        turns=turns,
        stop_reason=StopReason.SANDBOX_LOST if void else StopReason.SUBMITTED,
        outcome=Outcome.VOID if void else Outcome.PASS if reward else Outcome.FAIL,
        reward=reward,
        started_s=10.0,
        finished_s=12.0,
    )


def test_a_session_that_moved_belongs_to_the_pool_that_sampled_most_of_it():
    assert serving_pool(session([("a100", 5), ("b200", 9), ("a100", 3)])) == "b200"
    assert serving_pool(session([("a100", 5), ("b200", 5)])) == "a100"
    assert serving_pool(session([])) == ""


def test_tokens_are_counted_where_they_were_sampled():
    moved = session([("a100", 5), ("b200", 9)])
    assert tokens_by_pool([moved, session([("a100", 1)])]) == {"a100": 6, "b200": 9}


def test_a_void_session_is_no_reward_but_its_tokens_count():
    metrics = trajectory_metrics(
        [
            session([("a100", 4)], reward=1.0),
            session([("a100", 4)], reward=0.0),
            session([("b200", 6)], reward=1.0),
            session([("b200", 6)], void=True),
        ]
    )
    assert metrics["reward/mean"] == pytest.approx(2 / 3)
    assert metrics["reward/by_pool/a100"] == 0.5
    assert metrics["reward/by_pool/b200"] == 1.0
    assert metrics["rollout/tokens"] == 20
    assert metrics["rollout/stop_submitted_frac"] == 1.0
    # Three valid turns, each sent 4 prompt ids and found 3 of them in the cache.
    assert metrics["rollout/cached_tokens_frac"] == pytest.approx(3 / 4)


def test_bytes_per_sampled_token_count_everything_that_is_recorded():
    turn = session([("a100", 2)]).turns[0]
    kept = Candidates.of([(1, 2, 3), (4,)], [(-1.1, -1.1, -1.1), (0.0,)])
    watched = dataclasses.replace(
        turn, kept=kept, head=kept.slice(0, 2), experts=np.zeros((5, 2, 4), np.uint8), wire_bytes=90
    )
    # 8 bytes for each id and logprob, 8 for each of 4 slots, 4 for each of 3 offsets, 40 experts.
    assert turn.record_bytes == 16
    assert watched.record_bytes == 16 + 2 * (32 + 12) + 40
    done = dataclasses.replace(session([], reward=1.0), turns=(turn, watched))
    metrics = trajectory_metrics([done])
    assert metrics["rollout/record_bytes_per_token"] == (16 + 144) / 4
    assert metrics["rollout/wire_bytes_per_token"] == 90 / 4
    assert metrics["rollout/head_turns_frac"] == 0.5


def test_a_step_of_voids_has_no_reward_at_all():
    assert "reward/mean" not in trajectory_metrics([session([("a100", 4)], void=True)])


def test_every_turn_sends_the_whole_context_again():
    # Turn 1 sends 4; turn 2 sends 4 + 5 sampled + 2 observed.
    assert prompt_tokens(session([("a100", 5), ("b200", 9)])) == 4 + 11


def test_trained_tokens_are_counted_by_the_pool_that_sampled_them() -> None:
    """Five sampled tokens: three of b, two of a; the trajectory is b's."""
    sample = TrainSample(
        session_id="s",
        ids=np.arange(7, dtype=np.int32),
        mask=np.array([False, True, True, False, True, True, True]),
        sampler_logprobs=np.zeros(7, dtype=np.float32),
        advantage=0.5,
        versions=np.zeros(7, dtype=np.int32),
        pools=np.array([-1, 0, 0, -1, 1, 1, 1], dtype=np.int16),
        pool_names=("a", "b", "c"),
    )
    trajectories, tokens = trained_by_pool([sample, sample])
    assert trajectories == {"b": 2}
    assert {pool: count for pool, count in tokens.items() if count} == {"a": 4, "b": 6}
