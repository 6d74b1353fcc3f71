"""Service rates: the fixed point of sessions, batch and turn time, worked by hand."""

import itertools
from dataclasses import replace

import pytest

from rlmix.router.step_model import relative_prior
from rlmix.scaling.service import (
    ReplicaModel,
    SessionShape,
    best_load,
    most_running,
    serve,
    trajectories_per_s,
)

SHAPE = SessionShape(
    turns=10.0, output_tokens=100.0, new_tokens=0.0, context_tokens=1000.0, tool_s=5.0
)
MODEL = ReplicaModel(
    pool="h100",
    accelerator="h100",
    view="fp8",
    gpus=1,
    usd_per_hour=3.0,
    max_running=20,
    kv_tokens=1_000_000,
    state_tokens=0.0,
    max_context_tokens=8192,
    step_s=lambda batch, context: 0.01 + 0.001 * batch,
    prefill_token_s=1e-4,
    router_model=relative_prior(1.0),
    cold_start_s=60.0,
)


def test_a_batch_is_the_fixed_point_of_sessions_and_turn_time() -> None:
    # A batch of 10 takes 100 x 0.02 = 2 s a turn, and 5 s in the sandbox: 10 x (1 + 5/2) = 35.
    served = serve(MODEL, SHAPE, 35.0)
    assert served.running == pytest.approx(10.0, rel=1e-5)
    assert served.turns_per_s == pytest.approx(5.0, rel=1e-5)
    assert served.in_flight == pytest.approx(10.0, rel=1e-5)
    assert served.queued == pytest.approx(0.0, abs=1e-4)
    # A full batch of 20 takes 3 s: 20 x (1 + 5/3) = 53.3 sessions; of 80, the rest waits.
    full = serve(MODEL, SHAPE, 80.0)
    assert (full.running, full.turns_per_s) == (20.0, pytest.approx(20.0 / 3.0))
    assert full.queued == pytest.approx(80.0 - 20.0 / 3.0 * 5.0 - 20.0)


def test_prefill_of_the_others_takes_its_part_of_a_turn() -> None:
    # 10 x 200 tokens x 0.1 ms = 0.2 s on top of 2 s: 10 x (1 + 5/2.2) sessions.
    shape = replace(SHAPE, new_tokens=200.0)
    served = serve(MODEL, shape, 10.0 * (1.0 + 5.0 / 2.2))
    assert served.running == pytest.approx(10.0, rel=1e-5)
    assert served.turns_per_s == pytest.approx(10.0 / 2.2, rel=1e-5)


def test_caches_that_do_not_fit_are_computed_again() -> None:
    # 40 sessions of 1000 tokens in a cache of 30,000: a quarter is missing, 250 tokens a turn.
    small = replace(MODEL, kv_tokens=30_000)
    served = serve(small, SHAPE, 40.0)
    assert served.kv_used_frac == pytest.approx(4.0 / 3.0)
    assert served.reprefill_frac == 1.0
    assert served.turns_per_s < serve(MODEL, SHAPE, 40.0).turns_per_s


def test_one_more_session_never_lowers_the_rate_while_the_cache_is_large() -> None:
    rates = [serve(MODEL, SHAPE, float(n)).turns_per_s for n in range(1, 120)]
    assert all(b >= a - 1e-9 for a, b in itertools.pairwise(rates))


def test_the_best_load_is_a_full_batch_and_gives_the_rate_in_trajectories() -> None:
    best = best_load(MODEL, SHAPE)
    assert best.turns_per_s == pytest.approx(20.0 / 3.0)
    assert trajectories_per_s(MODEL, SHAPE) == pytest.approx(2.0 / 3.0)


def test_what_does_not_fit_is_not_served() -> None:
    assert most_running(replace(MODEL, kv_tokens=5_500), SHAPE) == 5.0
    assert trajectories_per_s(replace(MODEL, kv_tokens=900), SHAPE) == 0.0
    long = replace(SHAPE, context_tokens=9000.0)
    assert trajectories_per_s(MODEL, long) == 0.0
    assert serve(MODEL, long, 3.0).in_flight == 3.0
