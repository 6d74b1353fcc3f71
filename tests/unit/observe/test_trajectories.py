"""Trajectory records: nothing is lost, and each names who sampled it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmix.core.candidates import Candidates
from rlmix.core.errors import DataError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan
from rlmix.observe.trajectories import (
    decode_trajectory,
    encode_trajectory,
    read_trajectories,
    summarize,
    write_trajectories,
)


def make_turn(pool: str = "b200", version: int = 3) -> Turn:
    return Turn(
        output_ids=(5, 6, 7),
        sampler_logprobs=(-0.1, -2.5, 0.0),
        kept=Candidates.of([(5, 9), (6,), (7, 1, 2)], [(-0.1, -2.4), (0.0,), (-1.0, -1.1, -1.2)]),
        observation_ids=(11, 12),
        version_spans=(
            VersionSpan(version=version, start=0, end=2),
            VersionSpan(version=version + 1, start=2, end=3),
        ),
        pool=pool,
        replica=f"{pool}-0",
        numerics_key=f"{pool}/nvfp4/emulated",
        finish_reason="stop",
        cached_tokens=17,
        command="sed -n 1,5p a.py",
        exit_code=0,
        model_s=0.25,
        tool_s=0.125,
    )


def make_trajectory(
    *turns: Turn, outcome: Outcome = Outcome.PASS, stop: StopReason = StopReason.SUBMITTED
) -> Trajectory:
    return Trajectory(
        session_id="s1",
        group_id="g000001",
        task_id="t7",
        prompt_ids=(1, 2, 3),
        turns=turns,
        stop_reason=stop,
        outcome=outcome,
        reward=1.0 if outcome is Outcome.PASS else 0.0,
        void_reason="sandbox gone" if outcome is Outcome.VOID else "",
        started_s=100.5,
        finished_s=101.75,
        tags={"kind": "off_by_one"},
    )


def as_float32(trajectory: Trajectory) -> Trajectory:
    return dataclasses.replace(
        trajectory,
        turns=tuple(
            dataclasses.replace(
                turn,
                sampler_logprobs=tuple(np.float32(turn.sampler_logprobs).tolist()),
            )
            for turn in trajectory.turns
        ),
    )


def test_record_reads_back_as_the_trajectory_it_was(tmp_path: Path) -> None:
    trajectory = make_trajectory(make_turn(), make_turn(version=4))
    write_trajectories(tmp_path, 12, [trajectory])
    assert read_trajectories(tmp_path / "step_000012.jsonl") == [as_float32(trajectory)]


def test_every_record_names_pools_numerics_keys_and_weight_versions() -> None:
    record = encode_trajectory(make_trajectory(make_turn(), make_turn(version=5)), step=12)
    assert record["pools"] == ["b200"]
    assert record["numerics_keys"] == ["b200/nvfp4/emulated"]
    assert record["weight_versions"] == [3, 4, 5, 6]
    assert record["turns"][0]["versions"] == [[3, 0, 2], [4, 2, 3]]
    assert record["turns"][0]["numerics_key"] == "b200/nvfp4/emulated"


def test_logprobs_are_plain_numbers_short_enough_to_read(tmp_path: Path) -> None:
    write_trajectories(tmp_path, 1, [make_trajectory(make_turn())])
    text = (tmp_path / "step_000001.jsonl").read_text()
    assert '"sampler_logprobs":[-0.1,-2.5,0.0]' in text
    assert json.loads(text)["turns"][0]["command"] == "sed -n 1,5p a.py"


def test_routed_experts_come_back_with_their_shape_and_type(tmp_path: Path) -> None:
    experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    turn = dataclasses.replace(make_turn(), experts=experts)
    write_trajectories(tmp_path, 1, [make_trajectory(turn)])
    found = read_trajectories(tmp_path / "step_000001.jsonl")[0].turns[0].experts
    assert found is not None
    assert found.dtype == np.uint8
    assert found.tolist() == experts.tolist()


def test_turn_without_kept_sets_stays_without(tmp_path: Path) -> None:
    turn = dataclasses.replace(make_turn(), kept=None)
    write_trajectories(tmp_path, 1, [make_trajectory(turn)])
    assert read_trajectories(tmp_path / "step_000001.jsonl")[0].turns[0].kept is None


def test_command_of_undecodable_bytes_is_stored_readably(tmp_path: Path) -> None:
    turn = dataclasses.replace(make_turn(), command=b"echo \xff".decode("utf-8", "surrogateescape"))
    write_trajectories(tmp_path, 1, [make_trajectory(turn)])
    assert read_trajectories(tmp_path / "step_000001.jsonl")[0].turns[0].command == "echo ?"


def test_void_session_has_no_reward_in_its_record() -> None:
    void = make_trajectory(outcome=Outcome.VOID, stop=StopReason.SANDBOX_LOST)
    record = encode_trajectory(void, step=1)
    assert record["reward"] is None
    assert decode_trajectory(record) == void


def test_summary_counts_by_reason_and_by_pool() -> None:
    moved = make_trajectory(make_turn("b200"), make_turn("h100"))
    failed = make_trajectory(make_turn("b200"), outcome=Outcome.FAIL, stop=StopReason.TURN_LIMIT)
    void = make_trajectory(make_turn("b200"), outcome=Outcome.VOID, stop=StopReason.SANDBOX_LOST)
    summary = summarize([moved, failed, void])
    assert summary["sessions"] == 3
    assert summary["outcomes"] == {"pass": 1, "fail": 1, "void": 1}
    assert summary["stop_reasons"] == {"submitted": 1, "turn_limit": 1, "sandbox_lost": 1}
    assert summary["void_reasons"] == {"sandbox gone": 1}
    b200 = summary["pools"]["b200"]
    # A void session served tokens but says nothing about the reward.
    assert (b200["sessions"], b200["valid"], b200["reward_sum"], b200["tokens"]) == (3, 2, 1.0, 9)
    assert summary["pools"]["h100"]["sessions"] == 1


def test_damaged_record_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"schema_version": "1.0", "session_id": "s1"}\n')
    with pytest.raises(DataError, match=r"step_000001\.jsonl line 1: not a trajectory record"):
        read_trajectories(path)


token_ids = st.integers(min_value=0, max_value=2**31 - 1)
logprobs = st.floats(min_value=-(2.0**100), max_value=0.0, width=32)


@st.composite
def candidates(draw: st.DrawFn, num_tokens: int) -> Candidates:
    rows = draw(
        st.lists(
            st.lists(st.tuples(token_ids, logprobs), max_size=4),
            min_size=num_tokens,
            max_size=num_tokens,
        )
    )
    return Candidates.of([[i for i, _ in row] for row in rows], [[v for _, v in r] for r in rows])


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    num_tokens = draw(st.integers(min_value=0, max_value=5))
    return Turn(
        output_ids=tuple(draw(st.lists(token_ids, min_size=num_tokens, max_size=num_tokens))),
        sampler_logprobs=tuple(draw(st.lists(logprobs, min_size=num_tokens, max_size=num_tokens))),
        kept=draw(st.none() | candidates(num_tokens)),
        kept_exact=draw(st.booleans()),
        head=draw(st.none() | candidates(num_tokens)),
        command=draw(st.text(max_size=8)),
        exit_code=draw(st.none() | st.integers(0, 255)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(turns(), max_size=3))
def test_any_turn_survives_the_file_bit_for_bit(made: list[Turn]) -> None:
    import tempfile

    trajectory = make_trajectory(*made)
    with tempfile.TemporaryDirectory() as folder:
        write_trajectories(Path(folder), 1, [trajectory])
        assert read_trajectories(Path(folder) / "step_000001.jsonl") == [trajectory]
