"""Continuous batching in time alone, by hand."""

import pytest

from rlmix.engine.timed.scheduler import Scheduler, Work
from rlmix.engine.timed.steps import StepTimes

STEPS = StepTimes(fixed_s=0.010, request_s=0.002, prefill_token_s=0.001)
"""12 ms a step for one request, 14 for two; 1 ms for each uncached token."""


def work(prompt_tokens: int, output_tokens: int, *, blocks: list[int] | None = None) -> Work:
    blocks = blocks or []
    return Work(
        blocks=blocks,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        block_tokens=prompt_tokens / max(1, len(blocks)),
    )


def scheduler(*, max_running: int = 8, kv_tokens: int = 100_000) -> Scheduler:
    return Scheduler(STEPS, max_running=max_running, kv_tokens=kv_tokens)


def test_a_step_grows_with_the_experts_that_its_batch_touches_and_with_what_it_holds() -> None:
    steps = StepTimes(
        fixed_s=1.0, experts_s=8.0, expert_missed_frac=0.5, request_s=0.1, kv_token_s=0.01
    )
    # One request touches half of the experts, two touch three quarters.
    assert steps.decode_s(1, 10) == pytest.approx(1 + 4 + 0.1 + 0.1)
    assert steps.decode_s(2, 50) == pytest.approx(1 + 6 + 0.2 + 0.5)
    assert steps.scaled(2).decode_s(2, 50) == pytest.approx(2 * 7.7)


def test_prefill_of_a_long_context_costs_more_than_its_tokens() -> None:
    steps = StepTimes(fixed_s=0, prefill_fixed_s=1.0, prefill_token_s=0.1, prefill_pair_s=0.001)
    # 100 new tokens behind 900 old ones look at 950 tokens each on average.
    assert steps.prefill_s(100, 1000) == pytest.approx(1 + 10 + 95)


def test_a_lonely_request_takes_its_prefill_and_one_step_less_than_it_has_tokens() -> None:
    engine = scheduler()
    one = work(100, 11)
    engine.submit(one, 5.0)
    # 0.1 s prefill samples the first token, ten steps of 12 ms the others.
    assert engine.advance(5.0 + 0.2199) == []
    assert engine.advance(5.0 + 0.2201) == [one]
    assert engine.next_s() is None


def test_decoding_stands_still_while_another_prompt_is_prefilled() -> None:
    engine = scheduler()
    first, second = work(100, 11), work(50, 100)
    engine.submit(first, 0.0)
    engine.submit(second, 0.112)
    # At 0.112 one step of `first` is done; 50 ms pass, then nine steps of 14 ms are left.
    assert engine.advance(0.112 + 0.050 + 9 * 0.014 - 1e-4) == []
    assert engine.advance(0.112 + 0.050 + 9 * 0.014 + 1e-4) == [first]
    assert engine.num_running == 1


def test_what_happens_does_not_depend_on_how_often_the_engine_is_asked() -> None:
    ends = []
    for pause_s in (0.0007, 0.05, 3.0):
        engine, now_s, done = scheduler(max_running=2), 0.0, {}
        for index in range(5):
            engine.submit(work(20 * (index + 1), 10 * (index + 1)), 0.0)
        while len(done) < 5:
            now_s += pause_s
            for finished in engine.advance(now_s):
                done[finished.prompt_tokens] = finished.first_token_s
        ends.append((done, engine.moments, engine.prefill_us, engine.generated_tokens))
    for other in ends[1:]:
        assert other[0] == pytest.approx(ends[0][0])
        assert other[1] == pytest.approx(ends[0][1])
        assert other[2:] == pytest.approx(ends[0][2:])


def test_no_more_requests_run_than_there_are_places() -> None:
    engine = scheduler(max_running=2)
    for _ in range(4):
        engine.submit(work(10, 1000), 0.0)
    engine.advance(1.0)
    assert (engine.num_running, len(engine.waiting)) == (2, 2)


def test_a_request_waits_until_its_tokens_fit_into_the_cache() -> None:
    engine = scheduler(kv_tokens=1000)
    small, large = work(100, 100), work(700, 200)
    engine.submit(small, 0.0)
    engine.submit(large, 0.0)
    engine.advance(0.2)
    assert (engine.num_running, len(engine.waiting)) == (1, 1)
    # 0.1 s of prefill and 99 steps of 12 ms.
    assert engine.advance(1.29) == [small]
    assert engine.used_tokens == 900


def test_a_known_prefix_is_not_computed_again_but_its_last_token_is() -> None:
    engine = scheduler()
    engine.submit(work(400, 1, blocks=[1, 2, 3, 4]), 0.0)
    engine.advance(1.0)
    again, longer = work(400, 1, blocks=[1, 2, 3, 4]), work(600, 1, blocks=[1, 2, 3, 4, 5, 6])
    engine.submit(again, 1.0)
    engine.advance(2.0)
    engine.submit(longer, 2.0)
    engine.advance(3.0)
    assert (again.cached_tokens, longer.cached_tokens) == (399, 400)
    assert engine.prefilled_tokens == 400 + 1 + 200


def test_a_cancelled_request_makes_room_at_once_wherever_it_was() -> None:
    engine = scheduler(max_running=1)
    running, waiting, last = work(10, 1000), work(10, 1000), work(10, 1)
    for each in (running, waiting, last):
        engine.submit(each, 0.0)
    engine.advance(0.5)
    engine.cancel(waiting, 0.5)
    engine.cancel(running, 0.5)
    assert engine.advance(0.5 + 0.0101) == [last]
    assert (engine.num_running, engine.used_tokens) == (0, 0)


def test_paused_time_counts_for_nothing() -> None:
    engine = scheduler()
    one = work(100, 11)
    engine.submit(one, 0.0)
    engine.pause(0.05)
    assert (engine.next_s(), engine.advance(9.0)) == (None, [])
    engine.resume(9.0)
    assert engine.advance(9.0 + 0.17 - 1e-3) == []
    assert engine.advance(9.0 + 0.17 + 1e-3) == [one]


def test_a_retracted_request_keeps_its_tokens_and_is_prefilled_with_them_again() -> None:
    engine = scheduler()
    one = work(100, 11)
    engine.submit(one, 0.0)
    engine.pause(0.1 + 5 * 0.012)
    assert engine.retract() == 1
    assert (one.prompt_tokens, one.output_tokens, one.sampled_before) == (106, 5, 6)
    engine.resume(1.0)
    # 106 tokens are computed again and sample one; four steps for the other four.
    assert engine.advance(1.0 + 0.106 + 4 * 0.012 + 1e-4) == [one]
    assert engine.used_tokens == 0


def test_a_new_version_notes_how_much_the_old_one_sampled() -> None:
    engine = scheduler()
    one = work(100, 11)
    engine.submit(one, 0.0)
    engine.advance(0.1 + 3 * 0.012)
    engine.end_version(7)
    assert one.spans == [(7, 4)]


def test_the_moments_fit_the_step_time_of_two_batches() -> None:
    engine = scheduler()
    engine.submit(work(1, 101), 0.0)
    engine.advance(50.0)
    engine.submit(work(1, 101), 50.0)
    engine.submit(work(1, 102), 50.0)
    engine.advance(99.0)
    steps, batch, us, squared, batch_us, tokens = engine.moments
    assert tokens == pytest.approx(batch)
    slope = (steps * batch_us - batch * us) / (steps * squared - batch**2)
    assert slope == pytest.approx(2000)
    assert (us - slope * batch) / steps == pytest.approx(10_000)
