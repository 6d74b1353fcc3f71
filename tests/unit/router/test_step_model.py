"""Step times: a prior, what was shown, and how far the one moves the other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmix.router.step_model import (
    StepFit,
    StepModel,
    bounded,
    common_scale,
    relative_prior,
    roofline_prior,
)

PRIOR = StepModel(base_s=0.010, request_s=0.001, token_s=0.0, prefill_token_s=1e-4)


def moments(steps: float, batch: float, step_s: float) -> list[float]:
    """The sums that `steps` steps of one batch add to an engine's."""
    us = step_s * 1e6
    return [steps, steps * batch, steps * us, steps * batch**2, steps * us * batch, steps * batch]


def test_a_step_is_its_base_and_its_requests_and_their_context():
    model = StepModel(base_s=0.01, request_s=0.001, token_s=1e-6, prefill_token_s=0.0)
    assert model.step_s(8, 8000) == pytest.approx(0.010 + 0.008 + 0.008)


def test_a_roofline_reads_the_weights_once_and_the_cache_of_every_request():
    # 0.6 of 4 TB/s: 24 GB in 10 ms, 12 KB a token in 5 ns, 2 * 60 MB of state in 50 us.
    prior = roofline_prior(
        bandwidth_bytes_s=4e12, weight_bytes=24e9, kv_bytes_per_token=12e3, state_bytes=60e6,
        flops_per_token=6e9, peak_flops_s=1e15, fixed_s=0.001,
    )  # fmt: skip
    assert prior.base_s == pytest.approx(0.011)
    assert prior.token_s == pytest.approx(5e-9)
    assert prior.request_s == pytest.approx(5e-5)
    assert prior.prefill_token_s == pytest.approx(6e9 / 4e14)


def test_speeds_alone_share_work_in_proportion():
    assert relative_prior(4.0).step_s(8, 0) == pytest.approx(relative_prior(1.0).step_s(2, 0))


def test_sums_of_an_engine_outvote_the_prior_and_a_restart_begins_them_anew():
    # Truth: 4 ms + 2 ms a request, seen at batches 2 and 10, 20,000 steps each.
    fit = StepFit()
    first = moments(20_000, 2, 0.008)
    fit.observe_moments(first)
    fit.observe_moments([a + b for a, b in zip(first, moments(20_000, 10, 0.024), strict=True)])
    model = fit.model(PRIOR, context_tokens=0)
    assert model.step_s(2, 0) == pytest.approx(0.008, rel=0.05)
    assert model.step_s(10, 0) == pytest.approx(0.024, rel=0.05)
    steps = fit.steps
    fit.observe_moments(moments(10, 4, 0.012))  # fewer steps than before: a new process
    assert fit.steps == pytest.approx(min(steps + 10, 20_000))


def test_without_observation_the_prior_stands_and_few_steps_move_it_little():
    fit = StepFit()
    assert fit.model(PRIOR, context_tokens=0) == PRIOR
    # 400 steps weigh as much as the prior: 18 ms planned at batch 8, 36 ms seen.
    fit.observe_moments(moments(400, 8, 0.036))
    assert fit.model(PRIOR, context_tokens=0).step_s(8, 0) == pytest.approx(0.027, rel=0.01)


def test_turn_times_stand_in_where_an_engine_reports_no_sums():
    # 100 tokens in 2.05 s, 0.05 s of it prefill of 500 tokens: 20 ms a step.
    fit = StepFit()
    for _ in range(400):
        fit.observe_turn(
            turn_s=2.05, output_tokens=100, uncached_tokens=500, batch=4, prefill_token_s=1e-4
        )
    assert fit.model(PRIOR, context_tokens=0).step_s(4, 0) == pytest.approx(0.020, rel=0.05)
    fit.observe_moments(moments(1000, 4, 0.005))
    fit.observe_turn(
        turn_s=99.0, output_tokens=1, uncached_tokens=0, batch=4, prefill_token_s=1e-4
    )  # The engine's own clock is better.
    assert fit.mean_step_s == pytest.approx(0.005)


def test_prefill_is_fitted_from_tokens_and_the_time_they_took():
    fit = StepFit()
    fit.observe_prefill(2_000, 0.4e6)  # 0.2 ms a token; the prior counts as 2,000 tokens
    assert fit.model(PRIOR, context_tokens=0).prefill_token_s == pytest.approx(1.5e-4)


def test_a_flat_step_is_taken_to_grow_all_the_same():
    fit = StepFit()
    for batch in (2, 4, 6):
        fit.observe_turn(
            turn_s=1.0, output_tokens=10_000, uncached_tokens=0, batch=batch, prefill_token_s=0.0
        )
    model = fit.model(relative_prior(1.0), context_tokens=0)
    assert model.request_s * fit.mean_batch >= 0.49 * model.step_s(fit.mean_batch, 0)


def test_all_priors_are_scaled_together_by_the_mean_of_what_was_seen():
    assert common_scale([]) == 1.0
    assert common_scale([(2.0, 1e9), (8.0, 1e9)]) == pytest.approx(4.0)


def test_a_fit_moves_at_most_fourfold_from_its_prior():
    wild = StepModel(base_s=1.0, request_s=1.0, token_s=0.0, prefill_token_s=1e-4)
    held = bounded(wild, PRIOR, batch=10, context_tokens=0)
    assert held.step_s(10, 0) == pytest.approx(4 * PRIOR.step_s(10, 0))


@settings(deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.floats(1e-3, 1e3), st.integers(1, 4096), st.floats(1.0, 300.0)), max_size=20
    )
)
def test_whatever_was_seen_no_time_is_negative(turns):
    fit = StepFit()
    for turn_s, tokens, batch in turns:
        fit.observe_turn(
            turn_s=turn_s, output_tokens=tokens, uncached_tokens=10, batch=batch,
            prefill_token_s=1e-4,
        )  # fmt: skip
    model = fit.model(PRIOR, context_tokens=100.0)
    assert min(model.base_s, model.request_s) >= 0
    assert model.step_s(1, 100) > 0
