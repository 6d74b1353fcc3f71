"""One session of two turns, small enough to read: prompt 10 11, then 20 21 | 30, then 22 | 31."""

import dataclasses
import math

import numpy as np
import pytest

from rlmix.batch.samples import to_sample
from rlmix.core.candidates import Candidates
from rlmix.core.errors import DataError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan

LOG = math.log
KEPT_LOGPROBS = ((LOG(0.75), LOG(0.25)), (LOG(0.5), LOG(0.5)))
KEPT = Candidates.of([(20, 7), (3, 21)], KEPT_LOGPROBS)

FIRST = Turn(
    output_ids=(20, 21),
    sampler_logprobs=(LOG(0.75), LOG(0.5)),
    kept=KEPT,
    observation_ids=(30,),
    version_spans=(VersionSpan(version=4, start=0, end=1), VersionSpan(version=5, start=1, end=2)),
    pool="h100",
)
SECOND = Turn(
    output_ids=(22,),
    sampler_logprobs=(0.0,),
    kept=Candidates.of([(22,)], [(0.0,)]),
    observation_ids=(31,),
    version_spans=(VersionSpan(version=5, start=0, end=1),),
    pool="b200",
)


def with_first(*logprobs):
    return Candidates.of([(20, 7), (3, 21)], [logprobs, KEPT_LOGPROBS[1]])


def session(*turns, prompt_ids=(10, 11)):
    return Trajectory(
        session_id="s7",
        group_id="g1",
        task_id="t1",
        prompt_ids=prompt_ids,
        turns=turns,
        stop_reason=StopReason.SUBMITTED,
        outcome=Outcome.PASS,
        reward=1.0,
    )


def test_tokens_masks_versions_and_pools_line_up():
    sample = to_sample(session(FIRST, SECOND), advantage=0.25)
    assert sample.ids.tolist() == [10, 11, 20, 21, 30, 22]  # the last observation is left out
    assert sample.mask.tolist() == [False, False, True, True, False, True]
    assert sample.sampler_logprobs.tolist() == pytest.approx([0, 0, LOG(0.75), LOG(0.5), 0, 0])
    assert sample.versions.tolist() == [-1, -1, 4, 5, -1, 5]
    assert sample.pool_names == ("b200", "h100")
    assert sample.pools.tolist() == [-1, -1, 1, 1, -1, 0]
    assert sample.advantage == 0.25
    assert sample.reward == 1.0
    assert sample.ids.dtype == np.int32
    assert sample.sampler_logprobs.dtype == np.float32


def test_kept_sets_are_compressed_rows_with_empty_rows_for_what_was_not_sampled():
    sample = to_sample(session(FIRST, SECOND), advantage=0.25)
    assert sample.kept_offsets.tolist() == [0, 0, 0, 2, 4, 4, 5]
    assert sample.kept_ids.tolist() == [20, 7, 3, 21, 22]
    assert np.exp(sample.kept_logprobs).tolist() == pytest.approx([0.75, 0.25, 0.5, 0.5, 1.0])
    assert sample.kept_exact


def routes(*experts):
    """One layer, two experts per token."""
    return np.array(experts, dtype=np.uint8).reshape(-1, 1, 2)


def test_each_turn_brings_the_experts_of_the_tokens_that_were_new_to_the_engine():
    """10 11 20 before the second token; then 21 30; token 22 was never an input."""
    first = dataclasses.replace(FIRST, experts=routes([0, 1], [2, 3], [4, 5]))
    second = dataclasses.replace(SECOND, experts=routes([6, 7], [200, 255]))
    sample = to_sample(session(first, second), advantage=1.0)
    assert sample.experts.dtype == np.int16
    expected = [[0, 1], [2, 3], [4, 5], [6, 7], [200, 255], [-1, -1]]
    assert sample.experts[:, 0].tolist() == expected


def test_turns_of_a_pool_that_records_no_experts_stay_open():
    first = dataclasses.replace(FIRST, experts=routes([0, 1], [2, 3], [4, 5]))
    sample = to_sample(session(first, SECOND), advantage=1.0)
    assert sample.experts[3:, 0].tolist() == [[-1, -1]] * 3
    second = dataclasses.replace(SECOND, experts=routes([6, 7], [8, 9]))
    sample = to_sample(session(FIRST, second), advantage=1.0)
    assert sample.experts[:, 0, 0].tolist() == [-1, -1, -1, 6, 8, -1]
    assert to_sample(session(FIRST, SECOND), advantage=1.0).experts is None


