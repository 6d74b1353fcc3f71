"""The scaling policy: worked decisions, limits, hysteresis, monotonicity."""

from dataclasses import replace

import pytest

from rlmix.scaling.policy import (
    Decision,
    FleetLimits,
    Observation,
    PolicyRules,
    PolicyState,
    PoolLimits,
    PoolSeen,
    decide,
)

RULES = PolicyRules(
    headroom_frac=0.1,
    surplus_frac=0.3,
    out_delay_s=60.0,
    in_delay_s=600.0,
    in_cold_starts=3.0,
    zero_delay_s=1800.0,
    most_changes=8,
    wait_high_frac=0.2,
    kv_high_frac=0.95,
    queued_high_frac=1.0,
    reprefill_high_frac=0.3,
)
LIMITS = FleetLimits(pools={})

# Price of a trajectory: b200 5.0 / 1.0 = 5, h100 3.0 / 0.4 = 7.5, a100 1.5 / 0.1 = 15.
B200 = PoolSeen(
    name="b200", accelerator="b200", gpus=1, usd_per_hour=5.0, per_s=1.0, ready=2,
    cold_start_s=300.0,
)  # fmt: skip
H100 = replace(B200, name="h100", accelerator="h100", usd_per_hour=3.0, per_s=0.4, ready=2)
A100 = replace(B200, name="a100", accelerator="a100", usd_per_hour=1.5, per_s=0.1, ready=2)
# Supply: 2 + 0.8 + 0.2 = 3.0.
POOLS = (B200, H100, A100)


def seen(needed_per_s: float, *, now_s: float = 0.0, pools: tuple[PoolSeen, ...] = POOLS, wait: float = 0.0, finished: float = 1.0) -> Observation:  # fmt: skip  # noqa: E501
    return Observation(
        now_s=now_s,
        pools=pools,
        needed_per_s=needed_per_s,
        finished_per_s=finished,
        trainer_wait_frac=wait,
    )


def after(delay_s: float, needed_per_s: float, *, limits: FleetLimits = LIMITS, pools: tuple[PoolSeen, ...] = POOLS, state: PolicyState | None = None) -> Decision:  # fmt: skip  # noqa: E501
    """The decision when the same has been seen `delay_s` ago too."""
    first = decide(
        seen(needed_per_s, pools=pools), state=state or PolicyState(), limits=limits, rules=RULES
    )
    return decide(
        seen(needed_per_s, now_s=delay_s, pools=pools),
        state=first.state,
        limits=limits,
        rules=RULES,
    )


def test_nothing_changes_while_supply_is_between_headroom_and_surplus() -> None:
    # 2.6 x 1.1 = 2.86 is covered by 3.0; 2.6 x 1.3 = 3.38 is not, so nothing can be spared.
    decision = after(10_000.0, 2.6)
    assert decision.changes == ()
    assert decision.targets == {"b200": 2, "h100": 2, "a100": 2}
    assert decision.supply_per_s == pytest.approx(3.0)
    assert decision.unmet_per_s == 0.0


def test_a_shortage_is_met_by_the_lowest_price_per_missing_trajectory() -> None:
    # 3.6 x 1.1 = 3.96: 0.96 missing. b200 5 / 0.96 = 5.2, h100 3 / 0.4 = 7.5, a100 15: b200.
    assert after(60.0, 3.6).targets == {"b200": 3, "h100": 2, "a100": 2}
    # 3.0 x 1.1 = 3.3: 0.3 missing. b200 5 / 0.3 = 16.7, h100 3 / 0.3 = 10, a100 1.5 / 0.1 = 15.
    assert after(60.0, 3.0).targets == {"b200": 2, "h100": 3, "a100": 2}
    # 2.8 x 1.1 = 3.08: 0.08 missing. b200 62.5, h100 37.5, a100 1.5 / 0.08 = 18.75.
    assert after(60.0, 2.8).targets == {"b200": 2, "h100": 2, "a100": 3}


def test_a_shortage_must_last_and_what_is_ordered_is_not_ordered_again() -> None:
    assert after(59.0, 3.6).changes == ()
    ordered = after(60.0, 3.6)
    booting = (replace(B200, starting=1), H100, A100)
    again = decide(
        seen(3.6, now_s=120.0, pools=booting), state=ordered.state, limits=LIMITS, rules=RULES
    )
    assert again.changes == ()


def test_the_dearest_replicas_go_first_and_only_after_three_cold_starts() -> None:
    # 2.0 x 1.3 = 2.6 must remain of 3.0: both a100 (15 a trajectory), then no h100 (2.4 < 2.6).
    limits = FleetLimits(pools={"a100": PoolLimits(floor=0, may_be_zero=True)})
    assert after(899.0, 2.0, limits=limits).changes == ()
    # The last replica of a pool stays until half an hour has passed.
    assert after(900.0, 2.0, limits=limits).targets == {"b200": 2, "h100": 2, "a100": 1}
    assert after(1800.0, 2.0, limits=limits).targets == {"b200": 2, "h100": 2, "a100": 0}
    # Where zero is not allowed one stays for good; then h100 would leave too little.
    assert after(9000.0, 2.0).targets == {"b200": 2, "h100": 2, "a100": 1}


def test_a_pool_that_has_just_grown_does_not_shrink_before_three_of_its_cold_starts() -> None:
    grown = PolicyState(grown_s={"a100": 500.0})
    assert after(1399.0, 2.0, state=grown).changes == ()
    assert after(1400.0, 2.0, state=grown).targets["a100"] == 1


