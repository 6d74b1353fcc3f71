"""The rules of admission, liveness and restarting, with numbers worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmix.core.errors import EngineError
from rlmix.pools.admission import ProgressWatch, RestartBudget, check_canaries
from rlmix.pools.engine_admin import read_loads
from rlmix.pools.spec import AdmissionRefused, CanaryOutput, ReplicaLoad


def output(*logprobs: float) -> CanaryOutput:
    return CanaryOutput(
        prompt_ids=(1,), output_ids=tuple(range(len(logprobs))), sampler_logprobs=logprobs
    )


def load(*, running=0, queued=0, tokens=0, is_paused=False) -> ReplicaLoad:
    return ReplicaLoad(
        running=running, queued=queued, tokens_per_s=0.0, kv_used_frac=0.0,
        progress_tokens=tokens, version=0, is_paused=is_paused,
    )  # fmt: skip


def check(outputs, references, tolerance_nats=0.1):
    return check_canaries(outputs, references, name="r", tolerance_nats=tolerance_nats)


def test_the_difference_is_the_mean_over_all_canary_tokens():
    # |-1.0 + 1.1| = 0.1, |-2.0 + 2.0| = 0, |-0.5 + 0.3| = 0.2: mean 0.1.
    outputs = [output(-1.0, -2.0), output(-0.5)]
    references = [[-1.1, -2.0], [-0.3]]
    assert check(outputs, references, 0.1001) == pytest.approx(0.1)
    with pytest.raises(AdmissionRefused, match=r"by 0\.1 nats on average over 3 tokens"):
        check(outputs, references, 0.099)


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, 0.5])
def test_logprobs_that_are_no_logprobs_are_refused_even_without_references(bad):
    with pytest.raises(AdmissionRefused, match=r"canary 1 has the logprob .* at position 1"):
        check([output(-1.0), output(-1.0, bad)], None)


def test_a_nan_reference_never_passes():
    with pytest.raises(AdmissionRefused):
        check([output(-1.0)], [[math.nan]])


def test_an_empty_answer_is_refused_and_no_canaries_are_nothing_to_check():
    with pytest.raises(AdmissionRefused, match="without a token"):
        check([output()], None)
    assert check([], None) is None
    assert check([output(-1.0)], None) is None


def test_references_of_another_length_are_the_callers_mistake():
    with pytest.raises(EngineError, match="2 reference logprobs for 1 canary tokens"):
        check([output(-1.0)], [[-1.0, -1.0]])


@pytest.mark.parametrize(
    ("timeline", "stalled"),
    [
        # (now_s, running, queued, tokens): tokens advance.
        ([(0, 1, 0, 10), (5, 1, 0, 11), (10, 1, 0, 12)], [0, 0, 0]),
        # Work and no token.
        ([(0, 1, 0, 10), (5, 1, 0, 10), (10, 1, 0, 10)], [0, 5, 10]),
        # Only waiting work counts as well.
        ([(0, 0, 3, 10), (5, 0, 3, 10)], [0, 5]),
        # Idle is not stuck, and the clock starts when work comes.
        ([(0, 0, 0, 10), (50, 0, 0, 10), (60, 1, 0, 10)], [0, 0, 10]),
        # One token resets it.
        ([(0, 1, 0, 10), (9, 1, 0, 10), (10, 1, 0, 11), (15, 1, 0, 11)], [0, 9, 0, 5]),
    ],
)
def test_progress_is_tokens_advancing_while_there_is_work(timeline, stalled):
    watch = ProgressWatch()
    found = [
        watch.stalled_s(load(running=running, queued=queued, tokens=tokens), now_s=now_s)
        for now_s, running, queued, tokens in timeline
    ]
    assert found == stalled


def test_a_paused_engine_is_not_stuck():
    watch = ProgressWatch()
    paused = load(running=2, is_paused=True)
    assert [watch.stalled_s(paused, now_s=now_s) for now_s in (0, 100)] == [0, 0]


def test_the_restart_delay_doubles_and_the_budget_comes_back_with_time():
    budget = RestartBudget(max_restarts=3, window_s=100.0, delay_s=1.0)
    assert [budget.next_delay_s(now_s=now_s) for now_s in (0, 10, 20, 30)] == [1.0, 2.0, 4.0, None]
    assert budget.next_delay_s(now_s=105) == 4.0  # the restart at 0 left the window
    assert budget.next_delay_s(now_s=300) == 1.0


@given(st.lists(st.floats(0.0, 50.0), max_size=30), st.integers(0, 4))
def test_no_window_ever_holds_more_restarts_than_allowed(gaps, max_restarts):
    budget = RestartBudget(max_restarts=max_restarts, window_s=60.0, delay_s=0.5)
    now_s, taken = 0.0, []
    for gap in gaps:
        now_s += gap
        if budget.next_delay_s(now_s=now_s) is not None:
            taken.append(now_s)
    for start in taken:
        assert sum(start <= time_s < start + 60.0 for time_s in taken) <= max_restarts


def test_loads_are_summed_over_ranks_and_missing_fields_are_zero():
    answer = {
        "loads": [
            {"num_running_reqs": 2, "num_waiting_reqs": 1, "gen_throughput": 10.0,
             "token_usage": 0.2, "total_prefill_uncached_tokens": 100, "decode_moments": [7.0]},
            {"num_running_reqs": 3, "gen_throughput": None, "token_usage": 0.9},
        ],
    }  # fmt: skip
    assert read_loads(answer) == ReplicaLoad(
        running=5, queued=1, tokens_per_s=10.0, kv_used_frac=0.9, progress_tokens=107,
        version=-1, is_paused=False,
    )  # fmt: skip
    ours = {**answer, "total_generated_tokens": 40, "weight_version": "12", "paused": True}
    assert read_loads(ours).progress_tokens == 140
    assert (read_loads(ours).version, read_loads(ours).is_paused) == (12, True)
    assert read_loads({}).running == 0
