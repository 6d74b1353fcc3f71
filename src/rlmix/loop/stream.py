"""The order in which tasks become groups: deterministic, resumable, nothing lost or repeated.

Invariant: every ticket handed out is, at any time, either open (being sampled or waiting to be
trained on), returned (will be handed out again, first) or done. The state is those three facts,
so a resumed run continues with exactly the tasks that an uninterrupted one would have used.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlmix.core.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """The right to sample one group."""

    index: int
    """Position in the run's endless task order, from 0; names the group."""
    task_id: str
    attempt: int = 0
    """How often this position was handed out before."""

    @property
    def group_id(self) -> str:
        return f"g{self.index:06d}" if self.attempt == 0 else f"g{self.index:06d}r{self.attempt}"


class TaskStream:
    """Walks over the task ids in a new seeded order each epoch."""

    def __init__(self, task_ids: Sequence[str], *, seed: int) -> None:
        if not task_ids:
            raise DataError("tasks: the source has no task; raise tasks.limit or pick another one")
        self._task_ids = tuple(task_ids)
        self._seed = seed
        self._next_index = 0
        self._open: dict[int, Ticket] = {}
        self._returned: list[Ticket] = []
        self._epoch_order: tuple[int, tuple[str, ...]] | None = None

    def take(self) -> Ticket:
        """The next ticket: returned ones first, oldest position first."""
        if self._returned:
            self._returned.sort(key=lambda ticket: ticket.index)
            ticket = self._returned.pop(0)
        else:
            ticket = Ticket(index=self._next_index, task_id=self._task_at(self._next_index))
            self._next_index += 1
        self._open[ticket.index] = ticket
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        """The group was lost (stale, void): hand its position out again."""
        del self._open[ticket.index]
        self._returned.append(
            Ticket(index=ticket.index, task_id=ticket.task_id, attempt=ticket.attempt + 1)
        )

    def finish(self, ticket: Ticket) -> None:
        """The group was trained on."""
        del self._open[ticket.index]

    @property
    def num_open(self) -> int:
        return len(self._open)

    def state(self) -> dict[str, Any]:
        """JSON-ready; open tickets count as returned, since their sessions die with the run."""
        pending = [*self._returned, *self._open.values()]
        pending.sort(key=lambda ticket: ticket.index)
        return {
            "next_index": self._next_index,
            "pending": [[ticket.index, ticket.attempt] for ticket in pending],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._next_index = int(state["next_index"])
        self._open = {}
        self._returned = [
            Ticket(index=index, task_id=self._task_at(index), attempt=attempt + 1)
            for index, attempt in state["pending"]
        ]

    def _task_at(self, index: int) -> str:
        epoch, place = divmod(index, len(self._task_ids))
        if self._epoch_order is None or self._epoch_order[0] != epoch:
            order = list(self._task_ids)
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._epoch_order = (epoch, tuple(order))
        return self._epoch_order[1][place]
