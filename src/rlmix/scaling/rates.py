"""What one replica of each pool finishes at full load, learned from a running fleet. Pure.

A fleet shows its rate only while the trainer waits for it: then what it finishes is all that it
can. At any other time the trainer is the limit, and what is finished over the share of the batch
that is in use is a guess, replaced by what was shown as soon as anything was.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LEAST_USED_FRAC = 0.25
"""A replica that decodes less than this share of its batch says little; beyond four times of what
is finished nothing is believed."""
WEIGHT = 0.5
"""Of a new window against all earlier ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolWindow:
    """One pool over some time in which its replicas did not change."""

    ready: int
    finished: int
    """Trajectories that it finished."""
    used_frac: float
    """Requests that its replicas worked on over those that they can, on the mean, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    per_s: Mapping[str, float] = field(default_factory=dict)
    """Pool -> trajectories a second of one replica."""
    shown: frozenset[str] = frozenset()
    """Pools whose rate was shown; the others are guesses."""

    def of(self, pool: str, speeds: Mapping[str, float]) -> float:
        """Of a pool that was never seen: what its planned speed makes likely.

        Args:
            speeds: pool -> planned speed, relative to the others.
        """
        if pool in self.per_s:
            return self.per_s[pool]
        known = [name for name in self.per_s if name in speeds]
        planned = sum(speeds[name] for name in known)
        if pool not in speeds or planned <= 0:
            return 0.0
        return speeds[pool] * sum(self.per_s[name] for name in known) / planned


def learn(
    rates: Rates, windows: Mapping[str, PoolWindow], *, seconds: float, is_waiting: bool
) -> Rates:
    """Rates after one more window.

    Args:
        is_waiting: the trainer waited for samples in it.

    Worked: 2 replicas finish 40 in 10 s while the trainer waits: 2 a second each. Had it not
    waited, with half of the batch in use: at least 2, and 4 until better is known.
    """
    if seconds <= 0:
        return rates
    per_s, shown = dict(rates.per_s), set(rates.shown)
    for name, window in windows.items():
        if window.ready <= 0:
            continue
        seen = window.finished / seconds / window.ready
        if is_waiting:
            before = per_s[name] if name in shown else seen
            per_s[name] = (1.0 - WEIGHT) * before + WEIGHT * seen
            shown.add(name)
        elif name in shown:
            per_s[name] = max(per_s[name], seen)
        elif seen > 0:
            per_s[name] = seen / max(min(window.used_frac, 1.0), LEAST_USED_FRAC)
    return replace(rates, per_s=per_s, shown=frozenset(shown))
