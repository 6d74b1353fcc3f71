"""A run's sessions and a server's answers as texts, and what they are compared with."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from aiohttp import web

from rlmix.core.candidates import Candidates
from rlmix.core.errors import EngineError
from rlmix.core.trajectory import Outcome, StopReason, Trajectory, Turn, VersionSpan
from rlmix.diff.run_texts import recorded_of
from rlmix.diff.server import record
from rlmix.model.bundle import resolve_model


def turn(version: int, **changes: object) -> Turn:
    fields: dict[str, object] = {
        "output_ids": (7, 8),
        "sampler_logprobs": (-1.0, -2.0),
        "observation_ids": (9,),
        "pool": "h100",
        "version_spans": (VersionSpan(version=version, start=0, end=2),),
        "cached_tokens": 1,
    }
    return Turn(**{**fields, **changes})  # type: ignore[arg-type]


def session(*turns: Turn) -> Trajectory:
    return Trajectory(
        session_id="s",
        group_id="g",
        task_id="t",
        prompt_ids=(4, 5, 6),
        turns=turns,
        stop_reason=StopReason.SUBMITTED,
        outcome=Outcome.PASS,
        reward=1.0,
    )


def test_a_session_is_one_text_whose_prompts_are_known() -> None:
    text = recorded_of(session(turn(3), turn(3, cached_tokens=4)))
    assert text is not None
    assert text.ids == (4, 5, 6, 7, 8, 9, 7, 8)
    assert text.sampled == (3, 4, 6, 7)
    assert text.prefilled == ((1, 3), (4, 6))
    assert (text.pool, text.version, text.kept) == ("h100", 3, None)


def test_a_session_counts_up_to_the_first_turn_of_another_version_or_pool() -> None:
    for other in (turn(4), turn(3, pool="a100")):
        text = recorded_of(session(turn(3), other))
        assert text is not None
        assert (text.ids, text.sampled) == ((4, 5, 6, 7, 8), (3, 4))
    spans = (VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=2))
    assert recorded_of(session(turn(3, version_spans=spans))) is None
    assert recorded_of(session()) is None


def test_kept_sets_of_all_turns_follow_each_other() -> None:
    kept = Candidates.of([[7, 1], [8]], [[-0.5, -1.0], [0.0]])
    text = recorded_of(session(turn(3, kept=kept), turn(3, kept=kept)))
    assert text is not None
    assert text.kept is not None
    assert text.kept.offsets.tolist() == [0, 2, 3, 5, 6]
    assert text.kept.ids.tolist() == [7, 1, 8, 7, 1, 8]
    heads = recorded_of(session(turn(3, kept=kept, kept_exact=False)))
    assert heads is not None
    assert heads.kept is None, "heads do not renormalise"


@contextmanager
def served(answer: object) -> Iterator[str]:
    """An HTTP server on this machine whose /generate is the given function of the body."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    urls: list[str] = []

    async def generate(request: web.Request) -> web.Response:
        return web.json_response(answer(await request.json()))  # type: ignore[operator]

    async def start() -> None:
        app = web.Application()
        app.router.add_post("/generate", generate)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        urls.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        started.set()

    loop.create_task(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    assert started.wait(60)
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)


def as_sglang(body: dict[str, object]) -> dict[str, object]:
    """Two tokens as a decode, then rows for every id of the prompt; the first has no logprob."""
    ids, sampling = body["input_ids"], body["sampling_params"]
    assert isinstance(ids, list)
    assert isinstance(sampling, dict)
    if "logprob_start_len" not in body:
        # What is left out may come from the checkpoint's generation_config.json.
        sent = [sampling[name] for name in ("temperature", "top_p", "top_k", "min_p")]
        assert sent == [1.0, 1.0, -1, 0.0]
    rows = [[None if i == 0 else -0.5, token, None] for i, token in enumerate(ids)]
    meta = {"output_token_logprobs": [[-1.0, 11, None], [-2.0, 12, None]]}
    if body.get("logprob_start_len") == 0:
        meta["input_token_logprobs"] = rows
    return {"output_ids": [11, 12], "meta_info": meta}


def test_a_server_is_asked_to_decode_and_then_to_read_the_same_tokens() -> None:
    with served(as_sglang) as url:
        dumped, prefill = record(url, resolve_model("bundled:tiny"), sessions=2, tokens=2)
    assert [one.recorded.name for one in dumped] == ["server/0", "server/1"]
    first = dumped[0].recorded
    assert first.ids[-2:] == (11, 12)
    assert first.sampled == (len(first.ids) - 2, len(first.ids) - 1)
    assert first.logprobs_P.tolist() == [-1.0, -2.0]
    assert prefill["server/0"].tolist() == [-0.5, -0.5]
    assert prefill["server/0"].dtype == np.float32


def test_an_answer_without_logprobs_is_an_error_of_the_engine() -> None:
    def silent(_: dict[str, object]) -> dict[str, object]:
        return {"output_ids": [11], "meta_info": {}}

    with served(silent) as url, pytest.raises(EngineError, match="no output_token_logprobs"):
        record(url, resolve_model("bundled:tiny"), sessions=1, tokens=1)
