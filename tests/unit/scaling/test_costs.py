"""Costs: replica-seconds times price, idle time included."""

import pytest

from rlmix.scaling.costs import CostMeter, interval_cost, unit_costs

PRICES = {"b200": 4.5, "h100": 1.8}


def test_step_cost_is_replica_seconds_times_hourly_price() -> None:
    # 2 replicas x 30 s = 60 s of b200 = 1/60 h x 4.50 = 0.075; 40 s of h100 = 0.02.
    cost = interval_cost({"b200": 60.0, "h100": 40.0}, PRICES, is_modelled=True)
    assert cost.by_pool_usd == pytest.approx({"b200": 0.075, "h100": 0.02})
    assert cost.usd == pytest.approx(0.095)
    assert cost.metrics() == pytest.approx(
        {
            "cost/step_usd": 0.095,
            "cost/by_pool/b200_usd": 0.075,
            "cost/by_pool/h100_usd": 0.02,
        }
    )
    assert cost.is_modelled


def test_pool_without_a_price_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no price for pool a100; priced are b200, h100"):
        interval_cost({"a100": 1.0}, PRICES, is_modelled=True)
    with pytest.raises(ValueError, match="no price for pool a100"):
        CostMeter(PRICES, is_modelled=True).observe(0.0, {"a100": 1})


def test_idle_replicas_cost_as_much_as_busy_ones() -> None:
    # The meter is never told about load: 100 s x 1 replica x 3.60 USD/h = 0.10.
    meter = CostMeter({"a": 3.6}, is_modelled=False)
    meter.observe(0.0, {"a": 1})
    assert meter.close_interval(100.0).usd == pytest.approx(0.10)


def test_scaling_in_the_middle_of_a_step_is_paid_by_the_second() -> None:
    meter = CostMeter({"a": 3600.0, "b": 7200.0}, is_modelled=True)
    meter.observe(10.0, {"a": 1})
    meter.observe(14.0, {"a": 3, "b": 1})
    meter.observe(16.0, {"b": 1})
    cost = meter.close_interval(20.0)
    assert cost.replica_s == {"a": 1 * 4 + 3 * 2, "b": 2 + 4}
    assert cost.usd == pytest.approx(10 * 1.0 + 6 * 2.0)


def test_intervals_add_up_and_replicas_stay_held_between_them() -> None:
    meter = CostMeter({"a": 3600.0}, is_modelled=True)
    meter.observe(0.0, {"a": 2})
    assert meter.close_interval(5.0).usd == pytest.approx(10.0)
    assert meter.close_interval(6.0).usd == pytest.approx(2.0)
    assert meter.total_usd == pytest.approx(12.0)
    assert meter.usd_per_hour == 7200.0


def test_nothing_is_charged_before_the_first_observation() -> None:
    assert CostMeter(PRICES, is_modelled=True).close_interval(1e9).usd == 0.0


def test_clock_that_goes_back_is_refused() -> None:
    meter = CostMeter(PRICES, is_modelled=True)
    meter.observe(10.0, {"b200": 1})
    with pytest.raises(ValueError, match="went back"):
        meter.close_interval(9.0)


def test_a_step_is_priced_by_trajectory_and_by_a_thousand_trained_tokens() -> None:
    # 0.60 USD: 120 trajectories at 0.005, 48,000 tokens at 0.0125 a thousand.
    assert unit_costs(0.60, trajectories=120, trained_tokens=48_000).metrics() == pytest.approx(
        {"cost/trajectory_usd": 0.005, "cost/per_1k_tokens_usd": 0.0125}
    )
    # A step in which everything was dropped has no price for what it did not make.
    assert unit_costs(0.60, trajectories=0, trained_tokens=0).metrics() == {}
    with pytest.raises(ValueError, match="negative amount: -1 trajectories"):
        unit_costs(0.60, trajectories=-1, trained_tokens=5)
