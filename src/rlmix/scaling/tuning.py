"""Which engine arguments give most tokens per dollar: a search fed with measurements. Pure.

Settings are tried one at a time beside the default, the worse half is dropped, the rest is measured
again, and the best values of all that helped are tried together (successive halving, then one step
along every coordinate at once). Invariant: the default stays unless another candidate beats it by
more than the noise of both; what could not be measured is never chosen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

Value = int | float | str | bool
Settings = tuple[tuple[str, Value], ...]
"""Argument and value, in the order of the knobs; empty: the default."""

DEFAULT: Settings = ()
FINALISTS = 3
"""Single settings that are left when halving ends."""
FINAL_VISITS = 2
"""Times that the default and the last candidates are started again, in turn."""
NOISE_WIDTHS = 3.0
"""Standard errors of a difference that are taken for chance: of six loads against six, and two
candidates to choose from, two of them would be exceeded once in ten searches for nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came of a search."""

    settings: Settings
    """Empty: the default is kept."""
    gain_frac: float
    """Of the best candidate over the default, also where that is kept; 0 without a candidate."""
    noise_frac: float
    """What such a difference may be by chance, as a share of the default."""
    best: Settings
    """The best candidate, chosen or not."""

    @property
    def is_better(self) -> bool:
        return bool(self.settings)


class Phase(StrEnum):
    SINGLES = "singles"
    HALVING = "halving"
    FINAL = "final"


@dataclass(slots=True, kw_only=True)
class Search:
    """Ask it what to measure, tell it what was measured, and judge at any time."""

    knobs: Mapping[str, Sequence[Value]]
    """Argument -> values to try in place of the default's."""
    values: dict[Settings, list[float]] = field(default_factory=dict)
    """Candidate -> tokens per dollar of every load."""
    failed: dict[Settings, str] = field(default_factory=dict)
    _queue: list[Settings] = field(default_factory=list)
    _alive: list[Settings] = field(default_factory=list)
    _last: dict[Settings, list[float]] = field(default_factory=dict)
    """Of the last comparison alone: whoever won the earlier rounds had luck as well."""
    _phase: Phase = Phase.SINGLES

    def ask(self) -> Settings | None:
        """The candidate to start and measure next; None: the search is over."""
        if not self._queue:
            self._queue = self._next_round()
        return self._queue.pop(0) if self._queue else None

    def tell(self, settings: Settings, loads: Sequence[float]) -> None:
        """Tokens per dollar of the loads of one start."""
        self.values.setdefault(settings, []).extend(loads)
        if self._phase is Phase.FINAL:
            self._last.setdefault(settings, []).extend(loads)

    def fail(self, settings: Settings, reason: str) -> None:
        """It cannot be started, or is not what the pool promises."""
        self.failed[settings] = reason

    def verdict(self) -> Verdict:
        """The default is kept unless the best of the last comparison beats it there."""
        mine = self._last.get(DEFAULT, [])
        others = {s: v for s, v in self._last.items() if s and s not in self.failed}
        if not mine or not others:
            return Verdict(settings=DEFAULT, gain_frac=0.0, noise_frac=0.0, best=DEFAULT)
        best = max(others, key=lambda settings: _mean(others[settings]))
        difference = _mean(others[best]) - _mean(mine)
        noise = NOISE_WIDTHS * math.sqrt(_error(mine) ** 2 + _error(others[best]) ** 2)
        return Verdict(
            settings=best if difference > noise else DEFAULT,
            gain_frac=difference / _mean(mine),
            noise_frac=noise / _mean(mine),
            best=best,
        )

    def _next_round(self) -> list[Settings]:
        if self._phase is Phase.SINGLES:
            self._phase = Phase.HALVING
            self._alive = [
                ((name, value),) for name, values in self.knobs.items() for value in values
            ]
            return [DEFAULT, *self._alive] if self._alive else []
        if self._phase is Phase.FINAL or DEFAULT in self.failed:
            return []
        self._alive = self._ranked(self._alive)
        if len(self._alive) > FINALISTS:
            self._alive = self._alive[: math.ceil(len(self._alive) / 2)]
            return [DEFAULT, *self._alive]
        self._phase = Phase.FINAL
        last = self._alive[:1]
        if (together := self._together()) and together not in last:
            last.append(together)
        return [DEFAULT, *last] * FINAL_VISITS if last else []

    def _ranked(self, among: Sequence[Settings]) -> list[Settings]:
        measured = [one for one in among if one not in self.failed and self.values.get(one)]
        return sorted(measured, key=lambda one: -_mean(self.values[one]))

    def _together(self) -> Settings:
        """The best value of every argument that looked better than the default, and by more than
        the default's own error."""
        reference = _mean(self.values[DEFAULT]) + _error(self.values[DEFAULT])
        found: dict[str, Value] = {}
        singles = [one for one in self.values if len(one) == 1]
        for one in self._ranked(singles):
            (name, value), mean = one[0], _mean(self.values[one])
            if mean > reference and name not in found:
                found[name] = value
        joined = tuple((name, found[name]) for name in self.knobs if name in found)
        return joined if len(joined) > 1 else ()


def spread_frac(values: Sequence[float]) -> float:
    """Standard deviation over the mean; 0 of a single value."""
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1)) / mean


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean; of a single value unknown, so infinite."""
    if len(values) < 2:
        return math.inf
    return spread_frac(values) * _mean(values) / math.sqrt(len(values))
