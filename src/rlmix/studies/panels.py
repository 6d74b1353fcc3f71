"""A drawing of several small charts with one key: a panel per fleet, a line per arm."""

from collections.abc import Sequence
from html import escape

from rlmix.observe import svg

ARM_TITLES = {
    "grpo": "GRPO",
    "tis": "TIS",
    "mis": "MIS",
    "sc": "SC",
    "mis_sc_full": "SC + MIS",
    "mis_sc": "SC + MIS + top-p replay",
    "grpo_topp": "GRPO + top-p replay",
}
"""Files of `conf/algo`, in the order of tables and colours."""
COLUMNS = 3
GAP = 10
TITLE_HEIGHT = 34
KEY_INDENT = 62
KEY_LINE = 20

Panel = tuple[str, Sequence[svg.Series]]
"""Title and lines."""


def line(arm: str, points: Sequence[tuple[float, float]]) -> svg.Series:
    """One arm's line, in the same colour in every panel."""
    return svg.Series(name=ARM_TITLES[arm], points=points, slot=list(ARM_TITLES).index(arm))


def drawing(
    panels: Sequence[Panel], *, y_label: str, described: str, width: int = 330, height: int = 210
) -> str:
    """SVG of panels side by side and the key of all arms that any of them shows.

    Args:
        described: what a reader who cannot see it is told.
    """
    body = []
    for i, (title, lines) in enumerate(panels):
        axes = svg.Axes(
            x_label="update", y_label=y_label, y_low=0.0, y_high=1.0, width=width, height=height
        )
        chart = svg.line_chart(lines, axes, number=lambda value: f"{value:.3f}")
        x, y = (i % COLUMNS) * (width + GAP), (i // COLUMNS) * (height + TITLE_HEIGHT)
        body.append(
            f'<text class="title" x="{x + KEY_INDENT}" y="{y + 18}">{escape(title)}</text>'
            f'<svg x="{x}" y="{y + 24}" width="{width}" height="{height}">{chart}</svg>'
        )
    # The key takes the place of the panel after the last one.
    place = len(panels)
    key_x = (place % COLUMNS) * (width + GAP) + KEY_INDENT
    key_y = (place // COLUMNS) * (height + TITLE_HEIGHT) + 30
    shown = {one.slot: one.name for _, lines in panels for one in lines}
    for number, slot in enumerate(sorted(shown)):
        y = key_y + KEY_LINE * number
        body.append(
            f'<g class="s{slot}"><path class="line thick" d="M{key_x} {y} h26"/></g>'
            f'<text x="{key_x + 34}" y="{y + 4}">{escape(shown[slot])}</text>'
        )
    rows = place // COLUMNS + 1
    size = (COLUMNS * (width + GAP), rows * (height + TITLE_HEIGHT))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" role="img" '
        f'aria-label="{escape(described)}"><style>{_STYLE}</style>{"".join(body)}</svg>\n'
    )


_COLOURS = ["#2563a8", "#c2571a", "#2f8f5b", "#8a4fb3", "#b8860b", "#c23b5a", "#5a6b7b", "#3aa6a6"]
_STYLE = (
    "text{fill:#555;font:11px sans-serif}.title{font-weight:600;font-size:13px}"
    ".grid{stroke:#ddd}.axis{stroke:#999}.line{fill:none;stroke:var(--c);stroke-width:1.6}"
    ".line.thick{stroke-width:2.8}.dot{fill:var(--c)}.hit{fill:transparent}"
    + "".join(f".s{i}{{--c:{colour}}}" for i, colour in enumerate(_COLOURS))
)
