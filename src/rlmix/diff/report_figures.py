"""The four figures of a comparison as SVG text: no script, no other file, nothing to install.

Invariant: every number is formatted by us, every name escaped.
"""

from collections.abc import Sequence
from html import escape
from itertools import pairwise

import numpy as np

from rlmix.diff.report_data import PoolFinding

WIDTH, HEIGHT, MARGIN = 640, 260, 48
MOST_POINTS = 2000
MOST_COLUMNS = 320
POSITION_BINS = 24
FLOOR = 1e-7
"""Nats shown as nothing on a logarithmic axis."""


def _figure(title: str, body: str, *, height: int = HEIGHT) -> str:
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        f'font-size="11" font-family="sans-serif">{body}</svg></figure>'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def bars(pools: Sequence[PoolFinding]) -> str:
    """Mean |difference| by pool, with its limit."""
    if not pools:
        return ""
    largest = max([p.total.mean_abs for p in pools] + [1e-12])
    parts, step = [], 28
    for number, pool in enumerate(pools):
        y = 8 + number * step
        width = (WIDTH - 290) * pool.total.mean_abs / largest
        colour = "#3b7dd8" if pool.is_within else "#c0392b"
        parts.append(_text(110, y + 14, pool.name, anchor="end"))
        parts.append(
            f'<rect x="116" y="{y}" width="{max(width, 1):.1f}" height="18" fill="{colour}"/>'
        )
        words = f"{pool.total.mean_abs:.3g} nats, {pool.main_class}"
        parts.append(_text(122 + width, y + 14, words))
    title = "Mean difference to the trainer by pool (red: above its limit)"
    return _figure(title, "".join(parts), height=16 + step * len(pools))


def scatter(pool: PoolFinding) -> str:
    """Recorded logprobs over the trainer's."""
    low = float(min(pool.trainer_P.min(), pool.recorded_P.min(), -1e-3))
    span_x, span_y = WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN

    def at(trainer: float, recorded: float) -> tuple[float, float]:
        x = MARGIN + span_x * (1 - trainer / low)
        return x, HEIGHT - MARGIN - span_y * (1 - recorded / low)

    chosen = np.linspace(0, len(pool.trainer_P) - 1, min(MOST_POINTS, len(pool.trainer_P)))
    dots = []
    for index in chosen.astype(int):
        x, y = at(float(pool.trainer_P[index]), float(pool.recorded_P[index]))
        dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6"/>')
    (x0, y0), (x1, y1) = at(low, low), at(0.0, 0.0)
    line = f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="#999"/>'
    words = _text(MARGIN, HEIGHT - 12, f"trainer, {low:.1f} to 0 nats; upwards: recorded")
    body = f'{line}<g fill="#3b7dd8" fill-opacity="0.5">{"".join(dots)}</g>{words}'
    return _figure(f"{pool.name}: recorded against trainer, one dot a token", body)


def by_position(pool: PoolFinding) -> str:
    """Mean |difference| along the text, logarithmic."""
    gaps = np.abs(pool.trainer_P.astype(float) - pool.recorded_P.astype(float))
    edges = np.linspace(pool.positions_P.min(), pool.positions_P.max() + 1, POSITION_BINS + 1)
    where = np.digitize(pool.positions_P, edges) - 1
    counts = np.bincount(where, minlength=POSITION_BINS)[:POSITION_BINS]
    sums = np.bincount(where, weights=gaps, minlength=POSITION_BINS)[:POSITION_BINS]
    means = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    seen = np.isfinite(means)
    logs = np.log10(np.maximum(means, FLOOR))
    top, bottom = float(np.nanmax(logs[seen])), float(np.nanmin(logs[seen]))
    span = max(top - bottom, 1.0)
    points = []
    for index in np.flatnonzero(seen):
        x = MARGIN + (WIDTH - 2 * MARGIN) * (index + 0.5) / POSITION_BINS
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (top - logs[index]) / span
        points.append(f"{x:.1f},{y:.1f}")
    body = (
        f'<polyline fill="none" stroke="#3b7dd8" stroke-width="2" points="{" ".join(points)}"/>'
        + _text(4, MARGIN, f"{10**top:.2g}")
        + _text(4, HEIGHT - MARGIN, f"{10 ** (top - span):.2g}")
        + _text(MARGIN, HEIGHT - 12, f"position {edges[0]:.0f}")
        + _text(WIDTH - MARGIN, HEIGHT - 12, f"{edges[-1] - 1:.0f}", anchor="end")
    )
    return _figure(f"{pool.name}: mean |difference| by position, nats", body)


def heat_map(pool: PoolFinding) -> str:
    """Relative distance of the residual streams, layer over token, of the text that was traced."""
    assert pool.heat_LT is not None
    heat = pool.heat_LT
    if heat.shape[1] > MOST_COLUMNS:
        cut = np.linspace(0, heat.shape[1], MOST_COLUMNS + 1).astype(int)
        parts = pairwise(cut)
        heat = np.stack([heat[:, first:last].max(1) for first, last in parts], axis=1)
    layers, columns = heat.shape
    logs = np.log10(np.maximum(heat, FLOOR))
    low, high = float(logs.min()), float(max(logs.max(), logs.min() + 1e-6))
    shade = (logs - low) / (high - low)
    width, row = (WIDTH - 2 * MARGIN) / columns, max(8.0, min(24.0, 200 / layers))
    cells = []
    for layer in range(layers):
        y = 8 + (layers - 1 - layer) * row
        cells.append(_text(MARGIN - 4, y + row * 0.7, str(layer), anchor="end"))
        for column in range(columns):
            tone = 245 - int(210 * shade[layer, column])
            cells.append(
                f'<rect x="{MARGIN + column * width:.1f}" y="{y:.1f}" width="{width + 0.3:.1f}" '
                f'height="{row:.1f}" fill="rgb({tone},{tone},255)"/>'
            )
    height = int(8 + layers * row + 28)
    words = f"dark: {10**high:.2g}, light: {10**low:.2g} of the stream's size; tokens to the right"
    cells.append(_text(MARGIN, height - 8, words))
    title = f"{pool.name}: distance of the residual streams, layer by layer, token by token"
    return _figure(title, "".join(cells), height=height)
