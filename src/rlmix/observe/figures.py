"""How numbers are written for people: short, with a unit, and `-` for not measured."""

import math
from collections.abc import Sequence

MISSING = "-"
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.:-=+*#"


def duration(seconds: float | None) -> str:
    """`8 s`, `4:05` (minutes), `2:03:10` (hours)."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    if hours:
        return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    return f"{rest // 60}:{rest % 60:02d}"


def age(seconds: float) -> str:
    """Coarse: `12 s`, `5 min`, `3 h`, `2 d`."""
    for limit, unit_s, unit in ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h")):
        if seconds < limit:
            return f"{int(max(seconds, 0) // unit_s)} {unit}"
    return f"{int(seconds // 86400)} d"


def count(number: float | None) -> str:
    """`950`, `14.2k`, `3.1M`."""
    if number is None or not math.isfinite(number):
        return MISSING
    for limit, divisor, unit in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if abs(number) < limit * 0.9995:
            return f"{number:.0f}" if not unit else f"{number / divisor:.3g}{unit}"
    return f"{number / 1e9:.3g}G"


def usd(amount: float | None) -> str:
    """Two decimals from one dollar on; four below, because a step of a small run is cheap."""
    if amount is None or not math.isfinite(amount):
        return MISSING
    return f"${amount:,.2f}" if abs(amount) >= 1 or amount == 0 else f"${amount:.4f}"


def decimal(number: float | None, digits: int = 3) -> str:
    if number is None or not math.isfinite(number):
        return MISSING
    return f"{number:.{digits}f}"


def small(number: float | None) -> str:
    """For quantities over many orders of magnitude, e.g. `3.2e-04`; exact zero is `0`."""
    if number is None or not math.isfinite(number):
        return MISSING
    return "0" if number == 0 else f"{number:.1e}"


def percent(fraction: float | None, digits: int = 1) -> str:
    if fraction is None or not math.isfinite(fraction):
        return MISSING
    return f"{100 * fraction:.{digits}f} %"


def sparkline(values: Sequence[float], *, width: int, ascii_only: bool = False) -> str:
    """The last `width` values as bars between their own lowest and highest."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    bars = _ASCII_BLOCKS if ascii_only else _BLOCKS
    low, high = min(shown), max(shown)
    if high == low:
        return bars[len(bars) // 2] * len(shown)
    top = len(bars) - 1
    return "".join(bars[round(top * (value - low) / (high - low))] for value in shown)
