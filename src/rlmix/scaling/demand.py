"""How many trajectories a second the trainer needs, within the staleness bound. Pure arithmetic.

Invariant: more sessions a step, a faster step or more waste never lower the demand; a tighter
staleness bound never raises it, because samples that would come too old are not worth paying for.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerNeed:
    """What the trainer takes."""

    sessions_per_step: int
    """Trajectories of one optimizer step."""
    step_s: float
    """The trainer's own time for a step, waiting left out."""
    max_staleness: int
    """Versions that the oldest token of a trajectory may lie behind."""
    session_s: float
    """From a session's first request to its verdict, on the mean."""
    waste_frac: float = 0.0
    """Share of finished sessions that never train: void, or dropped as too old."""


def cycle_s(need: TrainerNeed) -> float:
    """Shortest time between two versions that the staleness bound lets a trainer keep up.

    A session that runs for `session_s` sees the trainer step `session_s / cycle` times; with a
    bound of s versions the cycle is at least `session_s / s`. With s = 0 nothing overlaps: the
    step follows the sessions.

    Raises:
        ValueError: a time or a number is negative, or nothing is left after waste.
    """
    if need.step_s < 0 or need.session_s < 0 or need.max_staleness < 0:
        raise ValueError(
            f"demand: step_s={need.step_s}, session_s={need.session_s} and "
            f"max_staleness={need.max_staleness} must be 0 or more"
        )
    if need.max_staleness == 0:
        return need.step_s + need.session_s
    return max(need.step_s, need.session_s / need.max_staleness)


def trajectories_per_s(need: TrainerNeed) -> float:
    """Rate at which sessions must finish so that the trainer never waits.

    Worked: 1,024 sessions a step of 60 s, sessions of 600 s, at most 8 versions old, a tenth
    wasted: the cycle is max(60, 600 / 8) = 75 s, the demand 1,024 / 75 / 0.9 = 15.2 a second.
    """
    if not 0.0 <= need.waste_frac < 1.0:
        raise ValueError(f"demand: waste_frac={need.waste_frac} must be 0 or more and below 1")
    cycle = cycle_s(need)
    if need.sessions_per_step == 0 or cycle <= 0:
        return 0.0
    return need.sessions_per_step / cycle / (1.0 - need.waste_frac)
