"""Charts: ticks, scales and marks where a ruler would find them."""

import re
import xml.etree.ElementTree as ET

import pytest

from rlmix.observe import figures, svg
from rlmix.observe.svg import Axes, Series

AXES = Axes(x_label="step", y_label="reward", width=560, height=250)


def parse(text: str) -> ET.Element:
    return ET.fromstring(text)


def line_points(text: str) -> list[tuple[float, float]]:
    path = re.search(r'class="line[^"]*" d="M([^"]+)"', text)
    assert path is not None
    corners = [corner.split(",") for corner in path[1].split(" L")]
    return [(float(x), float(y)) for x, y in corners]


@pytest.mark.parametrize(
    ("low", "high", "number", "ticks"),
    [
        (0.0, 1.0, 5, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.0, 30.0, 5, [10.0, 20.0, 30.0]),
        (0.36, 0.64, 6, [0.4, 0.45, 0.5, 0.55, 0.6]),
        (-0.04, 0.3, 4, [0.0, 0.1, 0.2, 0.3]),
        (5.0, 5.0, 5, [5.0]),
    ],
)
def test_ticks_are_round_numbers_inside_the_range(
    low: float, high: float, number: int, ticks: list[float]
) -> None:
    assert svg.ticks_between(low, high, number) == ticks


def test_log_ticks_are_decades_or_finer_for_a_narrow_range() -> None:
    assert svg.log_ticks(1e-5, 1e-1) == pytest.approx([1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
    assert svg.log_ticks(1.5e-4, 6e-4) == pytest.approx([2e-4, 5e-4])


def test_a_line_goes_where_its_numbers_say() -> None:
    series = Series(name="a", points=[(0, 0.0), (10, 1.0)], slot=0)
    axes = Axes(x_label="step", y_label="y", y_low=0.0, y_high=1.0, width=560, height=250)
    text = svg.line_chart([series], axes, number=figures.decimal)
    # Plot area: x from 62 to 560 - 14, y from 10 (top) to 250 - 40 (bottom).
    assert line_points(text) == [(62.0, 210.0), (546.0, 10.0)]


def test_decades_are_equally_far_apart_on_a_log_axis_and_zero_is_left_out() -> None:
    series = Series(name="a", points=[(1, 1e-5), (2, 1e-4), (3, 1e-3), (4, 0.0)], slot=0)
    axes = Axes(x_label="step", y_label="k3", is_log=True)
    points = line_points(svg.line_chart([series], axes, number=figures.small))
    assert len(points) == 3
    assert points[0][1] - points[1][1] == pytest.approx(points[1][1] - points[2][1], abs=0.11)


def test_bars_stack_to_the_sum_of_their_parts() -> None:
    parts = [
        Series(name="a", points=[(1, 1.0), (2, 2.0)], slot=0),
        Series(name="b", points=[(1, 3.0)], slot=1),
    ]
    text = svg.stacked_bars(parts, AXES, number=figures.decimal)
    bars = [
        (float(bar.attrib["y"]), float(bar.attrib["height"]))
        for bar in parse(text).iter("rect")
        if bar.attrib["class"].startswith("bar")
    ]
    (a1_y, a1_height), (a2_y, a2_height), (b1_y, b1_height) = bars
    assert a2_height == pytest.approx(2 * a1_height, abs=0.15)
    assert b1_height == pytest.approx(3 * a1_height, abs=0.15)
    assert b1_y + b1_height == pytest.approx(a1_y, abs=0.15)
    assert a1_y + a1_height == pytest.approx(a2_y + a2_height, abs=0.15)


def test_replicas_hold_their_number_until_the_next_reading() -> None:
    part = Series(name="a", points=[(0, 1.0), (1, 0.0), (2, 1.0)], slot=0)
    text = svg.stacked_steps([part], AXES, number=figures.decimal)
    band = re.search(r'class="band s0" d="M([^"]+) Z"', text)
    assert band is not None
    corners = [corner.split(",") for corner in band[1].split(" L")]
    upper = [float(y) for _, y in corners[:6]]
    full, empty = upper[0], upper[2]
    assert upper == [full, full, empty, empty, full, full]
    assert full < empty


def test_long_line_keeps_its_spikes() -> None:
    values = [0.5] * 5000
    values[1234], values[4000] = 9.0, -9.0
    series = Series(name="a", points=[(float(n), y) for n, y in enumerate(values)], slot=0)
    axes = Axes(x_label="step", y_label="y", y_low=-9.0, y_high=9.0, width=560, height=250)
    points = line_points(svg.line_chart([series], axes, number=figures.decimal))
    assert len(points) <= 1002
    heights = [y for _, y in points]
    assert (min(heights), max(heights)) == (10.0, 210.0)
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_many_bars_are_averaged_and_the_axis_says_so() -> None:
    part = Series(name="a", points=[(float(n), float(n % 2)) for n in range(1, 961)], slot=0)
    text = svg.stacked_bars([part], AXES, number=figures.decimal)
    assert text.count("<rect") == 240
    assert "step (each bar is the mean of 4)" in text
    assert text.count("0.500</title>") == 240


def test_single_point_and_flat_line_are_drawn() -> None:
    for points in ([(3, 0.5)], [(1, 0.0), (2, 0.0)]):
        text = svg.line_chart(
            [Series(name="a", points=points, slot=0)], AXES, number=figures.decimal
        )
        assert text.count('class="dot"') == len(points)
        assert "nan" not in text


def test_names_are_escaped_and_the_text_is_well_formed() -> None:
    series = Series(name="<b>&", points=[(1, 0.5), (2, 0.7)], slot=3)
    axes = Axes(x_label="a & b", y_label="<y>", marks=[(1.5, "resumed after step 1")])
    root = parse(svg.line_chart([series], axes, number=figures.decimal))
    titles = [title.text for title in root.iter("title")]
    assert "a & b 1 · <b>& · 0.500" in titles
    assert "resumed after step 1" in titles


def test_series_differ_by_more_than_colour() -> None:
    swatches = {re.sub(r's\d"', "", svg.key_swatch(slot)) for slot in range(8)}
    assert len(swatches) == 8


def test_nothing_to_draw_gives_nothing() -> None:
    empty = Series(name="a", points=[], slot=0)
    assert svg.line_chart([empty], AXES, number=figures.decimal) == ""
    assert svg.stacked_bars([empty], AXES, number=figures.decimal) == ""
    assert svg.stacked_steps([empty], AXES, number=figures.decimal) == ""