def test_demand_that_swings_faster_than_a_cold_start_moves_nothing_back() -> None:
    state = PolicyState()
    history = []
    pools = POOLS
    for minute in range(60):
        needed = 3.6 if minute % 10 < 5 else 2.0
        decision = decide(
            seen(needed, now_s=60.0 * minute, pools=pools), state=state, limits=LIMITS, rules=RULES
        )
        state = decision.state
        pools = tuple(replace(pool, ready=decision.targets[pool.name]) for pool in pools)
        history += [(change.pool, change.replicas_to) for change in decision.changes]
    # One order at minute 1; every surplus is shorter than the 15 minutes it must last.
    assert history == [("b200", 3)]


def test_a_waiting_trainer_keeps_everything() -> None:
    state = PolicyState()
    for now_s in (0.0, 5000.0):
        decision = decide(seen(2.0, now_s=now_s, wait=0.3), state=state, limits=LIMITS, rules=RULES)
        state = decision.state
        assert decision.changes == ()


def test_strained_engines_and_a_waiting_trainer_correct_rates_that_promise_too_much() -> None:
    full = tuple(replace(pool, kv_used_frac=1.2) for pool in POOLS)
    first = decide(
        seen(2.6, pools=full, wait=0.5, finished=1.5),
        state=PolicyState(),
        limits=LIMITS,
        rules=RULES,
    )
    # 1.5 finished of 3.0 promised: half; the state goes half way from 1.
    assert first.state.calibration == pytest.approx(0.75)
    # Supply counts as 2.25 now, below 2.86: 0.61 missing, and a b200 brings 0.75.
    second = decide(
        seen(2.6, now_s=60.0, pools=full, wait=0.5, finished=2.25),
        state=first.state,
        limits=LIMITS,
        rules=RULES,
    )
    assert second.targets["b200"] == 3
    # A fleet that is not full shows only a lower bound, which corrects upwards.
    calm = decide(seen(1.0, finished=2.7), state=first.state, limits=LIMITS, rules=RULES)
    assert calm.state.calibration == pytest.approx(0.9)


def test_sessions_that_time_out_and_lost_caches_lower_the_supply() -> None:
    # b200 counts 2 x 1.0 x 0.8 = 1.6; h100 2 x 0.4 x (1 - (0.55 - 0.3)) = 0.6; a100 0.2.
    pools = (replace(B200, timeout_frac=0.2), replace(H100, reprefill_frac=0.55), A100)
    decision = decide(seen(2.0, pools=pools), state=PolicyState(), limits=LIMITS, rules=RULES)
    assert decision.supply_per_s == pytest.approx(2.4)


def test_quota_ceiling_and_budget_hold_and_are_named() -> None:
    limits = FleetLimits(
        pools={"a100": PoolLimits(ceiling=2)}, quota_gpus={"b200": 3}, usd_per_hour=28.0
    )
    # 19 USD/h now; a third b200 makes 24, an h100 27; then nothing fits.
    decision = after(60.0, 10.0, limits=limits)
    assert decision.targets == {"b200": 3, "h100": 3, "a100": 2}
    assert decision.supply_per_s == pytest.approx(4.4)
    assert decision.unmet_per_s == pytest.approx(5.6)
    assert decision.blocked_by == ("budget (28 USD/h)", "ceiling of a100 (2)", "quota of b200 (3)")


def test_pools_on_one_accelerator_share_its_quota_and_draining_replicas_count() -> None:
    twin = replace(B200, name="b200_bf16", per_s=0.5, ready=1, draining=1)
    limits = FleetLimits(pools={}, quota_gpus={"b200": 5})
    decision = after(60.0, 20.0, limits=limits, pools=(B200, twin))
    # 2 + 1 + 1 draining: one is left, and the better pool gets it.
    assert decision.targets == {"b200": 3, "b200_bf16": 1}


def test_floors_of_open_groups_hold_even_where_zero_is_allowed() -> None:
    limits = FleetLimits(pools={"a100": PoolLimits(floor=0, may_be_zero=True)})
    pools = (B200, H100, replace(A100, in_flight_floor=2))
    assert after(9000.0, 2.0, limits=limits, pools=pools).targets["a100"] == 2


def test_floors_and_ceilings_are_repaired_at_once() -> None:
    limits = FleetLimits(pools={"b200": PoolLimits(floor=4), "a100": PoolLimits(ceiling=1)})
    decision = decide(seen(2.6), state=PolicyState(), limits=limits, rules=RULES)
    assert decision.targets == {"b200": 4, "h100": 2, "a100": 1}
    assert [change.reason for change in decision.changes] == ["floor", "ceiling"]


def test_more_demand_never_takes_a_replica_away_and_supply_follows() -> None:
    for tenths in range(1, 80):
        low, high = after(5000.0, tenths / 10.0), after(5000.0, tenths / 10.0 + 0.1)
        assert high.supply_per_s >= min(low.supply_per_s, (tenths / 10.0 + 0.1) * 1.1 - 1e-9)
        grown = [pool for pool in POOLS if low.targets[pool.name] > pool.ready]
        if grown:
            assert all(high.targets[pool.name] >= pool.ready for pool in POOLS)


def test_a_fleet_scales_from_and_to_zero_where_allowed() -> None:
    limits = FleetLimits(pools={pool.name: PoolLimits(floor=0, may_be_zero=True) for pool in POOLS})
    assert after(1800.0, 0.0, limits=limits).targets == {"b200": 0, "h100": 0, "a100": 0}
    empty = tuple(replace(pool, ready=0) for pool in POOLS)
    # 0.9 x 1.1 = 0.99: b200 5 / 0.99 = 5.1, h100 7.5, a100 15.
    assert after(60.0, 0.9, limits=limits, pools=empty).targets["b200"] == 1
