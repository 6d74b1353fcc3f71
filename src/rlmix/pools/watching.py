"""Work on a replica that may end under it: then its end is the news, not the work's failure."""

import asyncio
from collections.abc import Awaitable
from typing import Any

NOTICE_S = 0.3
"""How long the end of an engine may take to be noticed; see `launch.process`."""


class Gone(Exception):
    """The replica cannot go on; the message says why."""


async def until_gone(watch: "asyncio.Task[str]", work: Awaitable[Any]) -> Any:
    """The work's result.

    Args:
        watch: ends when the replica does, with the reason.
    Raises:
        Gone: the replica ended first.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done() and not task.cancelled() and task.exception() is not None:
            # An engine that died fails its requests a moment before its end is noticed.
            await asyncio.wait({watch}, timeout=NOTICE_S)
        if watch.done():
            raise Gone(watch.result())
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until_due(watch: "asyncio.Task[str]", order: asyncio.Event, *, every_s: float) -> None:
    """Sleep until the next load report, an order, or the end of the replica.

    Args:
        order: set by whoever wants something of the slot; cleared here.
    """
    waits = asyncio.create_task(order.wait())
    try:
        await asyncio.wait({waits, watch}, timeout=every_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
    order.clear()
