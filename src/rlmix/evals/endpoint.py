"""Any OpenAI-compatible chat endpoint as an agent: one bash tool, or commands in fenced blocks.

Invariant: the key comes from the environment and is written nowhere. An endpoint that is busy or
broken makes an attempt void, never failed; one that refuses the key or the model ends the
evaluation, because asking again changes nothing.
"""

import asyncio
import json
import os
import re
import time
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rlmix.core.errors import ConfigError, EngineError
from rlmix.core.trajectory import StopReason
from rlmix.evals.agents import Answer
from rlmix.evals.policy import PROMPT_TOO_LONG, Sampling
from rlmix.model.chat import BASH_TOOL, tool_text
from rlmix.sandbox.protocol import EXIT_NOT_RUN, CommandResult, SandboxBackend, WorkTreeError
from rlmix.sessions.agent import MAX_FORMAT_ERRORS
from rlmix.tasks.benchmark import BenchTask

KEY_VARIABLE = "RLMIX_ENDPOINT_KEY"
CHAT = "/chat/completions"
MAX_ASKS = 6
"""Of one turn, with waits that double from `FIRST_WAIT_S`: about a minute in all."""
FIRST_WAIT_S = 1.0
REQUEST_S = 600.0
_LENGTH = re.compile(r"context (length|window|size)|too (long|many tokens)|exceeds? .*tokens", re.I)
"""How servers say that a prompt does not fit; there is no status of its own for it."""
_BLOCK = re.compile(r"```(?:bash|sh|shell)?\s*\n(.*?)```", re.DOTALL)


class _Busy(EngineError):
    """The endpoint has no answer now; nothing of the attempt counts."""


class _Full(Exception):
    """The conversation does not fit the model any more."""


class _TooLong(Exception):
    """The first message alone does not fit the model."""


def base_url(text: str) -> str:
    """`http://HOST/v1` from what the user wrote, with or without its last parts.

    Raises:
        ConfigError: no http URL, or one that carries a secret.
    """
    try:
        parts = urlsplit(text)
        _ = parts.port  # Read here, because it is only then that a wrong one is an error.
    except ValueError as error:
        raise ConfigError(
            f"agent=endpoint:{text}: {error}; give endpoint:http://HOST:PORT/v1"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"agent=endpoint:{text}: no URL; give endpoint:http://HOST:PORT/v1")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"agent=endpoint: the URL of {parts.hostname} carries more than a place; put a key "
            f"into {KEY_VARIABLE}"
        )
    path = parts.path.rstrip("/").removesuffix(CHAT).rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path or '/v1'}"


