"""Small charts as inline SVG text: lines, stacked bars, stacked step areas.

Pure functions of numbers. Colours are CSS classes (`s0`, `s1`, ...), so that one style sheet
serves light and dark; every series also differs by dash and marker, so that colour is never the
only cue. Hovering a point shows its numbers through the browser's own tooltip, without a script.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise

NUM_SLOTS = 8
"""Colours in the style sheet; further series repeat them with another dash."""
MAX_LINE_POINTS = 1000
"""Longer lines keep the lowest and the highest point of each group, so that no spike is lost."""
MAX_BARS = 240
"""More are averaged in groups (the axis says so): there is no pixel for each."""
MAX_TARGETS = 240
"""Longer lines have no points to hover; the page would grow by megabytes."""
MAX_MARKERS = 60
THIN_BAR_PX = 5.0

Points = Sequence[tuple[float, float]]

_DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 2", "1 3", "10 4", "6 2 1 2 1 2")


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One named line, band or bar part."""

    name: str
    points: Points
    """(x, y), x increasing; points without a number are simply absent."""
    slot: int
    """Which colour, dash and marker; -1 for a grey reference."""
    is_thick: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    x_label: str
    y_label: str
    is_log: bool = False
    y_low: float | None = None
    """Lowest value shown; None to fit the data. Ignored on a log axis."""
    y_high: float | None = None
    marks: Sequence[tuple[float, str]] = ()
    """(x, text) of vertical lines, e.g. where a run was resumed."""
    width: int = 560
    height: int = 250
    x_step: float = 1.0
    """Finest useful distance of x ticks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """Maps data to pixels."""

    axes: Axes
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    left: int = 62
    right: int = 14
    top: int = 10
    bottom: int = 40

    def x(self, value: float) -> float:
        span = self.x_high - self.x_low or 1.0
        room = self.axes.width - self.left - self.right
        return self.left + room * (value - self.x_low) / span

    def y(self, value: float) -> float:
        low, high = self.y_low, self.y_high
        if self.axes.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        room = self.axes.height - self.top - self.bottom
        return self.top + room * (1 - (value - low) / (high - low or 1.0))


def line_chart(series: Sequence[Series], axes: Axes, *, number: Callable[[float], str]) -> str:
    """Lines with markers. On a log axis, values of 0 or less are left out.

    Args:
        number: writes a y value for the tooltips.
    """
    shown = [_positive(line) if axes.is_log else line for line in series]
    shown = [_with_extremes(line) for line in shown]
    values = [y for line in shown for _, y in line.points]
    if not values:
        return ""
    frame = _fit(axes, [x for line in shown for x, _ in line.points], values)
    lines = "".join(_line(line, frame, number) for line in shown)
    return _svg(axes, _grid(frame) + _marks(frame) + lines)


def stacked_bars(parts: Sequence[Series], axes: Axes, *, number: Callable[[float], str]) -> str:
    """One bar per x, made of the parts in order from the bottom."""
    group = math.ceil(max((len(part.points) for part in parts), default=0) / MAX_BARS)
    shown = [_averaged(part, group) for part in parts]
    if group > 1:
        axes = replace(axes, x_label=f"{axes.x_label} (each bar is the mean of {group})")
    xs = sorted({x for part in shown for x, _ in part.points})
    if not xs:
        return ""
    gap = min((b - a for a, b in pairwise(xs)), default=1.0)
    tops = dict.fromkeys(xs, 0.0)
    rectangles = []
    for part in shown:
        for x, y in part.points:
            rectangles.append((part, x, tops[x], tops[x] + y, y))
            tops[x] += y
    frame = _fit(axes, [xs[0] - gap / 2, xs[-1] + gap / 2], [0.0, *tops.values()])
    width = max(1.0, 0.82 * (frame.x(xs[0] + gap) - frame.x(xs[0])))
    width = min(width, 48.0)
    thin = " thin" if width < THIN_BAR_PX else ""
    body = []
    for part, x, low, high, value in rectangles:
        top, height = frame.y(high), max(0.0, frame.y(low) - frame.y(high))
        tip = escape(f"{axes.x_label} {x:g} \u00b7 {part.name} \u00b7 {number(value)}")
        body.append(
            f'<rect class="bar{thin} {_class(part.slot)}" x="{frame.x(x) - width / 2:.1f}" '
            f'y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"><title>{tip}</title></rect>'
        )
    return _svg(axes, _grid(frame) + "".join(body) + _marks(frame))


def stacked_steps(parts: Sequence[Series], axes: Axes, *, number: Callable[[float], str]) -> str:
    """Bands of values that hold until the next x, stacked in order from the bottom."""
    xs = sorted({x for part in parts for x, _ in part.points})
    if not xs:
        return ""
    held = [_held_at(part.points, xs) for part in parts]
    totals = [sum(column) for column in zip(*held, strict=True)]
    end = xs[-1] + (xs[-1] - xs[0]) / max(1, len(xs) - 1) if len(xs) > 1 else xs[0] + 1
    frame = _fit(axes, [xs[0], end], [0.0, *totals])
    lows = [0.0] * len(xs)
    body = []
    for part, values in zip(parts, held, strict=True):
        highs = [low + value for low, value in zip(lows, values, strict=True)]
        path = (
            _step_path(xs, highs, end, frame)
            + " L"
            + _step_path(xs, lows, end, frame, is_backwards=True)
        )
        tip = escape(f"{part.name} \u00b7 {number(values[-1])} at the end")
        body.append(
            f'<path class="band {_class(part.slot)}" d="M{path} Z"><title>{tip}</title></path>'
        )
        lows = highs
    return _svg(axes, _grid(frame) + "".join(body) + _marks(frame))


def interval_chart(low: float, value: float, high: float, *, label: str, width: int = 560) -> str:
    """A value with its interval against 0, on one horizontal axis."""
    axes = Axes(x_label=label, y_label="", width=width, height=74)
    reach = max(abs(low), abs(high), 0.05) * 1.15
    frame = _Frame(
        axes=axes,
        x_low=min(0.0, low) - 0.1 * reach,
        x_high=max(0.0, high) + 0.1 * reach,
        y_low=0,
        y_high=1,
        left=14,
        bottom=38,
    )
    middle = frame.y(0.55)
    ticks = "".join(
        _rule("grid", frame.x(t), frame.x(t), 6, frame.y(0))
        + _text("tick", frame.x(t), frame.y(0) + 14, "middle", _signed(t))
        for t in ticks_between(frame.x_low, frame.x_high, 6)
    )
    body = (
        _rule("zero", frame.x(0), frame.x(0), 4, frame.y(0))
        + '<g class="s0">'
        + _rule("whisker", frame.x(low), frame.x(high), middle, middle)
        + f'<circle class="dot" cx="{frame.x(value):.1f}" cy="{middle:.1f}" r="5.5"/></g>'
        + _text("label", width / 2, 70, "middle", escape(label))
    )
    return _svg(axes, ticks + body)


def key_swatch(slot: int) -> str:
    """The legend's sample of a line: colour, dash and marker."""
    return (
        f'<svg class="swatch {_class(slot)}" viewBox="0 0 30 12" aria-hidden="true">'
        f'<line class="line" x1="1" x2="29" y1="6" y2="6"{_dash(slot)}/>'
        f"{_marker(15, 6, slot)}</svg>"
    )


