"""In which form `/generate` is answered: binary for a client that says it reads it, else JSON."""

from collections.abc import Mapping

from aiohttp import web

from rlmix.engine import wire
from rlmix.engine.http import Call, reply_bytes, reply_json
from rlmix.engine.protocol import GENERATION_TYPE


def reply_answer(
    call: Call, answer: wire.Answer, *, headers: Mapping[str, str] | None = None
) -> web.Response:
    """The answer in the form that the call's `Accept` asks for."""
    if GENERATION_TYPE in call.headers.get("Accept", ""):
        return reply_bytes(
            wire.generate_frame(answer), content_type=GENERATION_TYPE, headers=headers
        )
    return reply_json(wire.generate_document(answer), headers=headers)
