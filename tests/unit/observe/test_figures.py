"""Numbers as people read them."""

import math

import pytest

from rlmix.observe import figures


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (245, "4:05"), (7390, "2:03:10"), (None, "-")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert figures.duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950, "950"), (999.9, "1k"), (14_200, "14.2k"), (3_100_000, "3.1M"), (2e9, "2G")],
)
def test_counts(number: float, text: str) -> None:
    assert figures.count(number) == text


def test_cheap_steps_keep_digits_and_dear_runs_do_not() -> None:
    assert figures.usd(0.0213) == "$0.0213"
    assert figures.usd(1234.5) == "$1,234.50"
    assert figures.usd(0) == "$0.00"


@pytest.mark.parametrize(
    "write",
    [figures.duration, figures.count, figures.usd, figures.decimal, figures.small, figures.percent],
)
def test_not_measured_and_not_a_number_are_never_shown_as_zero(write: object) -> None:
    assert callable(write)
    assert write(None) == "-"
    assert write(math.nan) == "-"


def test_sparkline_spans_its_own_lowest_and_highest() -> None:
    assert figures.sparkline([0.1, 0.2, 0.3], width=10) == "▁▅█"
    assert figures.sparkline([9.0, 0.1, 0.3], width=2) == "▁█"
    assert figures.sparkline([0.0, 1.0], width=5, ascii_only=True) == "_#"
    assert figures.sparkline([0.5, 0.5], width=5) == "▅▅"
    assert figures.sparkline([math.nan], width=5) == ""


def test_ages_are_coarse() -> None:
    ages = [figures.age(seconds) for seconds in (12, 330, 11_000, 200_000)]
    assert ages == ["12 s", "5 min", "3 h", "2 d"]