class EndpointAgent:
    """Asks one URL. Create and use it inside one running event loop, and close it."""

    name = "endpoint"
    task_ids = None
    works_in_sandbox = True

    def __init__(
        self, url: str, *, model: str | None, sampling: Sampling, first_wait_s: float = FIRST_WAIT_S
    ) -> None:
        self._url = base_url(url)
        self._sampling = sampling
        self._first_wait_s = first_wait_s
        key = os.environ.get(KEY_VARIABLE, "")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = aiohttp.ClientSession(
            headers=headers, timeout=aiohttp.ClientTimeout(total=REQUEST_S)
        )
        self.model = model or ""
        self._num_asked = self._num_busy = 0
        self._waited_s = 0.0
        self._sessions = 0

    async def open(self) -> None:
        """Find the model's name where none was given.

        Raises:
            EngineError: the endpoint lists none, or does not answer.
        """
        if self.model:
            return
        try:
            async with self._http.get(f"{self._url}/models") as response:
                document = await response.json(content_type=None) if response.ok else {}
            self.model = str(document["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, LookupError, TypeError):
            raise EngineError(
                f"agent=endpoint: {self._url}/models names no model; is it up, and is "
                f"{KEY_VARIABLE} set? Else give eval.endpoint_model=NAME"
            ) from None

    async def close(self) -> None:
        await self._http.close()

    def facts(self) -> dict[str, Any]:
        """How busy the endpoint was."""
        asked = self._num_asked
        return {
            "engine": "endpoint",
            "model": self.model,
            "requests": asked,
            "busy_frac": round(self._num_busy / asked, 4) if asked else 0.0,
            "mean_answer_s": round(self._waited_s / asked, 3) if asked else 0.0,
        }

    async def answer(self, task: BenchTask, number: int, backend: SandboxBackend) -> Answer:
        self._sessions += 1
        conversation = _Conversation(task, session=f"eval-{os.getpid()}-{self._sessions}")
        until_s = time.monotonic() + task.agent_s
        sandbox = await backend.create(await backend.prepare(task.public.repository))
        try:
            try:
                reason = await self._work(conversation, sandbox, number, until_s)
            except TimeoutError:
                if conversation.waiting_s() > task.agent_s / 2:
                    text = f"one answer did not come in {conversation.waiting_s():.0f} s"
                    return conversation.answer(b"", "engine_lost", void_reason=text)
                reason = StopReason.TIME_LIMIT.value
            except _Busy as error:
                return conversation.answer(b"", "engine_lost", void_reason=str(error))
            except _TooLong as error:  # As with a policy: it cannot work on this task.
                return conversation.answer(b"", PROMPT_TOO_LONG, fault=str(error))
            return conversation.answer(await sandbox.capture_diff(), reason)
        except WorkTreeError as error:
            return conversation.answer(b"", "sandbox_ended", fault=str(error))
        finally:
            await sandbox.destroy()

    async def _work(
        self, conversation: "_Conversation", sandbox: Any, number: int, until_s: float
    ) -> str:
        """Until it submits or a limit ends it.

        Only the waits for the model are cut short from here: a command has its own limit inside,
        and one that is cancelled would leave a sandbox that records nothing any more.

        Raises:
            TimeoutError: the time was over while the model was asked.
        """
        sampling, misses = self._sampling, 0
        for _ in range(sampling.max_turns):
            conversation.asked_s = now_s = time.monotonic()
            if now_s >= until_s:
                return StopReason.TIME_LIMIT.value
            try:
                async with asyncio.timeout(until_s - now_s):
                    message = await self._ask(conversation, number)
            except _Full:
                return StopReason.TOKEN_LIMIT.value
            conversation.model_s += conversation.waiting_s()
            conversation.asked_s = None
            call_id, command = command_of(message)
            if command is None:
                misses += 1
                if misses >= MAX_FORMAT_ERRORS:
                    return StopReason.FORMAT_ERROR.value
                said = "no command found; write one bash command"
                result = CommandResult(exit_code=EXIT_NOT_RUN, output=f"[{said}]\n")
            else:
                misses = 0
                left_s = max(0.05, until_s - time.monotonic())
                result = await sandbox.run(
                    command, min(sampling.command_timeout_s, left_s), sampling.output_chars
                )
            if result.submitted:
                return StopReason.SUBMITTED.value
            if result.sandbox_lost:
                raise WorkTreeError("the agent's own command ended its sandbox")
            conversation.observe(message, call_id, result)
        return StopReason.TURN_LIMIT.value

    async def _ask(self, conversation: "_Conversation", number: int) -> dict[str, Any]:
        sampling = self._sampling
        body: dict[str, Any] = {
            "model": self.model,
            "messages": conversation.messages,
            "tools": [BASH_TOOL],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_turn_tokens,
            "seed": sampling.seed + 1000 * number + conversation.num_turns,
        }
        if sampling.top_k > 0:
            body["top_k"] = sampling.top_k
        said = ""
        for ask in range(MAX_ASKS):
            if ask:
                self._num_busy += 1
                await asyncio.sleep(self._first_wait_s * 2 ** (ask - 1))
            started_s = time.monotonic()
            self._num_asked += 1
            try:
                async with self._http.post(
                    f"{self._url}{CHAT}", json=body, headers={"X-Session-Id": conversation.session}
                ) as response:
                    status, text = response.status, await response.text(errors="replace")
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                said = f"{type(error).__name__}: {error}"
                continue
            finally:
                self._waited_s += time.monotonic() - started_s
            if status == 200:
                return conversation.read(text)
            said = f"status {status}: {text[:200]}"
            if status == 400 and conversation.num_turns:
                raise _Full  # What fits a first turn and no later one is too long by now.
            if status == 413 or (status in (400, 422) and _LENGTH.search(text)):
                raise _Full if conversation.num_turns else _TooLong(f"the endpoint says {said}")
            if status in (400, 401, 403, 404, 405, 422):
                raise EngineError(
                    f"agent=endpoint: {self._url} refuses with {said}; check the URL, "
                    f"eval.endpoint_model and the key in {KEY_VARIABLE}"
                )
        raise _Busy(f"the endpoint did not answer {MAX_ASKS} times: {said}")


class _Conversation:
    """Messages of one attempt, and what it used."""

    def __init__(self, task: BenchTask, *, session: str) -> None:
        self.session = session
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": task.public.issue}]
        self.num_turns = 0
        self.num_tokens = 0
        self.model_s = 0.0
        self.asked_s: float | None = None
        """When the turn under way was asked for; None while a command runs."""

    def waiting_s(self) -> float:
        return 0.0 if self.asked_s is None else time.monotonic() - self.asked_s

    def read(self, text: str) -> dict[str, Any]:
        """The message of an answer.

        Raises:
            _Busy: the answer is none.
        """
        try:
            document = json.loads(text)
            message = dict(document["choices"][0]["message"])
            usage = document.get("usage") or {}
            self.num_tokens += int(usage.get("completion_tokens") or 0)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _Busy(f"the endpoint's answer cannot be read: {error!r}") from None
        self.num_turns += 1
        return message

    def observe(self, message: dict[str, Any], call_id: str | None, result: CommandResult) -> None:
        kept = {"role": "assistant", "content": message.get("content") or ""}
        calls = message.get("tool_calls")
        if calls and call_id is not None:
            kept["tool_calls"] = calls[:1]  # One command a turn; the others were not run.
        text = tool_text(result.exit_code, result.output)
        seen: dict[str, Any] = {"role": "user", "content": text}
        if call_id is not None:
            seen = {"role": "tool", "tool_call_id": call_id, "content": text}
        self.messages += [kept, seen]

    def answer(self, diff: bytes, reason: str, *, fault: str = "", void_reason: str = "") -> Answer:
        return Answer(
            diff=diff,
            stop_reason=reason,
            num_tokens=self.num_tokens,
            num_turns=self.num_turns,
            model_s=round(self.model_s, 3),
            fault=fault,
            void_reason=void_reason,
        )


def command_of(message: dict[str, Any]) -> tuple[str | None, str | None]:
    """(id of the tool call or None, bash command or None) of an assistant's message.

    A model without tools writes its command into a fenced block; the last one counts.
    """
    for call in message.get("tool_calls") or []:
        try:
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            command = arguments["command"]
        except (LookupError, TypeError, ValueError):
            return str(call.get("id", "")) if isinstance(call, dict) else None, None
        is_text = isinstance(command, str) and command.strip()
        return str(call.get("id", "")), command if is_text else None
    blocks = _BLOCK.findall(message.get("content") or "")
    return None, blocks[-1] if blocks and blocks[-1].strip() else None
