#!/usr/bin/env python
"""What a session's own bookkeeping costs as its context grows to 256K tokens.

    python scripts/bench_sessions.py [--tokens 262144] [--turns 128] [--quick] [--json]

Runs one real session against an engine and a sandbox that answer from memory, so that what is
measured is ours: appending ids, making requests, encoding them as HTTP bodies, the record and the
training sample. The alternative in the same run is what frameworks do that keep text instead of
ids: encode the whole conversation again before every turn. Needs nothing but this checkout.
"""

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path

import orjson

from rlmix.batch.samples import to_sample
from rlmix.core.task import Commit, PublicTask
from rlmix.core.trajectory import Outcome, Trajectory, VersionSpan
from rlmix.engine.protocol import GenerateRequest, Generation, request_body
from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer
from rlmix.observe.trajectories import encode_trajectory
from rlmix.sandbox.protocol import CommandResult
from rlmix.sessions.agent import run_session
from rlmix.sessions.spec import SessionSpec
from rlmix.tasks.rule import Verdict

TASK = PublicTask(
    task_id="bench", split="train", issue="fix it", history=(Commit(message="", files={"a": ""}),)
)


class Engine:
    """Says the same command each turn."""

    def __init__(self, output_ids: tuple[int, ...]) -> None:
        self.output_ids = output_ids
        self.body_s = 0.0

    async def generate(self, request: GenerateRequest) -> Generation:
        started_s = time.perf_counter()
        orjson.dumps(request_body(request))
        self.body_s += time.perf_counter() - started_s
        count = len(self.output_ids)
        return Generation(
            output_ids=self.output_ids,
            sampler_logprobs=(-0.5,) * count,
            kept=None,
            kept_exact=True,
            version_spans=(VersionSpan(version=0, start=0, end=count),),
            finish_reason="stop",
            cached_tokens=0,
            pool="bench",
            replica="bench_0",
            numerics_key="bench",
            rehomed=0,
        )

    async def release(self, session_id: str) -> None: ...


class Machine:
    """A sandbox and its backend; prints the same long text each turn."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def prepare(self, history: object) -> None: ...

    async def create(self, template: object) -> "Machine":
        return self

    async def run(self, command: str, **_: object) -> CommandResult:
        return CommandResult(exit_code=0, output=self.text)

    async def capture_diff(self) -> bytes:
        return b""

    async def destroy(self) -> None: ...


async def no_verdict(diff: bytes) -> Verdict:
    return Verdict(outcome=Outcome.FAIL, detail="bench")


def run(tokens: int, turns: int, renderer: ChatRenderer) -> tuple[Trajectory, float, float]:
    """(trajectory, CPU seconds of the whole session, of these for request bodies)."""
    command = renderer.content_ids("cat file.py")
    end = renderer.stop_token_ids[0]
    per_turn = tokens // turns
    line = "def total(values): return sum(values)\n"
    per_line = len(renderer.content_ids(line))
    engine = Engine((*command, end))
    machine = Machine(line * max(1, (per_turn - len(command) - 20) // per_line))
    spec = SessionSpec(
        session_id="bench", group_id="bench", task_id="bench", source="generated", split="train",
        source_seed=0, seed=0, temperature=1.0, top_p=1.0, top_k=-1, record="none",
        max_turns=turns, max_turn_tokens=256, max_context_tokens=tokens + 4096,
        time_limit_s=3600.0, command_timeout_s=10.0, output_chars=1 << 20,
    )  # fmt: skip
    started_s = time.process_time()
    done = asyncio.run(
        run_session(
            spec,
            public=TASK,
            engine=engine,
            backend=machine,  # type: ignore[arg-type]
            renderer=renderer,
            judge=no_verdict,
        )
    )
    return done, time.process_time() - started_s, engine.body_s


def encode_again(done: Trajectory, renderer: ChatRenderer) -> float:
    """CPU seconds of encoding the whole text before each turn."""
    started_s = time.process_time()
    text = ""
    for turn in done.turns:
        text += renderer.content_text([*turn.output_ids[:-1], *turn.observation_ids])
        renderer.content_ids(text)
    return time.process_time() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=262_144)
    parser.add_argument("--turns", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="32K tokens in 32 turns")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", type=Path, default=None)
    options = parser.parse_args()
    tokens, turns = (32_768, 32) if options.quick else (options.tokens, options.turns)
    renderer = ChatRenderer(options.model or resolve_model("bundled:tiny"))
    done, session_s, body_s = run(tokens, turns, renderer)
    started_s = time.process_time()
    record = orjson.dumps(encode_trajectory(done, step=0), option=orjson.OPT_SERIALIZE_NUMPY)
    record_s = time.process_time() - started_s
    started_s = time.process_time()
    to_sample(done, advantage=1.0)
    sample_s = time.process_time() - started_s
    again_s = encode_again(done, renderer)
    row = {
        "tokens": done.num_tokens,
        "turns": len(done.turns),
        "ours_s": round(session_s, 3),
        "bodies_s": round(body_s, 3),
        "ms_per_turn": round(1000 * session_s / len(done.turns), 2),
        "record_s": round(record_s, 3),
        "record_bytes": len(record),
        "sample_s": round(sample_s, 3),
        "encode_again_s": round(again_s, 3),
        "ratio": round(again_s / session_s, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    if options.json:
        print(json.dumps({"rows": [row]}))
        return
    for name, value in row.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
