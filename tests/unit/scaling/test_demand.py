"""Demand: what the trainer takes, within the staleness bound."""

from dataclasses import replace

import pytest

from rlmix.scaling.demand import TrainerNeed, cycle_s, trajectories_per_s

NEED = TrainerNeed(
    sessions_per_step=1024, step_s=60.0, max_staleness=8, session_s=600.0, waste_frac=0.1
)


def test_sessions_that_would_come_too_old_slow_the_demand_down() -> None:
    # 600 s within 8 versions: 75 s a version at least; 1024 / 75 / 0.9.
    assert cycle_s(NEED) == 75.0
    assert trajectories_per_s(NEED) == pytest.approx(15.170, abs=1e-3)
    # With short sessions the trainer itself decides: 1024 / 60 / 0.9.
    assert trajectories_per_s(replace(NEED, session_s=300.0)) == pytest.approx(18.963, abs=1e-3)


def test_without_staleness_a_step_follows_its_sessions() -> None:
    # 60 + 600 s a step: 1024 / 660 / 0.9.
    assert trajectories_per_s(replace(NEED, max_staleness=0)) == pytest.approx(1.7239, abs=1e-4)


def test_demand_rises_with_size_and_waste_and_falls_with_time() -> None:
    base = trajectories_per_s(NEED)
    assert trajectories_per_s(replace(NEED, sessions_per_step=2048)) == pytest.approx(2 * base)
    assert trajectories_per_s(replace(NEED, waste_frac=0.2)) > base
    assert trajectories_per_s(replace(NEED, step_s=90.0)) < base
    rates = [trajectories_per_s(replace(NEED, max_staleness=s)) for s in range(12)]
    assert rates == sorted(rates)
    assert rates[10] == rates[11] == pytest.approx(1024 / 60 / 0.9)


def test_nothing_is_needed_for_no_sessions_and_waste_has_a_bound() -> None:
    assert trajectories_per_s(replace(NEED, sessions_per_step=0)) == 0.0
    with pytest.raises(ValueError, match=r"waste_frac=1\.0"):
        trajectories_per_s(replace(NEED, waste_frac=1.0))
    with pytest.raises(ValueError, match=r"step_s=-1\.0"):
        cycle_s(replace(NEED, step_s=-1.0))
