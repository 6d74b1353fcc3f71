"""The trainer as the loop calls it: its ranks, and what to do when one of them is lost.

All ranks are started again, load the newest complete checkpoint, and do the steps since then once
more with the samples of the first time, which are kept here. Pools, sessions and counters go on as
they are: the new trainer comes to the same version, so none has two contents (on a CPU with the
same bits; on accelerators up to the order of additions in their kernels). Then the call that failed
is made again. Invariant: one call at a time goes out, to its end, whoever has stopped waiting.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlmix.core.errors import TrainerLostError
from rlmix.loop.trainer_ranks import TrainerRanks

WORK = ("load", "train_step", "publish", "save", "finish_saves")
"""A limit on one of these is a limit on the ranks: one that is silent for longer is lost. With any
other call it is the caller's patience, and the ranks may answer late."""


class RecoveringTrainer:
    """Satisfies `launch.handle.Handle`."""

    name = "trainer"
    machine = None

    def __init__(
        self,
        ranks: TrainerRanks,
        *,
        checkpoints: Path,
        max_restarts: int,
        restart_window_s: float,
        on_event: Callable[..., None],
    ) -> None:
        """
        Args:
            max_restarts: within `restart_window_s`; one more loss is raised.
        """
        self._ranks = ranks
        self._checkpoints = checkpoints
        self._max_restarts = max_restarts
        self._restart_window_s = restart_window_s
        self._on_event = on_event
        self._turn = asyncio.Lock()
        self._open: asyncio.Task[Any] | None = None
        self._base: tuple[Any, int] | None = None
        """Folder that was loaded, and its step."""
        self._steps: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        """Arguments of the steps that no complete checkpoint holds yet."""
        self._restarts_s: list[float] = []

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Any:
        """See `Handle.call`.

        Raises:
            TrainerLostError: a rank was lost and may not be started again, or what would bring it
                back is not there.
        """
        is_work = method in WORK
        limit_s = timeout_s if is_work else None
        async with asyncio.timeout(None if is_work else timeout_s), self._turn:
            if self._open is not None and not self._open.done():
                await asyncio.wait((self._open,))
            self._open = asyncio.ensure_future(self._do(method, args, kwargs, limit_s))
            self._open.add_done_callback(_look)
            return await asyncio.shield(self._open)

    @property
    def is_placed(self) -> bool:
        """Ranks are waited for by their first call."""
        return True

    async def placed(self) -> None:
        """Ranks are waited for by their first call."""

    def kill(self) -> None:
        if self._open is not None:
            self._open.cancel()
        self._ranks.kill()

    async def _do(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], limit_s: float | None
    ) -> Any:
        while True:
            try:
                result = await self._ranks.call(method, *args, limit_s=limit_s, **kwargs)
                break
            except TrainerLostError as error:
                await self._recover(error, limit_s)
        if method == "load":
            self._base, self._steps = (args[0], int(result["step"])), {}
        elif method == "train_step":
            self._steps[int(kwargs["step"])] = (args, kwargs)
        elif method == "finish_saves":
            self._forget()
        return result

    async def _recover(self, lost: TrainerLostError, limit_s: float | None) -> None:
        """Back to where the ranks were; raises when that cannot be, or happens too often."""
        while True:
            self._on_event("trainer_lost", str(lost))
            now_s = time.monotonic()
            recent = [at for at in self._restarts_s if now_s - at < self._restart_window_s]
            if len(recent) >= self._max_restarts:
                raise TrainerLostError(
                    f"{lost}\ntrainer: {len(recent)} restarts within {self._restart_window_s:g} s "
                    "(launch.max_restarts) did not help"
                ) from lost
            self._restarts_s = [*recent, now_s]
            self._ranks.start()
            try:
                await self._catch_up(limit_s)
                return
            except TrainerLostError as error:
                lost = error

    async def _catch_up(self, limit_s: float | None) -> None:
        if self._base is None:
            return  # Nothing was loaded yet; the call that failed is `load` itself.
        folder, step = await asyncio.to_thread(self._newest)
        again = sorted(number for number in self._steps if number > step)
        last = max(self._steps, default=step)
        if again != list(range(step + 1, last + 1)):
            raise TrainerLostError(
                f"trainer: the newest complete checkpoint is of step {step}, but of the steps up "
                f"to {last} only {again} can be done again; go on with --resume"
            )
        loaded = await self._ranks.call("load", folder, limit_s=limit_s)
        for number in again:
            args, kwargs = self._steps[number]
            await self._ranks.call("train_step", *args, limit_s=limit_s, **kwargs)
        self._on_event(
            "trainer_restarted",
            f"all ranks again, from {Path(folder).name}",
            step=int(loaded["step"]),
            steps_done_again=len(again),
            incarnation=self._ranks.incarnation,
        )

    def _newest(self) -> tuple[Any, int]:
        """(folder, step) to load: the newest complete checkpoint of this run, or where it began."""
        from rlmix.trainer.checkpoint import newest_complete

        assert self._base is not None
        newest = newest_complete(self._checkpoints)
        if newest is None:
            return self._base
        step = step_of(newest)
        return (newest, step) if step >= self._base[1] else self._base

    def _forget(self) -> None:
        """Drop the steps that a complete checkpoint holds. A save may still be being written."""
        complete = [
            step_of(manifest.parent) for manifest in self._checkpoints.glob("step_*/manifest.json")
        ]
        newest = max(complete, default=0)
        self._steps = {step: kept for step, kept in self._steps.items() if step > newest}


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _look(task: "asyncio.Task[Any]") -> None:
    """An answer that nobody waits for any more is no unhandled error."""
    if not task.cancelled():
        task.exception()