def test_experts_of_too_few_tokens_or_of_another_model_are_refused():
    first = dataclasses.replace(FIRST, experts=routes([0, 1], [2, 3]))
    with pytest.raises(DataError, match="turn 0 has 3 new context tokens but experts of 2"):
        to_sample(session(first, SECOND), advantage=1.0)
    first = dataclasses.replace(FIRST, experts=routes([0, 1], [2, 3], [4, 5]))
    second = dataclasses.replace(SECOND, experts=np.zeros((2, 2, 2), dtype=np.uint8))
    with pytest.raises(DataError, match="experts of different sizes"):
        to_sample(session(first, second), advantage=1.0)


def test_a_session_without_kept_sets_has_none():
    bare = [dataclasses.replace(turn, kept=None) for turn in (FIRST, SECOND)]
    sample = to_sample(session(*bare), advantage=0.0)
    assert sample.kept_offsets is None
    assert sample.kept_ids is None


def test_a_head_may_sum_to_less_than_one_and_miss_the_sampled_token():
    head = dataclasses.replace(
        SECOND, kept_exact=False, kept=Candidates.of([(1, 2)], [(LOG(0.4), LOG(0.3))]),
        sampler_logprobs=(LOG(0.1),),
    )  # fmt: skip
    sample = to_sample(session(head), advantage=0.0)
    assert not sample.kept_exact
    with pytest.raises(DataError, match=r"sum to 0\.700000, must be 1$"):
        to_sample(session(dataclasses.replace(head, kept_exact=True)), advantage=0.0)


def test_heads_are_rows_of_the_turns_that_have_one_and_empty_elsewhere():
    head = Candidates.of([(22, 9)], [(LOG(0.8), LOG(0.1))])
    sample = to_sample(session(FIRST, dataclasses.replace(SECOND, head=head)), advantage=0.0)
    assert sample.head_offsets.tolist() == [0, 0, 0, 0, 0, 0, 2]
    assert sample.head_ids.tolist() == [22, 9]
    assert np.exp(sample.head_logprobs).tolist() == pytest.approx([0.8, 0.1])
    assert sample.kept_exact
    assert to_sample(session(FIRST, SECOND), advantage=0.0).head_offsets is None


def test_turns_after_the_last_sampled_token_are_dropped():
    silent = Turn(output_ids=(), sampler_logprobs=(), observation_ids=(50,))
    sample = to_sample(session(SECOND, silent), advantage=0.0)
    assert sample.ids.tolist() == [10, 11, 22]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler_logprobs": (0.0,)}, "2 sampled tokens but 1 logprobs"),
        ({"sampler_logprobs": (-math.inf, LOG(0.5))}, "not finite"),
        ({"version_spans": FIRST.version_spans[:1]}, "version spans cover 1 of 2"),
        ({"version_spans": FIRST.version_spans[1:]}, "does not continue at token 0"),
        ({"version_spans": (VersionSpan(version=-1, start=0, end=2),)}, "version -1"),
        ({"kept": KEPT.slice(0, 1)}, "2 sampled tokens but 1 kept sets"),
        ({"head": KEPT.slice(0, 1)}, "2 sampled tokens but 1 heads"),
        ({"kept": Candidates.of([(), (3, 21)], [(), KEPT_LOGPROBS[1]])}, "a kept set is empty"),
        (
            {"kept": Candidates.of([(20, 7), (3, 4)], KEPT_LOGPROBS)},
            r"sampled token 1 \(id 21\) appears 0 times",
        ),
        (
            {"kept": Candidates.of([(20, 20), (3, 21)], KEPT_LOGPROBS)},
            r"sampled token 0 \(id 20\) appears 2 times",
        ),
        ({"kept": with_first(LOG(0.7), LOG(0.2))}, r"kept set of .* sum to 0\.9"),
        ({"kept": with_first(math.nan, LOG(0.2))}, "sum to nan"),
        ({"head": with_first(LOG(0.9), LOG(0.2))}, r"head of .* sum to 1\.1.*at most 1$"),
        ({"sampler_logprobs": (LOG(0.7), LOG(0.5))}, "taken before renormalisation"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused_with_its_session(changes, message):
    with pytest.raises(DataError, match=message) as caught:
        to_sample(session(dataclasses.replace(FIRST, **changes), SECOND), advantage=0.0)
    assert "session s7 of task t1" in str(caught.value)


def test_a_session_may_not_mix_kept_sets_with_heads_or_nothing():
    bare = dataclasses.replace(SECOND, kept=None)
    with pytest.raises(DataError, match="one kind throughout"):
        to_sample(session(FIRST, bare), advantage=0.0)


def test_sessions_without_prompt_or_without_sampled_tokens_are_refused():
    with pytest.raises(DataError, match="no sampled token"):
        to_sample(session(), advantage=0.0)
    with pytest.raises(DataError, match="prompt is empty"):
        to_sample(session(SECOND, prompt_ids=()), advantage=0.0)
