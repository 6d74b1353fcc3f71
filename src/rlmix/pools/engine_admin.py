"""The operator's side of one engine: what it is, how busy it is, and its weights.

Probes use `/ping`, `/v1/loads` and `/model_info`; never `/health`, which generates a token, waits
through pauses and can mark a healthy server unhealthy (SGLang 0.5.23).
"""

import asyncio
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from rlmix.core.errors import EngineError
from rlmix.pools.spec import CanaryOutput, ReplicaLoad

PROBE_TIMEOUT_S = 5.0
"""For answers that need no computation."""
FLUSH_POLL_S = 0.05
"""Between two tries to forget the cached prefixes."""


class EngineAdmin:
    """Talks to one engine: a few requests a second at most, each on its own connection, so that
    there is nothing to close and nothing stale after the engine was paused or stopped."""

    def __init__(
        self, url: str, *, name: str, token: str | None, admin_token: str | None = None
    ) -> None:
        """
        Args:
            token: for reading and sampling.
            admin_token: for what changes the engine, which a real server with an admin key gives
                to nobody else; None: `token` does.
        """
        self.url = url.rstrip("/")
        self._name = name
        self._token = token
        self._admin_token = token if admin_token is None else admin_token
        self._canaries = itertools.count()

    async def server_info(self) -> dict[str, Any]:
        return await self._ask("GET", "/server_info", timeout_s=PROBE_TIMEOUT_S)

    async def weight_version(self) -> str:
        """As the engine spells it; `default` when it was never told."""
        info = await self._ask("GET", "/model_info", timeout_s=PROBE_TIMEOUT_S)
        return str(info.get("weight_version", ""))

    async def loads_document(self) -> dict[str, Any]:
        return await self._ask("GET", "/v1/loads?include=all", timeout_s=PROBE_TIMEOUT_S)

    async def loads(self) -> ReplicaLoad:
        return read_loads(await self.loads_document())

    async def ping(self) -> None:
        """Raises EngineError when the server is not there, or says that it is sick."""
        await self._ask("GET", "/ping", timeout_s=PROBE_TIMEOUT_S)

    async def pause(self, mode: str, *, timeout_s: float) -> None:
        await self._ask("POST", "/pause_generation", {"mode": mode}, timeout_s=timeout_s)

    async def resume(self, *, timeout_s: float) -> None:
        await self._ask("POST", "/continue_generation", {}, timeout_s=timeout_s)

    async def update_from_disk(self, folder: Path, *, version: int, timeout_s: float) -> None:
        """Load a version. The engine is paused; cached prefixes stay until `flush_cache`.

        Raises:
            EngineError: the engine said no, in its status or in its body; its weights may be
                half old and half new.
        """
        body = {
            "model_path": str(folder),
            "weight_version": str(version),
            # Asked for here, a flush that comes too early would be answered by a 400 although the
            # weights did change, and `/model_info` would not be told (SGLang 0.5.23).
            "flush_cache": False,
            "abort_all_requests": False,
        }
        answer = await self._ask("POST", "/update_weights_from_disk", body, timeout_s=timeout_s)
        if answer.get("success") is not True:
            message = str(answer.get("message", answer))
            raise EngineError(
                f"pools: {self._name} refused version {version} from {folder}: {message}"
            )

    async def flush_cache(self, *, timeout_s: float) -> None:
        """Forget every cached prefix. An engine that has just answered its last request may still
        be putting it away and says 400 (SGLang 0.5.23), so it is asked again until the limit. Its
        own `timeout` is of no use here: it also waits for requests that a pause holds back.

        Raises:
            EngineError: something still held one at the end; what is sampled next would mix KV of
                two versions.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            status, content = await self._exchange("POST", "/flush_cache", {}, timeout_s=timeout_s)
            if status == 200:
                return
            if status != 400 or time.monotonic() > deadline_s:
                raise self._refused("POST", "/flush_cache", status, content)
            await asyncio.sleep(FLUSH_POLL_S)

    async def canary(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, timeout_s: float
    ) -> CanaryOutput:
        """Sample greedily from one prompt."""
        body = {
            # One at a time may have a name.
            "rid": f"canary-{self._name}-{next(self._canaries)}",
            "input_ids": list(prompt_ids),
            "sampling_params": {
                "max_new_tokens": max_new_tokens,
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "stop_token_ids": [],
                "ignore_eos": True,
            },
            "return_logprob": True,
            "top_logprobs_num": 0,
        }
        answer = await self._ask("POST", "/generate", body, timeout_s=timeout_s)
        try:
            entries = answer["meta_info"]["output_token_logprobs"]
            return CanaryOutput(
                prompt_ids=tuple(prompt_ids),
                output_ids=tuple(int(entry[1]) for entry in entries),
                # A NaN arrives as null; the admission gate names it.
                sampler_logprobs=tuple(
                    float("nan") if entry[0] is None else float(entry[0]) for entry in entries
                ),
            )
        except (KeyError, TypeError, IndexError) as error:
            raise EngineError(
                f"pools: {self._name} answered a canary prompt without logprobs: {error!r}"
            ) from error

    async def _ask(
        self, method: str, path: str, body: Any = None, *, timeout_s: float
    ) -> dict[str, Any]:
        """One exchange. A 400 with a JSON body is an answer: SGLang says `success: false` so."""
        status, content = await self._exchange(method, path, body, timeout_s=timeout_s)
        try:
            document = orjson.loads(content) if content.strip() else {}
        except ValueError:
            document = None
        is_answer = status == 200 or (
            status == 400 and isinstance(document, dict) and "success" in document
        )
        if not is_answer:
            raise self._refused(method, path, status, content)
        return document if isinstance(document, dict) else {}

    async def _exchange(
        self, method: str, path: str, body: Any, *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and body of an answer, whatever it says."""
        data = None if body is None else orjson.dumps(body)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        headers = {"Content-Type": "application/json"}
        is_admin = method == "POST" and path != "/generate"
        if token := self._admin_token if is_admin else self._token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=timeout) as http,
                http.request(method, self.url + path, data=data) as response,
            ):
                return response.status, await response.read()
        except TimeoutError:
            raise EngineError(
                f"pools: {self._name} did not answer {method} {path} in {timeout_s:g} s"
            ) from None
        except aiohttp.ClientError as error:
            raise EngineError(
                f"pools: {self._name}: {method} {path} failed: {type(error).__name__}: {error}"
            ) from None

    def _refused(self, method: str, path: str, status: int, content: bytes) -> EngineError:
        return EngineError(
            f"pools: {self._name} answered {method} {path} with {status}: "
            f"{content[:300].decode(errors='replace')}"
        )


