"""Plays sessions of a trace against an address and writes down every turn."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp
import orjson

from rlmix.engine.protocol import MIN_VERSION_HEADER, SESSION_HEADER
from rlmix.engine.timed.trace import SessionPlan

ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""What sglang-router and smg call a session's id."""

MAX_NEW_TOKENS = 4096
REFUSALS = (409, 429, 503)
"""Answers that ask the client to come again; no fault of anybody."""
REFUSED_WAIT_S = 0.1
MAX_REFUSALS = 600
MAX_TRIES = 4
"""Times that a turn is sent before its session is given up."""


class Target(Protocol):
    """Where turns are sent."""

    def url_of(self, session_id: str) -> str: ...

    def ended(self, session_id: str) -> str | None:
        """The session is over; a URL to DELETE, if somebody wants to know."""
        ...


@dataclass(frozen=True, slots=True)
class OneUrl:
    """A router."""

    url: str
    releases: bool = False
    """True for routers that are told when a session ends."""

    def url_of(self, session_id: str) -> str:
        return self.url

    def ended(self, session_id: str) -> str | None:
        return f"{self.url}/sessions/{session_id}" if self.releases else None


@dataclass(slots=True)
class Turn:
    """One answered turn."""

    session_id: str
    index: int
    latency_s: float
    """From the first attempt to the whole answer."""
    engine_s: float
    """What the replica says its part was."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    replica: str
    versions: tuple[int, ...]
    """Weight versions that sampled it, oldest first."""
    min_version: int | None
    """What was asked for when it was first sent."""


@dataclass(slots=True)
class Played:
    """What came of a trace."""

    makespan_s: float = 0.0
    turns: list[Turn] = field(default_factory=list)
    sessions_done: int = 0
    sessions_lost: int = 0
    timeouts: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    """What the client saw besides answers, refusals and time-outs -> how often."""
    refusals: dict[int, int] = field(default_factory=dict)

    def count_error(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1

    @property
    def num_errors(self) -> int:
        return sum(self.errors.values())

    @property
    def hit_frac(self) -> float:
        """Share of the prompts' tokens that came from a cache."""
        total = sum(turn.prompt_tokens for turn in self.turns)
        return sum(turn.cached_tokens for turn in self.turns) / max(1, total)


class Player:
    """Plays sessions, at most `concurrency` at a time; `min_version` may be raised meanwhile."""

    def __init__(
        self,
        target: Target,
        *,
        concurrency: int,
        time_scale: float,
        turn_timeout_s: float,
    ) -> None:
        """`turn_timeout_s` is on this machine's clock; a turn that takes longer is sent again."""
        self.target = target
        self.min_version: int | None = None
        self.played = Played()
        self.in_flight = 0
        self._places = asyncio.Semaphore(concurrency)
        self._time_scale = time_scale
        self._timeout = aiohttp.ClientTimeout(total=turn_timeout_s, sock_connect=10.0)
        self._http: aiohttp.ClientSession | None = None

    async def play(self, sessions: Sequence[SessionPlan]) -> Played:
        """All sessions to their ends."""
        started_s = time.monotonic()
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
            timeout=self._timeout,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as self._http:
            tasks = []
            for session in sessions:
                await self._places.acquire()
                tasks.append(asyncio.create_task(self._session(session)))
            await asyncio.gather(*tasks)
        self.played.makespan_s = time.monotonic() - started_s
        return self.played

    async def _session(self, plan: SessionPlan) -> None:
        assert self._http is not None
        try:
            text = plan.prompt
            for index, turn in enumerate(plan.turns):
                output = await self._turn(plan.session_id, index, text, turn.output_tokens)
                if output is None:
                    self.played.sessions_lost += 1
                    return
                text = b"".join((text, b",", output, b",", turn.observation))
                if index + 1 < len(plan.turns):
                    await asyncio.sleep(turn.tool_s * self._time_scale)
            self.played.sessions_done += 1
        finally:
            self._places.release()
            url = self.target.ended(plan.session_id)
            if url is not None:
                async with self._http.delete(url) as response:
                    await response.read()

    async def _turn(self, session_id: str, index: int, text: bytes, tokens: int) -> bytes | None:
        """Ask until there is an answer; its ids as text, None when given up."""
        body = request_body(text, tokens)
        min_version = self.min_version
        started_s = time.monotonic()
        tries = refused = 0
        while tries < MAX_TRIES and refused < MAX_REFUSALS:
            status, content = await self._post(session_id, body)
            if status == 200:
                return self._read(session_id, index, content, started_s, min_version)
            if status in REFUSALS:
                refused += 1
                self.played.refusals[status] = self.played.refusals.get(status, 0) + 1
                await asyncio.sleep(REFUSED_WAIT_S)
            else:
                tries += 1
        return None

    async def _post(self, session_id: str, body: bytes) -> tuple[int, bytes]:
        """(status, content); status 0 is a time-out or a broken connection, already counted."""
        assert self._http is not None
        headers = {
            "Content-Type": "application/json",
            SESSION_HEADER: session_id,
            ROUTING_KEY_HEADER: session_id,
        }
        if self.min_version is not None:
            headers[MIN_VERSION_HEADER] = str(self.min_version)
        self.in_flight += 1
        try:
            url = self.target.url_of(session_id) + "/generate"
            async with self._http.post(url, data=body, headers=headers) as response:
                content = await response.read()
                if response.status != 200 and response.status not in REFUSALS:
                    self.played.count_error(f"{response.status} {content[:80]!r}")
                return response.status, content
        except TimeoutError:
            self.played.timeouts += 1
        except aiohttp.ClientError as error:
            self.played.count_error(type(error).__name__)
        finally:
            self.in_flight -= 1
        return 0, b""

    def _read(
        self,
        session_id: str,
        index: int,
        content: bytes,
        started_s: float,
        min_version: int | None,
    ) -> bytes:
        latency_s = time.monotonic() - started_s
        document = orjson.loads(content)
        meta = document["meta_info"]
        self.played.turns.append(
            Turn(
                session_id=session_id,
                index=index,
                latency_s=latency_s,
                engine_s=meta["e2e_latency"],
                prompt_tokens=meta["prompt_tokens"],
                cached_tokens=meta["cached_tokens"],
                output_tokens=meta["completion_tokens"],
                replica=meta["replica"],
                versions=tuple(int(span["version"]) for span in meta["weight_versions"]),
                min_version=min_version,
            )
        )
        return orjson.dumps(document["output_ids"])[1:-1]


def request_body(text: bytes, output_tokens: int) -> bytes:
    """A `/generate` body for a prompt's ids as text. The limit is the same for every turn, so no
    router can read from it how long the answer will be."""
    return (
        b'{"input_ids":[' + text + b'],"sampling_params":{"temperature":1.0,"top_p":1.0,'
        b'"max_new_tokens":%d,"sampling_seed":%d}}' % (MAX_NEW_TOKENS, output_tokens)
    )
