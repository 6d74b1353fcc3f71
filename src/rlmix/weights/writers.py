"""The processes that write one folder together, as one of them sees it.

Invariant: every writer makes the same calls in the same order, and meets the same errors: what one
of them could not do is raised by all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Writers:
    """One of `size` writers; they see the same folders."""

    rank: int = 0
    size: int = 1
    group: Any = None
    """Gloo, of all of them, and used for nothing else while they write; None for one."""

    def gather(self, mine: T) -> list[T]:
        """Every writer's object on every writer, in the order of ranks."""
        if self.size == 1:
            return [mine]
        from rlmix.numerics.consistent.reduction import gather_objects

        return gather_objects(mine, self.group)

    def agree(self, mine: T | Exception) -> list[T]:
        """As `gather`; raises the first writer's error where somebody brings one."""
        found = self.gather(mine)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found  # type: ignore[return-value]

    def first(self, work: Callable[[], T]) -> T:
        """What the first writer's `work` gives, for all; or its error."""
        mine: T | Exception | None = None
        if self.rank == 0:
            try:
                mine = work()
            except Exception as error:
                mine = error
        return self.agree(mine)[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Until all are here; an exception when one is gone."""
        self.gather(None)


ALONE = Writers()