def read_loads(answer: dict[str, Any]) -> ReplicaLoad:
    """`/v1/loads` summed over data-parallel ranks. Fields that are missing, or no numbers,
    count as 0.

    `progress_tokens` takes the engine's own total of sampled tokens where it reports one, and
    else what the real SGLang reports: prefilled tokens and the steps in `decode_moments`.
    """
    listed = answer.get("loads")
    ranks = [rank for rank in listed if isinstance(rank, dict)] if isinstance(listed, list) else []

    def total(key: str) -> float:
        return float(sum(_number(rank.get(key)) for rank in ranks))

    lists = [rank.get("decode_moments") for rank in ranks]
    moments = sum(_number(sums[0]) for sums in lists if isinstance(sums, list) and sums)
    sampled = answer.get("total_generated_tokens")
    version = str(answer.get("weight_version", ""))
    return ReplicaLoad(
        running=int(total("num_running_reqs")),
        queued=int(total("num_waiting_reqs")),
        tokens_per_s=total("gen_throughput"),
        kv_used_frac=max((_number(rank.get("token_usage")) for rank in ranks), default=0.0),
        progress_tokens=int(
            total("total_prefill_uncached_tokens")
            + (moments if sampled is None else _number(sampled))
        ),
        version=int(version) if version.isdecimal() else -1,
        is_paused=bool(answer.get("paused", False)),
    )


def _number(value: Any) -> float:
    """0 for whatever is no number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else 0.0
