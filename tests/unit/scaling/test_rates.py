"""What a replica is believed to finish, from what fleets show."""

import pytest

from rlmix.scaling.rates import PoolWindow, Rates, learn


def window(ready, finished, used_frac=0.5):
    return PoolWindow(ready=ready, finished=finished, used_frac=used_frac)


def test_while_the_trainer_waits_what_is_finished_is_the_rate():
    rates = learn(Rates(), {"h100": window(2, 40)}, seconds=10, is_waiting=True)
    assert rates.per_s == {"h100": 2.0}
    # Half of the next window: (2 + 1) / 2.
    rates = learn(rates, {"h100": window(2, 20)}, seconds=10, is_waiting=True)
    assert rates.per_s["h100"] == pytest.approx(1.5)


def test_otherwise_the_share_of_the_batch_in_use_says_how_much_more_there_may_be():
    rates = learn(Rates(), {"h100": window(2, 40, 0.5)}, seconds=10, is_waiting=False)
    assert rates.per_s == {"h100": 4.0}
    # Never more than four times of what is seen.
    rates = learn(Rates(), {"h100": window(2, 40, 0.01)}, seconds=10, is_waiting=False)
    assert rates.per_s == {"h100": 8.0}
    # Shown once, a guess does not replace it; more than it is shown as well.
    rates = learn(rates, {"h100": window(2, 40)}, seconds=10, is_waiting=True)
    rates = learn(rates, {"h100": window(2, 10, 0.1)}, seconds=10, is_waiting=False)
    assert rates.per_s == {"h100": 2.0}
    rates = learn(rates, {"h100": window(2, 60, 0.1)}, seconds=10, is_waiting=False)
    assert rates.per_s == {"h100": 3.0}


def test_a_pool_that_was_never_seen_gets_what_its_planned_speed_makes_likely():
    rates = learn(
        Rates(), {"h100": window(1, 20), "a100": window(1, 10)}, seconds=10, is_waiting=True
    )
    speeds = {"h100": 4.0, "a100": 2.0, "b200": 8.0}
    assert rates.of("b200", speeds) == pytest.approx(8.0 * (2.0 + 1.0) / 6.0)
    assert rates.of("h100", speeds) == 2.0
    assert Rates().of("b200", speeds) == 0.0


def test_pools_without_a_replica_and_empty_windows_teach_nothing():
    rates = learn(Rates(), {"h100": window(0, 0)}, seconds=10, is_waiting=True)
    assert rates.per_s == {}
    assert learn(rates, {"h100": window(1, 5)}, seconds=0, is_waiting=True) == rates
