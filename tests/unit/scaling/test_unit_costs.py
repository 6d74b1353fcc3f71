"""What a trained trajectory and 1,000 trained tokens cost."""

import pytest

from rlmix.scaling.costs import CostMeter, StepCost
from rlmix.scaling.unit_costs import unit_cost_metrics


def test_a_steps_cost_is_spread_over_what_it_trained_in_all_and_by_pool() -> None:
    cost = StepCost(usd=0.60, by_pool_usd={"a": 0.40, "b": 0.20}, replica_s={}, is_modelled=True)
    found = unit_cost_metrics(cost, trajectories={"a": 80, "b": 20}, tokens={"a": 8000, "b": 4000})
    assert found == pytest.approx(
        {
            "cost/trajectory_usd": 0.006,
            "cost/per_1k_tokens_usd": 0.05,
            "cost/trajectory_by_pool/a_usd": 0.005,
            "cost/trajectory_by_pool/b_usd": 0.01,
            "cost/per_1k_tokens_by_pool/a_usd": 0.05,
            "cost/per_1k_tokens_by_pool/b_usd": 0.05,
        }
    )


def test_a_pool_that_trained_nothing_is_paid_for_by_the_others() -> None:
    """It boots or is in quarantine: held, so billed; its own price is not known."""
    meter = CostMeter({"a": 36.0, "held": 36.0}, is_modelled=True)
    meter.observe(0.0, {"a": 1, "held": 1})
    cost = meter.close_interval(10.0)
    found = unit_cost_metrics(cost, trajectories={"a": 10}, tokens={"a": 1000})
    # 2 replicas x 10 s x 0.01 USD/s.
    assert found["cost/per_1k_tokens_usd"] == pytest.approx(0.20)
    assert found["cost/per_1k_tokens_by_pool/a_usd"] == pytest.approx(0.10)
    assert not [key for key in found if "/held_usd" in key]
    assert unit_cost_metrics(cost, trajectories={}, tokens={}) == {}
