"""`/v1/chat/completions` and `/v1/completions`: text outside, token ids inside.

Any OpenAI client works; one that sends `X-Session-Id` has its turns kept together on one replica
and written down, so that it can be trained through `GET /sessions/{id}/trajectory`.
"""

import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import orjson
from aiohttp import web

from rlmix.router import headers as names
from rlmix.router.admin import reply_json
from rlmix.router.answers import (
    Sampled,
    chat_chunks,
    chat_document,
    completion_chunks,
    completion_document,
    error_document,
    read_answer,
)
from rlmix.router.asked import Asked, read_chat, read_completion
from rlmix.router.dialogue import Dialogue, DialogueBook, digest_of
from rlmix.router.forward import Call, Reply
from rlmix.router.replies import EventSink
from rlmix.router.scan import RequestFacts
from rlmix.router.store import SessionStore
from rlmix.router.template import ChatTemplate, normal_message
from rlmix.router.tool_calls import PARSERS, parser_for

Serve = Callable[[str, Call], Awaitable[Reply]]


class NewCall(Protocol):
    def __call__(self, request: web.Request, body: bytes) -> Call: ...


class OpenAIApi:
    """The endpoints of one router."""

    def __init__(
        self,
        model_dir: Path,
        *,
        model_name: str,
        store: SessionStore,
        serve: Serve,
        new_call: NewCall,
    ) -> None:
        self._template = ChatTemplate(model_dir)
        self._parse_tools = PARSERS[parser_for(self._template.source)]
        self._model_name = model_name
        self._book = DialogueBook(store)
        self._serve = serve
        self._new_call = new_call

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._chat),
            web.post("/v1/completions", self._complete),
            web.get("/v1/models", self._models),
            web.get("/sessions/{id}/trajectory", self._trajectory),
        ]

    def forget(self, session_id: str) -> None:
        self._book.forget(session_id)

    def forget_idle(self, idle_s: float) -> None:
        self._book.forget_idle(idle_s)

    async def _models(self, request: web.Request) -> web.Response:
        model = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "rlmix"}
        return reply_json({"object": "list", "data": [model]})

    async def _trajectory(self, request: web.Request) -> web.Response:
        session_id = request.match_info["id"]
        found = self._book.trajectory(session_id)
        if found is None:
            text = f"session {session_id!r} has no recorded turns; those of /generate are not kept"
            return reply_json(error_document(404, text), status=404)
        return reply_json(found)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, is_chat=True)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._handle(request, is_chat=False)

    async def _handle(self, request: web.Request, *, is_chat: bool) -> web.StreamResponse:
        try:
            document = orjson.loads(await request.read())
            asked = read_chat(document) if is_chat else read_completion(document)
            call = self._new_call(request, b"")
        except ValueError as error:
            return reply_json(error_document(400, str(error)), status=400)
        session_id = request.headers.get(names.SESSION, "")
        if not asked.is_stream:
            reply = await self._turn(session_id, asked, call)
            return web.Response(body=reply.content, status=reply.status, headers=reply.headers)
        sink = EventSink(request)
        reply = await sink.keep_alive(self._turn(session_id, asked, call))
        if reply.status != 200:
            if not sink.is_started:
                return web.Response(body=reply.content, status=reply.status, headers=reply.headers)
            await sink.event(orjson.loads(reply.content))
            return await sink.close()
        await sink.start(200, reply.headers)
        document = orjson.loads(reply.content)
        chunks = chat_chunks if asked.messages is not None else completion_chunks
        for chunk in chunks(document, with_usage=asked.with_usage):
            await sink.event(chunk)
        await sink.write(b"data: [DONE]\n\n")
        return await sink.close()

    async def _turn(self, session_id: str, asked: Asked, call: Call) -> Reply:
        """One turn: ids, sampling, text, and the record. A session's turns do not overlap."""
        if not session_id:
            return await self._sample(f"once-{uuid.uuid4().hex}", None, asked, call)
        dialogue = self._book.open(session_id)
        async with dialogue.lock:
            return await self._sample(session_id, dialogue, asked, call)

    async def _sample(
        self, session_id: str, dialogue: Dialogue | None, asked: Asked, call: Call
    ) -> Reply:
        try:
            known, appended = self._ids(dialogue, asked)
        except ValueError as error:
            return _error(400, str(error))
        ids = [*known, *appended]
        body = asked.engine_body(
            ids,
            request_id=call.request_id,
            stop_token_ids=self._template.stop_token_ids,
            vocab_size=self._template.vocab_size,
        )
        call.body = orjson.dumps(body)
        call.facts = RequestFacts(
            context_tokens=len(ids),
            max_new_tokens=body["sampling_params"]["max_new_tokens"],
            is_stream=False,
        )
        reply = await self._serve(session_id, call)
        if reply.status != 200:
            return _error(reply.status, reply.content.decode(errors="replace"), reply.headers)
        try:
            sampled = read_answer(reply.content, asked)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return _error(502, f"the replica's answer cannot be read: {error!r}", reply.headers)
        if sampled.finish_reason not in ("stop", "length"):
            # Part of a turn must not be learned from; the client asks again.
            headers = {**reply.headers, "Retry-After": "1"}
            return _error(503, f"the replica ended the turn: {sampled.finish_reason}", headers)
        document = self._document(asked, sampled)
        # A session that was released amid its turn stays forgotten.
        if dialogue is not None and self._book.holds(session_id, dialogue):
            self._write(session_id, dialogue, asked, sampled, document, known, appended, reply)
        reply.headers["Content-Type"] = "application/json"
        return Reply(status=200, content=orjson.dumps(document), headers=reply.headers)

    def _ids(self, dialogue: Dialogue | None, asked: Asked) -> tuple[list[int], list[int]]:
        """(ids so far, ids to append); the first is empty when a new segment starts."""
        template = self._template
        if asked.prompt_ids is not None:
            if dialogue is not None and dialogue.segment >= 0:
                known = dialogue.ids.tolist()
                if asked.prompt_ids[: len(known)] == known:
                    return known, asked.prompt_ids[len(known) :]
            return [], asked.prompt_ids
        parts = asked.parts
        if dialogue is not None and dialogue.segment >= 0 and len(parts) > dialogue.length:
            length = dialogue.length
            if dialogue.continues(digest_of(parts[:length], asked.context), length):
                if asked.messages is None:
                    return dialogue.ids.tolist(), template.text_ids(str(parts[length:]))
                more = template.next_ids(
                    asked.messages, asked.tools, num_known=length,
                    ended_with_stop=dialogue.ended_with_stop,
                )  # fmt: skip
                if more is not None:
                    return dialogue.ids.tolist(), more
        if asked.messages is None:
            return [], template.text_ids(str(parts))
        return [], template.prompt_ids(asked.messages, asked.tools)

    def _document(self, asked: Asked, sampled: Sampled) -> dict[str, Any]:
        template = self._template
        text = template.text_of(sampled.output_ids)
        common = {
            "id": sampled.request_id, "created": int(time.time()), "model": self._model_name,
        }  # fmt: skip
        if asked.messages is None:
            return completion_document(common, text, asked, sampled, template.token_text)
        outside, calls = self._parse_tools(text, asked.tools) if asked.tools else (text, [])
        return chat_document(common, outside, calls, asked, sampled, template.token_text)

    def _write(
        self,
        session_id: str,
        dialogue: Dialogue,
        asked: Asked,
        sampled: Sampled,
        document: dict[str, Any],
        known: list[int],
        appended: list[int],
        reply: Reply,
    ) -> None:
        if asked.messages is not None:
            answer = normal_message(document["choices"][0]["message"])
            parts: Any = [*asked.messages, answer]
        else:
            parts = str(asked.parts) + document["choices"][0]["text"]
        self._book.add_turn(
            session_id,
            dialogue,
            appended=appended,
            is_new_segment=not known,
            digest=digest_of(parts, asked.context),
            length=len(parts),
            ended_with_stop=sampled.output_ids[-1] in self._template.stop_token_ids,
            record={
                **sampled.record(),
                "sampling": asked.sampling(self._template.vocab_size),
                "pool": reply.headers.get(names.POOL, ""),
                "replica": reply.headers.get(names.REPLICA, ""),
                "numerics_key": reply.headers.get(names.NUMERICS, ""),
                "rehomed": int(reply.headers.get(names.REHOMED, "0")),
            },
        )


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> Reply:
    return Reply(
        status=status,
        content=orjson.dumps(error_document(status, text)),
        headers={**(headers or {}), "Content-Type": "application/json"},
    )
