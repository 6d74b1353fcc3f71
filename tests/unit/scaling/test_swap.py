"""Exchanging replicas while supply is right: worked prices, limits, calm, no way back."""

import random
from dataclasses import replace

import pytest

from rlmix.scaling.policy import (
    FleetLimits,
    Observation,
    PolicyRules,
    PolicyState,
    PoolLimits,
    PoolSeen,
    decide,
)
from rlmix.scaling.swap import SwapPool, SwapRules, best_swap

SWAP = SwapRules(payback_s=7200.0, drain_s=300.0)
B200 = SwapPool(
    name="b200", usd_per_hour=5.0, per_s=1.0, cold_start_s=300.0, may_leave=2, may_come=4
)
H100 = replace(B200, name="h100", usd_per_hour=3.0, per_s=0.4)

RULES = PolicyRules(
    headroom_frac=0.0,
    surplus_frac=0.5,
    out_delay_s=60.0,
    in_delay_s=600.0,
    in_cold_starts=3.0,
    zero_delay_s=1800.0,
    most_changes=8,
    wait_high_frac=0.2,
    kv_high_frac=0.95,
    queued_high_frac=1.0,
    reprefill_high_frac=0.3,
    swap=SWAP,
)
SEEN = (
    PoolSeen(
        name="b200", accelerator="b200", gpus=1, usd_per_hour=5.0, per_s=1.0, ready=2,
        cold_start_s=300.0,
    ),
    PoolSeen(
        name="h100", accelerator="h100", gpus=1, usd_per_hour=3.0, per_s=0.4, ready=2,
        cold_start_s=300.0,
    ),
)  # fmt: skip
MAY_BE_ZERO = FleetLimits(pools={"h100": PoolLimits(floor=0, may_be_zero=True)})


def test_two_slow_replicas_go_for_a_fast_one_when_that_pays_in_time() -> None:
    found = best_swap([B200, H100], supply_per_s=2.8, wanted_per_s=2.8, rules=SWAP)
    assert found is not None
    assert (found.out, found.num_out, found.into, found.num_in) == ("h100", 2, "b200", 1)
    assert found.saved_usd_per_hour == pytest.approx(1.0)
    # 300 s of 5 USD/h, and 300 s of two at 3.
    assert found.exchange_usd == pytest.approx(5.0 / 12 + 6.0 / 12)
    assert found.net_usd(7200.0) == pytest.approx(2.0 - 11.0 / 12)
    # Paid back after 55 minutes, so not in 50.
    hasty = replace(SWAP, payback_s=3000.0)
    assert best_swap([B200, H100], supply_per_s=2.8, wanted_per_s=2.8, rules=hasty) is None


def test_no_exchange_lowers_supply_costs_more_or_passes_a_limit() -> None:
    draw = random.Random(5)
    made = 0
    for _ in range(400):
        pools = [
            SwapPool(
                name=name,
                usd_per_hour=draw.uniform(1, 6),
                per_s=draw.choice([0.0, draw.uniform(0.05, 1.5)]),
                cold_start_s=draw.uniform(60, 900),
                may_leave=draw.randint(0, 4),
                may_come=draw.randint(0, 4),
            )
            for name in "abc"
        ]
        supply = draw.uniform(1, 5)
        wanted = supply * draw.uniform(0.7, 1.0)
        swap = best_swap(pools, supply_per_s=supply, wanted_per_s=wanted, rules=SWAP)
        if swap is None:
            continue
        made += 1
        by_name = {pool.name: pool for pool in pools}
        old, new = by_name[swap.out], by_name[swap.into]
        assert 1 <= swap.num_out <= old.may_leave
        assert 1 <= swap.num_in <= new.may_come
        after = supply - swap.num_out * old.per_s + swap.num_in * new.per_s
        assert after >= wanted - 1e-6
        assert swap.saved_usd_per_hour == pytest.approx(
            swap.num_out * old.usd_per_hour - swap.num_in * new.usd_per_hour
        )
        assert swap.net_usd(SWAP.payback_s) > 0
    assert made > 50


def seen(now_s: float, pools: tuple[PoolSeen, ...] = SEEN, *, needed: float = 2.8) -> Observation:
    return Observation(
        now_s=now_s, pools=pools, needed_per_s=needed, finished_per_s=None, trainer_wait_frac=0.0
    )


def decided(times: list[float], limits: FleetLimits = MAY_BE_ZERO, **changes: object):  # type: ignore[no-untyped-def]
    state = PolicyState()
    rules = replace(RULES, **changes)  # type: ignore[arg-type]
    for now_s in times:
        decision = decide(seen(now_s), state=state, limits=limits, rules=rules)
        state = decision.state
    return decision


def test_the_policy_exchanges_after_calm_and_says_why() -> None:
    # Three cold starts are 900 s; the last h100 goes after 1,800 s only.
    assert decided([0.0, 899.0]).targets == {"b200": 2, "h100": 2}
    decision = decided([0.0, 1800.0])
    assert decision.targets == {"b200": 3, "h100": 0}
    assert {change.pool for change in decision.changes} == {"b200", "h100"}
    assert "1 b200 do the work of 2 h100 for 1 USD/h less" in decision.changes[0].reason
    assert decided([0.0, 1800.0], swap=None).targets == {"b200": 2, "h100": 2}


@pytest.mark.parametrize(
    "limits",
    [
        FleetLimits(pools={}),
        replace(MAY_BE_ZERO, quota_gpus={"b200": 2}),
        replace(MAY_BE_ZERO, usd_per_hour=18.0),
        FleetLimits(pools={**MAY_BE_ZERO.pools, "b200": PoolLimits(ceiling=2)}),
    ],
    ids=["floor", "quota", "budget while both are there", "ceiling"],
)
def test_limits_hold_while_old_and_new_are_there(limits: FleetLimits) -> None:
    # With a floor of one h100 a b200 for one of them would be dearer.
    assert decided([0.0, 1800.0], limits).targets == {"b200": 2, "h100": 2}


def test_an_exchange_is_not_undone_and_none_begins_beside_another_change() -> None:
    after = (replace(SEEN[0], ready=3), replace(SEEN[1], ready=0))
    state = PolicyState()
    for now_s in range(0, 40_000, 600):
        decision = decide(seen(float(now_s), after), state=state, limits=MAY_BE_ZERO, rules=RULES)
        state = decision.state
        assert decision.targets == {"b200": 3, "h100": 0}
    # A replica that is on its way belongs to a change that has not ended.
    busy = (replace(SEEN[0], ready=1, starting=1), SEEN[1])
    state = PolicyState()
    for now_s in (0.0, 5000.0):
        decision = decide(seen(now_s, busy), state=state, limits=MAY_BE_ZERO, rules=RULES)
        state = decision.state
    assert not decision.changes