def block_swatch(slot: int) -> str:
    """The legend's sample of a bar or band."""
    return (
        f'<svg class="swatch {_class(slot)}" viewBox="0 0 14 12" aria-hidden="true">'
        f'<rect class="bar" x="1" y="1" width="12" height="10"/></svg>'
    )


def ticks_between(low: float, high: float, number: int) -> list[float]:
    """Round values (1, 2, 5 times a power of ten) from `low` to `high`, about `number` of them."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, number)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    # Rounding keeps 0.30000000000000004 out of the labels.
    digits = max(0, -math.floor(math.log10(step)) + 1)
    return [round(index * step, digits) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; with fewer than two decades also their multiples by 2 and 5."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1,) if last - first > 2 else (1, 2, 5)
    ticks = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
    return [tick for tick in ticks if low * 0.999 <= tick <= high * 1.001]


def _averaged(series: Series, group: int) -> Series:
    if group <= 1:
        return series
    points = []
    for start in range(0, len(series.points), group):
        part = series.points[start : start + group]
        points.append((part[-1][0], sum(y for _, y in part) / len(part)))
    return replace(series, points=points)


def _with_extremes(series: Series) -> Series:
    if len(series.points) <= MAX_LINE_POINTS:
        return series
    group = math.ceil(2 * len(series.points) / MAX_LINE_POINTS)
    points = []
    for start in range(0, len(series.points), group):
        part = series.points[start : start + group]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        points.extend(sorted(ends))
    return replace(series, points=points)


def _positive(series: Series) -> Series:
    return replace(series, points=[(x, y) for x, y in series.points if y > 0])


def _fit(axes: Axes, xs: Sequence[float], ys: Sequence[float]) -> _Frame:
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    low, high = min(ys), max(ys)
    if axes.is_log:
        low, high = low / 1.3, high * 1.3
    else:
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        low = axes.y_low if axes.y_low is not None else low - room
        high = axes.y_high if axes.y_high is not None else high + room
    return _Frame(axes=axes, x_low=x_low, x_high=x_high, y_low=low, y_high=high)


def _held_at(points: Points, xs: Sequence[float]) -> list[float]:
    known = dict(points)
    held, value = [], 0.0
    for x in xs:
        value = known.get(x, value)
        held.append(value)
    return held


def _step_path(
    xs: Sequence[float],
    ys: Sequence[float],
    end: float,
    frame: _Frame,
    *,
    is_backwards: bool = False,
) -> str:
    corners = []
    for index, (x, y) in enumerate(zip(xs, ys, strict=True)):
        next_x = xs[index + 1] if index + 1 < len(xs) else end
        corners += [(x, y), (next_x, y)]
    if is_backwards:
        corners.reverse()
    return " L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in corners)


def _line(series: Series, frame: _Frame, number: Callable[[float], str]) -> str:
    if not series.points:
        return ""
    path = " L".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in series.points)
    thick = " thick" if series.is_thick else ""
    pieces = [f'<path class="line{thick}" d="M{path}"{_dash(series.slot)}/>']
    has_markers = len(series.points) <= MAX_MARKERS and series.slot >= 0
    for x, y in series.points if len(series.points) <= MAX_TARGETS else ():
        tip = escape(f"{frame.axes.x_label} {x:g} \u00b7 {series.name} \u00b7 {number(y)}")
        marker = _marker(frame.x(x), frame.y(y), series.slot) if has_markers else ""
        pieces.append(
            f'<g class="point">{marker}<circle class="hit" cx="{frame.x(x):.1f}" '
            f'cy="{frame.y(y):.1f}" r="7"/><title>{tip}</title></g>'
        )
    return f'<g class="{_class(series.slot)}">{"".join(pieces)}</g>'


def _marker(x: float, y: float, slot: int) -> str:
    if slot < 0:
        return ""
    match slot % 4:
        case 0:
            return f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>'
        case 1:
            return (
                f'<rect class="dot" x="{x - 2.4:.1f}" y="{y - 2.4:.1f}" width="4.8" height="4.8"/>'
            )
        case 2:
            corners = f"{x:.1f},{y - 3.2:.1f} {x + 3:.1f},{y + 2.4:.1f} {x - 3:.1f},{y + 2.4:.1f}"
        case _:
            corners = (
                f"{x:.1f},{y - 3.4:.1f} {x + 3.4:.1f},{y:.1f} "
                f"{x:.1f},{y + 3.4:.1f} {x - 3.4:.1f},{y:.1f}"
            )
    return f'<polygon class="dot" points="{corners}"/>'


def _class(slot: int) -> str:
    return "reference" if slot < 0 else f"s{slot % NUM_SLOTS}"


def _dash(slot: int) -> str:
    dash = _DASHES[slot % len(_DASHES)] if slot >= 0 else ""
    return f' stroke-dasharray="{dash}"' if dash else ""


def _grid(frame: _Frame) -> str:
    axes = frame.axes
    pieces = []
    y_ticks = (
        log_ticks(frame.y_low, frame.y_high)
        if axes.is_log
        else ticks_between(frame.y_low, frame.y_high, max(2, axes.height // 50))
    )
    right, foot = axes.width - frame.right, frame.y(frame.y_low)
    for tick in y_ticks:
        y = frame.y(tick)
        text = _power(tick) if axes.is_log else f"{tick:g}"
        pieces.append(
            _rule("grid", frame.left, right, y, y)
            + _text("tick", frame.left - 7, y + 3.5, "end", text)
        )
    for tick in ticks_between(frame.x_low, frame.x_high, max(2, axes.width // 90)):
        if abs(tick / axes.x_step - round(tick / axes.x_step)) > 1e-6:
            continue
        x = frame.x(tick)
        pieces.append(
            _rule("axis", x, x, foot, foot + 4) + _text("tick", x, foot + 16, "middle", f"{tick:g}")
        )
    pieces.append(
        _rule("axis", frame.left, right, foot, foot)
        + _text("label", (frame.left + right) / 2, axes.height - 4, "middle", escape(axes.x_label))
    )
    if axes.y_label:
        middle = (frame.top + foot) / 2
        pieces.append(
            f'<text class="label" transform="translate(13 {middle:.1f}) rotate(-90)" '
            f'text-anchor="middle">{escape(axes.y_label)}</text>'
        )
    return "".join(pieces)


def _marks(frame: _Frame) -> str:
    pieces = []
    for value, text in frame.axes.marks:
        if not frame.x_low <= value <= frame.x_high:
            continue
        x = frame.x(value)
        pieces.append(
            f'<g class="mark"><line x1="{x:.1f}" x2="{x:.1f}" y1="{frame.top}" '
            f'y2="{frame.y(frame.y_low):.1f}"/><text x="{x + 4:.1f}" y="{frame.top + 8}">'
            f"{escape(text.split()[0])}</text><title>{escape(text)}</title></g>"
        )
    return "".join(pieces)


def _rule(name: str, x1: float, x2: float, y1: float, y2: float) -> str:
    return f'<line class="{name}" x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"/>'


def _text(name: str, x: float, y: float, anchor: str, content: str) -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{content}</text>'


def _power(value: float) -> str:
    exponent = math.floor(math.log10(value) + 1e-9)
    factor = round(value / 10.0**exponent)
    if exponent in (0, 1):
        return f"{value:g}"
    return (
        "" if factor == 1 else f"{factor}\u00b7"
    ) + f'10<tspan dy="-4" class="power">{exponent}</tspan>'


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+g}"


def _svg(axes: Axes, body: str) -> str:
    label = escape(f"{axes.y_label} by {axes.x_label}" if axes.y_label else axes.x_label)
    return (
        f'<svg class="chart" viewBox="0 0 {axes.width} {axes.height}" role="img" '
        f'aria-label="{label}">{body}</svg>'
    )
