"""The planner against every possible fleet, and what it says when none will do."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rlmix.core.errors import PlanError
from rlmix.scaling.planner import PoolOffer, best_homogeneous, cheapest_mix
from rlmix.scaling.policy import FleetLimits, PoolLimits

SHORT, LONG = "8K", "64K"
B200 = PoolOffer(
    name="b200", accelerator="b200", gpus=1, usd_per_hour=5.0, per_s={SHORT: 1.0, LONG: 0.25}
)
H100 = PoolOffer(
    name="h100", accelerator="h100", gpus=1, usd_per_hour=2.0, per_s={SHORT: 0.5, LONG: 0.05}
)
A100 = PoolOffer(
    name="a100", accelerator="a100", gpus=2, usd_per_hour=3.0, per_s={SHORT: 0.5, LONG: 0.0}
)
OFFERS = (B200, H100, A100)
NO_LIMITS = FleetLimits(pools={})


def test_each_context_length_goes_where_it_is_cheapest() -> None:
    # 8K: h100 2 / 0.5 = 4 a trajectory, b200 5, a100 6. 64K: b200 20, h100 40.
    mix = cheapest_mix(OFFERS, {SHORT: 1.5, LONG: 0.5}, limits=NO_LIMITS)
    assert mix.replicas == {"b200": 2, "h100": 3, "a100": 0}
    assert mix.usd_per_hour == pytest.approx(16.0)
    assert mix.gpus == 5
    assert mix.missing is None
    assert mix.shares["b200"][LONG] == pytest.approx(2.0)


def test_whole_replicas_are_bought_so_a_rest_is_shared() -> None:
    # 1.6 of 8K on h100 alone: 4 for 8; and 0.5 of 64K: 2 b200 for 10, used to the full.
    # With 0.45 of 64K the two b200 have 0.2 of a replica left: 0.2 of 8K, so 3 h100 will do: 16.
    assert cheapest_mix(OFFERS, {SHORT: 1.6, LONG: 0.5}, limits=NO_LIMITS).usd_per_hour == 18.0
    assert cheapest_mix(OFFERS, {SHORT: 1.6, LONG: 0.45}, limits=NO_LIMITS).usd_per_hour == 16.0


def test_a_quota_is_the_reason_to_mix() -> None:
    limits = FleetLimits(pools={}, quota_gpus={"h100": 2, "b200": 1})
    mix = cheapest_mix(OFFERS, {SHORT: 2.5}, limits=limits)
    # 2 h100 (1.0) and 1 b200 (1.0) leave 0.5 for one replica on two a100.
    assert mix.replicas == {"b200": 1, "h100": 2, "a100": 1}
    assert mix.usd_per_hour == pytest.approx(12.0)
    assert best_homogeneous([B200, H100], {SHORT: 2.5}, limits=limits) is None


def test_what_cannot_be_met_says_how_much_is_missing_and_why() -> None:
    limits = FleetLimits(
        pools={"h100": PoolLimits(floor=0, ceiling=2)}, quota_gpus={"b200": 1, "a100": 3}
    )
    mix = cheapest_mix(OFFERS, {SHORT: 4.0}, limits=limits)
    assert mix.missing is not None
    # 1 + 2 x 0.5 + 0.5 = 2.5 of 4.
    assert mix.missing.per_s == pytest.approx({SHORT: 1.5})
    assert mix.missing.sentence == (
        "8K lacks 1.5/s; at their limit: quota of b200 (1), ceiling of h100 (2), quota of a100 (3)"
    )
    assert mix.replicas == {"b200": 1, "h100": 2, "a100": 1}


def test_a_context_that_fits_nowhere_is_missing_without_a_limit() -> None:
    mix = cheapest_mix([A100], {LONG: 1.0}, limits=NO_LIMITS)
    assert mix.missing is not None
    assert mix.missing.sentence == "64K lacks 1/s; at their limit: no pool can serve it"
    assert mix.replicas == {"a100": 0}


def test_a_budget_is_a_limit_and_contradicting_floors_are_refused() -> None:
    mix = cheapest_mix(OFFERS, {SHORT: 2.0}, limits=FleetLimits(pools={}, usd_per_hour=7.0))
    assert mix.missing is not None
    # A b200 and an h100 for 7 serve 1.5; three h100 for 6 serve as much, so they are taken.
    assert mix.usd_per_hour == pytest.approx(6.0)
    assert mix.missing.sentence == "8K lacks 0.5/s; at their limit: budget (7 USD/h)"
    floors = FleetLimits(pools={"b200": PoolLimits(floor=2)}, quota_gpus={"b200": 1})
    with pytest.raises(PlanError, match=r"the floors .b200=2"):
        cheapest_mix([B200], {SHORT: 1.0}, limits=floors)


def brute_force(
    offers: Sequence[PoolOffer], demand: Mapping[str, float], most: Mapping[str, int]
) -> float | None:
    """Lowest price over all fleets; one bucket, so shares need no programme."""
    (bucket,) = demand
    prices = [
        sum(n * one.usd_per_hour for n, one in zip(counts, offers, strict=True))
        for counts in itertools.product(*(range(most[one.name] + 1) for one in offers))
        if sum(n * one.per_s[bucket] for n, one in zip(counts, offers, strict=True))
        >= demand[bucket] - 1e-9
    ]
    return min(prices, default=None)


@pytest.mark.parametrize("seed", range(25))
def test_no_fleet_is_cheaper_and_no_homogeneous_one_either(seed: int) -> None:
    draw = random.Random(seed)
    offers = [
        PoolOffer(
            name=f"p{index}",
            accelerator=f"p{index}",
            gpus=1,
            usd_per_hour=round(draw.uniform(1.0, 8.0), 2),
            per_s={SHORT: round(draw.uniform(0.05, 1.0), 2)},
        )
        for index in range(3)
    ]
    most = {one.name: draw.randint(1, 6) for one in offers}
    demand = {SHORT: round(draw.uniform(0.1, 6.0), 2)}
    limits = FleetLimits(pools={}, quota_gpus=most)
    mix = cheapest_mix(offers, demand, limits=limits)
    cheapest = brute_force(offers, demand, most)
    if cheapest is None:
        assert mix.missing is not None
        best = sum(most[one.name] * one.per_s[SHORT] for one in offers)
        assert mix.missing.per_s[SHORT] == pytest.approx(demand[SHORT] - best, abs=1e-6)
        return
    assert mix.missing is None
    assert mix.usd_per_hour == pytest.approx(cheapest)
    alone = best_homogeneous(offers, demand, limits=limits)
    assert alone is None or mix.usd_per_hour <= alone.usd_per_hour + 1e-9


def test_more_demand_never_costs_less_and_a_lower_price_never_more() -> None:
    prices = [
        cheapest_mix(OFFERS, {SHORT: tenths / 10.0, LONG: 0.3}, limits=NO_LIMITS).usd_per_hour
        for tenths in range(1, 30)
    ]
    assert prices == sorted(prices)
    cheaper = (replace(B200, usd_per_hour=4.0), H100, A100)
    demand = {SHORT: 2.2, LONG: 0.7}
    before = cheapest_mix(OFFERS, demand, limits=NO_LIMITS).usd_per_hour
    assert cheapest_mix(cheaper, demand, limits=NO_LIMITS).usd_per_hour <= before
