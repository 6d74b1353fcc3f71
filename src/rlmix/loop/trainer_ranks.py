"""All ranks of a trainer: every call goes to all of them, rank 0's answer comes back.

Ranks wait for each other inside a call, so calls must go out one after the other and the same on
every rank; the caller (`loop.trainer_recovery`) sees to that. Invariant: a rank that is gone, or
that does not answer in time, ends the others too and becomes one `TrainerLostError` that names it.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from rlmix.core.errors import LaunchError, TrainerLostError
from rlmix.launch.handle import Handle

LAST_WORDS_S = 15.0
"""After the first rank failed: how long the others' answers are waited for. Those that wait for a
rank that is gone fail at once, and what is said first is often not the cause."""


class TrainerRanks:
    """The processes of one incarnation; `start` makes the next one."""

    def __init__(self, spawn: Callable[[int, int], Handle], *, num_ranks: int) -> None:
        """
        Args:
            spawn: makes the process of a rank, given its number and the incarnation's, from 1.
        """
        self._spawn = spawn
        self._num_ranks = num_ranks
        self._ranks: list[Handle] = []
        self._is_joined = False
        self.incarnation = 0

    def start(self) -> None:
        """End what there is and start all ranks; they meet at the first call."""
        self.kill()
        self.incarnation += 1
        self._ranks = [self._spawn(rank, self.incarnation) for rank in range(self._num_ranks)]
        self._is_joined = False

    def kill(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.kill()

    async def call(self, method: str, *args: Any, limit_s: float | None, **kwargs: Any) -> Any:
        """One method on all ranks.

        Args:
            limit_s: after which a rank that has not answered is taken for lost; None: never.
        Raises:
            TrainerLostError: a rank is lost; all are ended then.
        """
        if not self._ranks:
            raise TrainerLostError(f"trainer: no rank is left to do {method}")
        if not self._is_joined and self._num_ranks > 1:
            address = await self._each(self._ranks[:1], "open_store", (), {}, limit_s)
            await self._each(self._ranks, "join", (address[0],), {}, limit_s)
        self._is_joined = True
        return (await self._each(self._ranks, method, args, kwargs, limit_s))[0]

    async def _each(
        self,
        ranks: Sequence[Handle],
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limit_s: float | None,
    ) -> list[Any]:
        tasks = {
            rank.name: asyncio.ensure_future(rank.call(method, *args, **kwargs)) for rank in ranks
        }
        try:
            await asyncio.wait(tasks.values(), timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks.values()):
                await asyncio.wait(tasks.values(), timeout=LAST_WORDS_S)
            late = [name for name, task in tasks.items() if not task.done()]
            failures = {
                name: error
                for name, task in tasks.items()
                if task.done() and (error := task.exception()) is not None
            }
            if not late and not failures:
                return [task.result() for task in tasks.values()]
        finally:
            for task in tasks.values():
                task.cancel()
        error = cause_of(method, failures, late=late)
        if isinstance(error, TrainerLostError):
            self.kill()
        raise error


def cause_of(
    method: str, failures: dict[str, BaseException], *, late: Sequence[str]
) -> BaseException:
    """What to raise when some ranks failed in one call and others (`late`) did not answer.

    A process that is gone explains everything else; then an error of the ranks' own making, which
    all of them share or which stopped the others; last come broken connections and silence.
    """
    gone = {name: error for name, error in failures.items() if isinstance(error, LaunchError)}
    if gone:
        first = next(iter(gone.values()))
        return TrainerLostError(f"trainer: {', '.join(gone)} died during {method}: {first}")
    for error in failures.values():
        if not is_broken_exchange(error):
            return error
    if failures:
        name, error = next(iter(failures.items()))
        return TrainerLostError(f"trainer: {name} lost another rank during {method}: {error}")
    return TrainerLostError(f"trainer: {', '.join(late)} did not answer to {method} in time")


def is_broken_exchange(error: BaseException) -> bool:
    """Did a rank fail only because another one did not take part?"""
    return isinstance(error, RuntimeError) and (
        type(error).__name__.startswith("Dist")
        or any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "tcpstore"))
    )
