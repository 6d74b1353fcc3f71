"""What counts as collapsed, stable and close: rules that were fixed before the long runs.

Pure functions of the curves of one cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass

COLLAPSED_FRAC = 0.5
"""Smoothed success below this share of its best so far is down."""
VERDICTS = ("collapsed", "decayed", "stable")
DECAYED_FRAC = 0.9
"""A cell that did not collapse, but ends below this share of its best, has decayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """How long a study looks."""

    window_steps: int
    """Updates that a smoothed success is the mean of."""
    collapsed_steps: int
    """Updates in a row that it must be down."""


TOKEN_SPAN = Span(window_steps=25, collapsed_steps=50)
AGENTIC_SPAN = Span(window_steps=5, collapsed_steps=10)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    verdict: str
    """collapsed, decayed or stable."""
    collapse_step: int | None
    """First update of the run of bad ones; None without a collapse."""
    down_since: int | None
    """The same of a run of bad ones that lasts to the end, long enough for a collapse or not."""
    best: float
    """Highest smoothed success, 0 to 1."""
    last: float
    """Smoothed success at the end."""


def smoothed(values: Sequence[float], window_steps: int = TOKEN_SPAN.window_steps) -> list[float]:
    """Mean over the last `window_steps` values, or as many as there are."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [
        (sums[i + 1] - sums[max(0, i + 1 - window_steps)]) / min(i + 1, window_steps)
        for i in range(len(values))
    ]


def outcome(
    success: Sequence[float], held_out: Sequence[tuple[int, float]], span: Span = TOKEN_SPAN
) -> Outcome:
    """Judge one cell.

    Args:
        success: mean success of the sessions trained on, 0 to 1, for each update.
        held_out: (update, score of the trainer's own weights) where it was measured, in order.
    Returns:
        `collapsed` where smoothed success stayed below half of its best for
        `span.collapsed_steps` updates in a row and the held-out score was below half of its own
        best in that time as well.
    """
    curve = smoothed(success, span.window_steps)
    best, down_since = 0.0, None
    verdict, collapse_step = "", None
    for step, value in enumerate(curve, 1):
        best = max(best, value) if step >= span.window_steps else best
        if value >= COLLAPSED_FRAC * best:
            down_since = None
        elif down_since is None:
            down_since = step
        if (
            down_since is not None
            and step - down_since + 1 >= span.collapsed_steps
            and _fell(held_out, down_since, step)
        ):
            verdict, collapse_step = "collapsed", down_since
            break
    if not verdict:
        verdict = "decayed" if curve[-1] < DECAYED_FRAC * best else "stable"
    return Outcome(
        verdict=verdict,
        collapse_step=collapse_step,
        down_since=down_since,
        best=max(best, *curve[span.window_steps - 1 :], 0.0),
        last=curve[-1],
    )


def _fell(held_out: Sequence[tuple[int, float]], first: int, last: int) -> bool:
    best = max((score for step, score in held_out if step <= last), default=0.0)
    return any(score < COLLAPSED_FRAC * best for step, score in held_out if first <= step <= last)


def lead_steps(
    signal: Sequence[float], *, threshold: float, collapse_step: int | None
) -> int | None:
    """Updates from a signal's first value above `threshold` to the collapse.

    Returns: None without a collapse or where the signal came only afterwards.
    """
    if collapse_step is None:
        return None
    for step, value in enumerate(signal, 1):
        if value > threshold:
            return collapse_step - step if step <= collapse_step else None
    return None
