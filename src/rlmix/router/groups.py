"""Where the sessions of one group go, relative to each other: a policy beside the delay. Pure.

`free`: no rule. `pack`: one pool for the whole group, so that its rewards are compared between
samples of the same numerics. `spread`: over all pools, so that no pool's numerics decide a group.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

MAX_GROUPS = 20_000
"""Least recently used groups beyond this are forgotten: their members have long been placed."""

Rule = Callable[[str, Mapping[str, int]], bool]
"""(pool, members that each pool has already) -> whether the pool is preferred."""


def pack(pool: str, members: Mapping[str, int]) -> bool:
    """The pool that has most of the group, the first name among equals; any for the first."""
    if not members:
        return True
    most = max(members.values())
    return pool == min(name for name, count in members.items() if count == most)


def spread(pool: str, members: Mapping[str, int]) -> bool:
    """A pool that has fewer of the group than some other, or as few as all."""
    count = members.get(pool, 0)
    return count == 0 or count < max(members.values())


PLACEMENTS: Mapping[str, Rule | None] = {"free": None, "pack": pack, "spread": spread}


class GroupTable:
    """Members of each group by pool."""

    def __init__(self, placement: str) -> None:
        self._rule = PLACEMENTS[placement]
        self._groups: OrderedDict[str, dict[str, int]] = OrderedDict()

    def preference(self, group_id: str) -> Callable[[str], bool] | None:
        """Whether a pool is preferred for the group's next session; None: no preference."""
        rule = self._rule
        if rule is None or not group_id:
            return None
        members = self._groups.get(group_id, {})
        return lambda pool: rule(pool, members)

    def placed(self, group_id: str, pool: str) -> None:
        if self._rule is None or not group_id:
            return
        members = self._groups.setdefault(group_id, {})
        members[pool] = members.get(pool, 0) + 1
        self._groups.move_to_end(group_id)
        if len(self._groups) > MAX_GROUPS:
            self._groups.popitem(last=False)
