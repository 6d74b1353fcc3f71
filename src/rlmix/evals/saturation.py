"""How busy the engines behind an evaluation were, from what their fleet says of itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlmix.pools.spec import ReplicaStatus

LOOK_EVERY_S = 1.0
"""How often replicas are asked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How busy the engines were at one moment."""

    running: int
    queued: int
    tokens_per_s: float


def load_of(status: Sequence[ReplicaStatus]) -> Load:
    return Load(
        running=sum(one.running for one in status),
        queued=sum(one.queued for one in status),
        tokens_per_s=sum(one.tokens_per_s for one in status),
    )


def saturation(looks: Sequence[Load], *, places: int) -> dict[str, Any]:
    """What stands beside a score about its engines; a score under a full queue is one of the
    machine too, where sessions have a time limit.

    Args:
        places: requests that all engines together work on at a time.
    """
    if not looks:
        return {"places": places, "looks": 0}
    count = len(looks)
    return {
        "places": places,
        "looks": count,
        "mean_busy_frac": round(sum(one.running for one in looks) / count / places, 4),
        "peak_busy_frac": round(max(one.running for one in looks) / places, 4),
        "mean_queued": round(sum(one.queued for one in looks) / count, 3),
        "full_frac": round(sum(one.running + one.queued >= places for one in looks) / count, 4),
        "mean_tokens_per_s": round(sum(one.tokens_per_s for one in looks) / count, 1),
    }
