"""Exchanging replicas of a dear pool for those of a cheaper one while supply is right. Pure.

Growing and shrinking alone keep whatever was bought first. An exchange costs money: the new
replicas are paid for while they boot, the old ones while they drain. It is worth it when the lower
price has paid that back within a given time. Invariant: an exchange never lowers the supply below
what is wanted, never costs more an hour than before, and stays within what may come and go.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapRules:
    payback_s: float
    """An exchange must have paid for itself after so long."""
    drain_s: float
    """For which a replica that goes is paid for at most, after the new ones serve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPool:
    """One pool, as far as an exchange is concerned."""

    name: str
    usd_per_hour: float
    """Of one replica."""
    per_s: float
    """Trajectories a second of one replica."""
    cold_start_s: float
    may_leave: int
    """Replicas that floors, open groups and calm let go."""
    may_come: int
    """Replicas that ceiling, quota and budget let come while the old ones are still there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    out: str
    num_out: int
    into: str
    num_in: int
    saved_usd_per_hour: float
    exchange_usd: float

    def net_usd(self, payback_s: float) -> float:
        """Saved within the time, after what the exchange costs."""
        return self.saved_usd_per_hour * payback_s / HOUR_S - self.exchange_usd


def best_swap(
    pools: Sequence[SwapPool], *, supply_per_s: float, wanted_per_s: float, rules: SwapRules
) -> Swap | None:
    """The exchange between two pools that leaves most within the payback time; None: none does.

    Worked: h100 at 3 USD/h and 0.4/s for b200 at 5 USD/h and 1/s, supply 2.8 of 2.8 wanted: two of
    the first (0.8/s, 6 USD/h) for one of the second saves 1 USD/h; a cold start of 300 s of the
    second and 300 s of draining of two of the first cost 5 / 12 + 6 / 12 = 0.92 USD, paid back
    after 55 minutes.
    """
    found = []
    for old, new in permutations(pools, 2):
        if new.per_s <= 0:
            continue
        for num_out in range(1, old.may_leave + 1):
            short = wanted_per_s - (supply_per_s - num_out * old.per_s)
            num_in = max(1, math.ceil(short / new.per_s - 1e-9))
            if num_in > new.may_come:
                break  # More of the old would need more of the new.
            saved = num_out * old.usd_per_hour - num_in * new.usd_per_hour
            exchange = (
                num_in * new.usd_per_hour * new.cold_start_s
                + num_out * old.usd_per_hour * rules.drain_s
            ) / HOUR_S
            swap = Swap(
                out=old.name,
                num_out=num_out,
                into=new.name,
                num_in=num_in,
                saved_usd_per_hour=saved,
                exchange_usd=exchange,
            )
            if saved > 0 and swap.net_usd(rules.payback_s) > 0:
                found.append(swap)
    return max(
        found,
        key=lambda swap: (swap.net_usd(rules.payback_s), -swap.num_in, swap.into, swap.out),
        default=None,
    )
