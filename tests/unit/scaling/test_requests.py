"""What a request to scale may ask for, which replicas go, and in which order."""

from dataclasses import replace

import pytest

from rlmix.core.errors import ConfigError
from rlmix.scaling.policy import FleetLimits, PoolLimits
from rlmix.scaling.requests import (
    Candidate,
    PoolSize,
    check_targets,
    choose_removed,
    free_indices,
    grows_first,
)

POOLS = {
    "h100": PoolSize(accelerator="h100", gpus=2, usd_per_hour=6.0, replicas=2),
    "h100_bf16": PoolSize(accelerator="h100", gpus=2, usd_per_hour=6.0, replicas=1),
    "a100": PoolSize(accelerator="a100", gpus=1, usd_per_hour=2.0, replicas=1),
}
LIMITS = FleetLimits(
    pools={"h100": PoolLimits(floor=1, ceiling=3)}, quota_gpus={"h100": 8}, usd_per_hour=26.0
)


def check(targets, **pools):
    check_targets(targets, pools=POOLS | pools, limits=LIMITS)


def test_a_request_within_all_limits_passes_and_floors_are_only_the_policy_s():
    check({"h100": 3, "a100": 0})
    check({"h100": 0})


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ({}, "no pool is named"),
        ({"x": 1}, "x=1: no pool 'x'; pools are h100, h100_bf16, a100"),
        ({"a100": -1}, "a pool has 0 replicas or more"),
        ({"h100": 4}, "h100=4: above the ceiling of 3"),
        ({"h100": 0, "h100_bf16": 0, "a100": 0}, "nothing could sample"),
        # 3 + 2 replicas of 2 are 10 accelerators.
        ({"h100": 3, "h100_bf16": 2}, "would need 10 h100, and the inventory has 8"),
        # 18 + 2 * 5 = 28 USD an hour.
        ({"a100": 5}, r"would cost 28\.00 USD/h, and scaling.budget_usd_per_hour is 26"),
    ],
)
def test_what_is_not_allowed_is_refused_with_one_sentence(targets, said):
    with pytest.raises(ConfigError, match=said):
        check(targets)


def test_a_pool_in_quarantine_gets_smaller_only_and_does_not_count_as_one_that_serves():
    held = replace(POOLS["a100"], is_held=True)
    with pytest.raises(ConfigError, match="in quarantine"):
        check({"a100": 2}, a100=held)
    check({"a100": 0}, a100=held)
    with pytest.raises(ConfigError, match="nothing could sample"):
        check({"h100": 0, "h100_bf16": 0}, a100=held)


def test_over_the_budget_already_a_pool_may_still_be_made_smaller():
    poor = replace(LIMITS, usd_per_hour=5.0)
    check_targets({"h100": 1}, pools=POOLS, limits=poor)


def test_new_replicas_serve_first_only_where_both_fit():
    # 3 + 1 replicas of 2 are the 8 accelerators; 6 * 4 + 2 = 26 USD an hour.
    assert grows_first({"h100": 3, "h100_bf16": 0}, pools=POOLS, limits=LIMITS)
    draining = POOLS | {"h100_bf16": replace(POOLS["h100_bf16"], draining=1)}
    assert not grows_first({"h100": 3, "h100_bf16": 0}, pools=draining, limits=LIMITS)
    poor = replace(LIMITS, usd_per_hour=25.0)
    assert not grows_first({"h100": 3, "h100_bf16": 0}, pools=POOLS, limits=poor)


def one(name, *, serves=True, sessions=0, in_flight=0):
    return Candidate(name=name, is_serving=serves, sessions=sessions, in_flight=in_flight)


def test_those_that_serve_nobody_go_first_then_those_with_the_fewest_sessions():
    candidates = [
        one("h100-0", sessions=4), one("h100-1", sessions=2, in_flight=2),
        one("h100-2", sessions=2, in_flight=1), one("h100-3", serves=False),
        one("h100-10", sessions=4), one("h100-9", sessions=4),
    ]  # fmt: skip
    assert choose_removed(candidates, 6) == [
        "h100-3", "h100-2", "h100-1", "h100-10", "h100-9", "h100-0",
    ]  # fmt: skip
    assert choose_removed(candidates, 0) == []


def test_a_new_replica_gets_the_lowest_free_number():
    assert free_indices("h100", ["h100-0", "h100-2", "a100-1"], 3) == [1, 3, 4]
