"""Weight updates through a process group, for one engine: begin, buckets, end, proof.

The order is the engine's contract (SGLang 0.5.23): without a begin every push is refused; the
version is stamped by the push that carries it, so only the last bucket does. Invariant: whatever
fails after the first bucket leaves an engine of mixed weights, and the error says so; the caller
ends that engine and never lets it serve.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlmix.core.errors import EngineError, WeightSyncError
from rlmix.engine.client import EngineClient
from rlmix.weights.push import (
    BUCKET_BYTES,
    Bucket,
    PushGroup,
    check_names,
    read_buckets,
    tensor_names,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """One version pushed into one engine."""

    num_bytes: int
    num_buckets: int
    push_s: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / 1e9 / max(self.push_s, 1e-9)


class Pusher:
    """Holds the group to one engine for as long as both live. One push at a time."""

    def __init__(
        self,
        url: str,
        *,
        name: str,
        token: str | None,
        host: str,
        num_ranks: int,
        backend: str,
        limit_s: float,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            host: address at which the engine reaches this process.
            num_ranks: tensor-parallel ranks of the engine.
            limit_s: for each step: the group, a bucket, an answer.
        """
        self._url = url
        self._name = name
        self._token = token
        self._host = host
        self._num_ranks = num_ranks
        self._backend = backend
        self._limit_s = limit_s
        self._bucket_bytes = bucket_bytes
        self._group: PushGroup | None = None

    async def push(self, folder: Path, *, version: int, served: frozenset[str]) -> PushReport:
        """Bring the engine to the version in `folder`. The engine is paused; its cached prefixes
        stay until it is told to flush them.

        Args:
            served: names of the tensors that the engine started with.
        Raises:
            WeightSyncError: the folder does not fit the engine or cannot be read; nothing was sent.
            EngineError: the engine refused, or is gone; its weights may be mixed. End it.
        """
        check_names(await asyncio.to_thread(tensor_names, folder), served)
        client = EngineClient(self._url, token=self._token, timeout_s=self._limit_s)
        try:
            group = self._group or await self._meet(client)
            return await self._push(client, group, folder, version)
        except (WeightSyncError, EngineError) as error:
            self.close()
            raise EngineError(
                f"pools: {self._name}: pushing version {version} failed, its weights may be mixed: "
                f"{error}"
            ) from error
        finally:
            await client.close()

    async def _meet(self, client: EngineClient) -> PushGroup:
        group = await asyncio.to_thread(
            PushGroup,
            host=self._host,
            world_size=1 + self._num_ranks,
            backend=self._backend,
            limit_s=self._limit_s,
        )
        joining = client.post_json("/init_weights_update_group", group.invitation())
        await _together(joining, group.meet)
        self._group = group
        return group

    async def _push(
        self, client: EngineClient, group: PushGroup, folder: Path, version: int
    ) -> PushReport:
        started_s = time.monotonic()
        num_bytes = num_buckets = 0
        _expect_success(await client.post_json("/begin_weight_update", {}))
        buckets = read_buckets(folder, max_bytes=self._bucket_bytes)
        bucket: Bucket | None = await asyncio.to_thread(next, buckets, None)
        while bucket is not None:
            following = await asyncio.to_thread(next, buckets, None)
            body: dict[str, Any] = {
                **bucket.announcement(),
                "group_name": group.name,
                "flush_cache": False,
                "abort_all_requests": False,
            }
            if following is None:
                body["weight_version"] = str(version)
            flat = await asyncio.to_thread(bucket.flat)
            answer = await _together(
                client.post_json("/update_weights_from_distributed", body),
                lambda flat=flat: group.send(flat),  # type: ignore[misc]
            )
            _expect_success(answer)
            num_bytes += bucket.num_bytes
            num_buckets += 1
            bucket = following
        _expect_success(await client.post_json("/end_weight_update", {}))
        return PushReport(
            num_bytes=num_bytes, num_buckets=num_buckets, push_s=time.monotonic() - started_s
        )

    def close(self) -> None:
        """Let go of the engine; the next push forms a group anew."""
        if self._group is not None:
            self._group.close()
            self._group = None


async def _together(asking: Any, work: Callable[[], None]) -> dict[str, Any]:
    """The engine's answer, and the blocking half of the same exchange in a thread. Whichever fails
    first is the error; a thread that is left behind ends at the group's limit."""
    request = asyncio.ensure_future(asking)
    thread = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.wait({request, thread}, return_when=asyncio.FIRST_EXCEPTION)
        if request.done() and request.exception() is not None:
            raise request.exception()  # type: ignore[misc]
        await thread
        answer: dict[str, Any] = await request
        return answer
    finally:
        request.cancel()
        thread.add_done_callback(_read_quietly)
        await asyncio.gather(request, return_exceptions=True)


def _read_quietly(thread: "asyncio.Future[None]") -> None:
    """Its error was told already, by the request beside it."""
    if not thread.cancelled():
        thread.exception()


def _expect_success(answer: dict[str, Any]) -> None:
    if answer.get("success", True) is not True:
        raise EngineError(f"the engine says: {answer.get('message', answer)}")
