"""All ranks of a trainer as one `Handle`: every call goes to all, rank 0's answer comes back.

Ranks wait for each other inside a call, so two rules hold: calls go out one after the other, the
same on every rank; and a call that was sent out is waited for to its end, even when whoever asked
has given up, before the next one goes out. A rank that is gone ends the others and becomes one
`TrainerLostError` that names it.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from rlmix.core.errors import LaunchError, TrainerLostError
from rlmix.launch.handle import Handle

LAST_WORDS_S = 15.0
"""After the first rank failed: how long the others' answers are waited for. Those that wait for a
rank that is gone fail at once; what is said first is often not the cause."""


class TrainerRanks:
    """Satisfies `launch.handle.Handle`."""

    def __init__(self, ranks: Sequence[Handle], *, name: str) -> None:
        self._ranks = list(ranks)
        self._turn = asyncio.Lock()
        self._open: asyncio.Task[Any] | None = None
        self._is_joined = len(self._ranks) == 1
        self.name = name

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """See `Handle.call`.

        Raises:
            TrainerLostError: a rank is gone; all are ended then.
            TimeoutError: `timeout_s` passed, waiting for earlier calls included.
        """
        async with asyncio.timeout(timeout_s), self._turn:
            if self._open is not None:
                await asyncio.wait((self._open,))
            self._open = asyncio.ensure_future(self._call_all(method, args, kwargs))
            self._open.add_done_callback(_look)
            return await asyncio.shield(self._open)

    async def _call_all(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_joined:
            address = await self._each(["open_store"], ranks=self._ranks[:1])
            await self._each(["join", address[0]], ranks=self._ranks)
            self._is_joined = True
        return (await self._each([method, *args], ranks=self._ranks, **kwargs))[0]

    async def _each(self, call: list[Any], *, ranks: Sequence[Handle], **kwargs: Any) -> list[Any]:
        method, *args = call
        tasks = [asyncio.ensure_future(rank.call(method, *args, **kwargs)) for rank in ranks]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if all(task.done() and not task.exception() for task in tasks):
            return [task.result() for task in tasks]
        await asyncio.wait(tasks, timeout=LAST_WORDS_S)
        failures = {
            rank.name: error
            for rank, task in zip(ranks, tasks, strict=True)
            if task.done() and (error := task.exception()) is not None
        }
        for task in tasks:
            task.cancel()
        raise self._cause(method, failures)

    def _cause(self, method: str, failures: dict[str, BaseException]) -> BaseException:
        """What to raise for failures of one call; ends all ranks where one was lost."""
        gone = [name for name, error in failures.items() if isinstance(error, LaunchError)]
        others = [error for error in failures.values() if not is_exchange_failure(error)]
        if not gone and others:
            return others[0]
        self.kill()
        if gone:
            first = str(failures[gone[0]])
            return TrainerLostError(f"trainer: {', '.join(gone)} died during {method}: {first}")
        name, error = next(iter(failures.items()))
        return TrainerLostError(f"trainer: {name} lost the other ranks during {method}: {error}")

    def kill(self) -> None:
        for rank in self._ranks:
            rank.kill()


def is_exchange_failure(error: BaseException) -> bool:
    """Did a rank fail because it could not reach another one?"""
    return isinstance(error, LaunchError) or (
        type(error).__name__.startswith("Dist")
        or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())
    )


def _look(task: "asyncio.Task[Any]") -> None:
    """An answer that nobody waits for any more is no unhandled error."""
    if not task.cancelled():
        task.exception()
