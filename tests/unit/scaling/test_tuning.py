"""The search over engine arguments, fed with worked measurements."""

import math
import random
from collections.abc import Callable

import pytest

from rlmix.scaling.tuning import DEFAULT, Search, Settings, spread_frac

KNOBS = {"batch": [8, 16, 64], "policy": ["lpm"], "chunk": [1024, 2048]}
LOADS = 3


def measured(
    search: Search,
    rate: Callable[[Settings], float | None],
    *,
    noise: float,
    most: int = 200,
    seed: int = 1,
) -> list[Settings]:
    """Runs the search on `rate` with a noise of that amplitude; None stands for a failed start.
    Returns what was started, in order."""
    started = []
    draw = random.Random(seed)
    while len(started) < most and (settings := search.ask()) is not None:
        started.append(settings)
        mean = rate(settings)
        if mean is None:
            search.fail(settings, "does not start")
        else:
            search.tell(settings, [mean + draw.gauss(0.0, noise) for _ in range(LOADS)])
    return started


def additive(gains: dict[tuple[str, object], float]) -> Callable[[Settings], float]:
    return lambda settings: 100.0 + sum(gains.get(pair, 0.0) for pair in settings)


def test_the_best_values_of_two_arguments_are_found_and_tried_together() -> None:
    search = Search(knobs=KNOBS)
    gains = {("batch", 64): 20.0, ("policy", "lpm"): 10.0, ("batch", 8): -30.0,
             ("chunk", 1024): -5.0, ("chunk", 2048): -5.0}  # fmt: skip
    started = measured(search, additive(gains), noise=1.0)
    verdict = search.verdict()
    assert verdict.settings == (("batch", 64), ("policy", "lpm"))
    # 130 against 100.
    assert verdict.gain_frac == pytest.approx(0.30, abs=0.03)
    assert verdict.noise_frac < 0.03
    assert verdict.is_better
    # The default and six singles, then the default and the better half, then twice the last ones.
    assert started[:7] == [DEFAULT, *[((n, v),) for n, vs in KNOBS.items() for v in vs]]
    assert started[7] == DEFAULT
    assert set(started[8:11]) >= {(("batch", 64),), (("policy", "lpm"),)}
    assert started[11:] == [DEFAULT, (("batch", 64),), verdict.settings] * 2


def test_what_is_within_the_noise_changes_nothing() -> None:
    """Sixty searches among arguments that do nothing: at most one is fooled."""
    fooled = 0
    for seed in range(60):
        search = Search(knobs=KNOBS)
        measured(search, additive({}), noise=10.0, seed=seed)
        verdict = search.verdict()
        assert verdict.best != DEFAULT
        fooled += verdict.is_better
        assert verdict.is_better or verdict.noise_frac > verdict.gain_frac
    assert fooled <= 1


def test_luck_of_the_first_rounds_is_not_counted_in_the_last_comparison() -> None:
    """A candidate that was fast once, when it was chosen, and is like the default ever after."""
    search = Search(knobs={"batch": [64]})
    seen: dict[Settings, int] = {}

    def rate(settings: Settings) -> float:
        seen[settings] = seen.get(settings, 0) + 1
        return 200.0 if settings and seen[settings] == 1 else 100.0

    measured(search, rate, noise=1.0)
    assert not search.verdict().is_better
    assert search.verdict().gain_frac == pytest.approx(0.0, abs=0.03)


def test_what_does_not_start_is_never_chosen_nor_joined() -> None:
    search = Search(knobs=KNOBS)
    gains = additive({("batch", 64): 20.0})
    failing = (("policy", "lpm"),)
    started = measured(search, lambda s: None if ("policy", "lpm") in s else gains(s), noise=1.0)
    assert search.failed == {failing: "does not start"}
    assert started.count(failing) == 1
    assert search.verdict().settings == (("batch", 64),)


def test_a_default_that_does_not_start_and_no_knobs_end_the_search() -> None:
    search = Search(knobs=KNOBS)
    started = measured(search, lambda s: None if s == DEFAULT else 100.0, noise=0.0)
    assert len(started) == 7
    assert not search.verdict().is_better
    assert Search(knobs={}).ask() is None


@pytest.mark.parametrize("most", [0, 1, 4, 9, 12])
def test_a_search_that_is_cut_short_keeps_the_default(most: int) -> None:
    search = Search(knobs=KNOBS)
    measured(search, additive({("batch", 64): 50.0}), noise=1.0, most=most)
    assert search.verdict().settings == DEFAULT


def test_spread_is_the_deviation_over_the_mean() -> None:
    assert spread_frac([90.0, 110.0]) == pytest.approx(math.sqrt(200.0) / 100.0)
    assert spread_frac([5.0]) == 0.0
