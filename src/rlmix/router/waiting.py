"""Who waits for a place, and who is next.

Requests that ask for the same (version, view, size) form one line; a line that nobody can serve
holds up no other. Within a line, and between lines, the one with the lowest rank is first
(`strategies.rank`). Invariant: a request that has waited half of its patience has a replica
promised to it, which takes no others meanwhile, so that small requests cannot starve a large one.
"""

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from rlmix.router.strategies import Ask

Line = tuple[int | None, str | None, bool, int]


@dataclass(slots=True, order=True)
class Waiter:
    """One request without a place; `place` gets its replica, or why there will be none."""

    rank: float
    sequence: int
    ask: Ask = field(compare=False)
    group_id: str = field(compare=False)
    promised_from_s: float = field(compare=False)
    place: "asyncio.Future[object]" = field(compare=False)


Choose = Callable[[Waiter, frozenset[str]], object | None]
"""(waiter, replicas that are promised to others) -> its place or refusal; None: go on waiting."""

BestFor = Callable[[Waiter], str | None]
"""Replica to keep free for a waiter; None: there is none."""


class WaitingRoom:
    """All waiters."""

    def __init__(self) -> None:
        self._lines: dict[Line, list[Waiter]] = {}
        self._sequence = itertools.count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, ask: Ask, *, group_id: str, rank: float, promised_from_s: float) -> Waiter:
        place: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        waiter = Waiter(rank, next(self._sequence), ask, group_id, promised_from_s, place)
        heapq.heappush(self._lines.setdefault(line_of(ask), []), waiter)
        self._size += 1
        return waiter

    def remove(self, waiter: Waiter) -> None:
        """It stopped waiting without a place."""
        line = self._lines.get(line_of(waiter.ask), [])
        if waiter in line:
            line.remove(waiter)
            heapq.heapify(line)
            self._size -= 1
            if not line:
                del self._lines[line_of(waiter.ask)]

    def serve(self, choose: Choose, best_for: BestFor, *, now_s: float) -> None:
        """Give places until the head of every line must wait."""
        blocked: set[Line] = set()
        promised: set[str] = set()
        while True:
            heads = [(line[0], key) for key, line in self._lines.items() if key not in blocked]
            if not heads:
                return
            waiter, key = min(heads)
            answer = choose(waiter, frozenset(promised))
            if answer is None:
                blocked.add(key)
                if now_s >= waiter.promised_from_s and (name := best_for(waiter)) is not None:
                    promised.add(name)
                continue
            line = self._lines[key]
            heapq.heappop(line)
            self._size -= 1
            if not line:
                del self._lines[key]
            if not waiter.place.done():
                waiter.place.set_result(answer)


def line_of(ask: Ask) -> Line:
    """Sizes are told apart by powers of two."""
    return (ask.min_version, ask.view, ask.is_view_strict, ask.total_tokens.bit_length())
