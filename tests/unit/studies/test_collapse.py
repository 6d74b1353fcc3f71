"""The rules of the study on curves worked by hand."""

import pytest

from rlmix.studies.collapse import lead_steps, outcome, smoothed


def test_smoothing_is_the_mean_of_the_last_25() -> None:
    curve = smoothed([1.0] * 25 + [0.0] * 25)
    assert curve[0] == 1.0
    assert curve[24] == 1.0
    assert curve[29] == pytest.approx(20 / 25)
    assert curve[49] == pytest.approx(0.0)


def test_success_that_falls_below_half_for_50_updates_has_collapsed() -> None:
    # Best 0.8; smoothed success is 0.8 * (1 - k/25) + 0.1 * k/25 after k bad updates; below 0.4
    # from k = 15 (0.38), that is update 115.
    found = outcome([0.8] * 100 + [0.1] * 100, [(100, 0.8), (125, 0.1), (200, 0.1)])
    assert found.verdict == "collapsed"
    assert found.collapse_step == 115
    assert found.best == pytest.approx(0.8)


def test_a_fall_that_the_trainers_own_score_does_not_share_is_no_collapse() -> None:
    found = outcome([0.8] * 100 + [0.1] * 100, [(100, 0.8), (125, 0.8), (200, 0.8)])
    assert found.verdict == "decayed"
    assert found.collapse_step is None


def test_a_fall_of_49_updates_is_no_collapse() -> None:
    # Below half from update 115 to update 163 inclusive is 49 updates: after k good updates the
    # mean is 0.1 + 0.028 k, at least 0.4 from k = 11; so 163 - 11 + 1 = update 153 begins them.
    bad = 152 - 100
    found = outcome([0.8] * 100 + [0.1] * bad + [0.8] * 100, [(100, 0.8), (125, 0.1)])
    assert found.verdict == "stable"


def test_an_end_below_nine_tenths_of_the_best_has_decayed() -> None:
    assert outcome([0.9] * 100 + [0.8] * 50, []).verdict == "decayed"
    assert outcome([0.9] * 100 + [0.82] * 50, []).verdict == "stable"


def test_the_lead_of_a_warning_is_counted_to_the_collapse() -> None:
    signal = [0.0] * 9 + [5.0] * 91
    assert lead_steps(signal, threshold=1.0, collapse_step=60) == 50
    assert lead_steps(signal, threshold=1.0, collapse_step=5) is None
    assert lead_steps(signal, threshold=9.0, collapse_step=60) is None
    assert lead_steps(signal, threshold=1.0, collapse_step=None) is None
