"""Agents that sample: a policy through an engine, and any chat endpoint, here our own router's."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rlmix.core.errors import ConfigError, EngineError
from rlmix.engine.client import EngineClient
from rlmix.engine.scripted import ScriptedCall, ScriptedEngine, ScriptedReply, certain_reply
from rlmix.evals.agents import Agent, Answer
from rlmix.evals.attempts import Attempts
from rlmix.evals.endpoint import KEY_VARIABLE, EndpointAgent, base_url, command_of
from rlmix.evals.ledger import Ledger, read_attempts
from rlmix.evals.policy import PROMPT_TOO_LONG, PolicyAgent, Sampling
from rlmix.evals.probes import read_probe
from rlmix.launch.process import ChildProcess
from rlmix.model.bundle import resolve_model
from rlmix.model.chat import ChatRenderer
from rlmix.router.client import RouterAdmin
from rlmix.sandbox.backend import open_backend
from rlmix.sandbox.protocol import SandboxBackend, SandboxLimits
from rlmix.tasks.benchmark import Benchmark, BenchTask, open_benchmark

T = TypeVar("T")
MODEL = resolve_model("bundled:tiny")
RENDERER = ChatRenderer(MODEL)
END = RENDERER.stop_token_ids[0]
TASKS = open_benchmark("generated", limit=2)
SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=-1, max_turns=4, max_turn_tokens=4000,
    max_context_tokens=20_000, command_timeout_s=20.0, output_chars=1000, seed=0,
)  # fmt: skip


def fix_of(index: int) -> str:
    """A command that applies the reference."""
    return f"git apply <<'EOF'\n{TASKS.tasks[index].gold.decode()}EOF"


def says(*commands: str) -> Callable[[ScriptedCall], ScriptedReply]:
    """Turn t answers with command t, the last one again and again."""
    turns = [[*RENDERER.content_ids(command), END] for command in commands]

    def policy(call: ScriptedCall) -> ScriptedReply:
        return certain_reply(turns[min(call.turn, len(turns) - 1)])

    return policy


async def with_backend(folder: Path, use: Callable[[SandboxBackend], Awaitable[T]]) -> T:
    limits = SandboxLimits(
        memory_mib=512, pids=64, disk_mib=64, output_chars=1000, command_timeout_s=20.0
    )
    backend = await open_backend("auto", limits, folder / "s", "t", allow_weak=True)
    try:
        return await use(backend)
    finally:
        await backend.close()


async def made(folder: Path, agent: Agent, benchmark: Benchmark = TASKS) -> Attempts:
    async def use(backend: SandboxBackend) -> Attempts:
        ledger = Ledger(folder / "e", {})
        attempts = Attempts(
            benchmark=benchmark, agent=agent, backend=backend, ledger=ledger, per_task=1, jobs=2
        )
        await attempts.make()
        ledger.close()
        return attempts

    return await with_backend(folder, use)


def test_a_policy_s_diff_is_judged_apart_and_sandboxes_are_probed(tmp_path: Path) -> None:
    """Its script fixes the first task only; the second one's diff does not apply there."""

    async def run() -> Attempts:
        async with ScriptedEngine(says(fix_of(0), "submit")) as engine:
            client = EngineClient(engine.url, timeout_s=60)
            agent = PolicyAgent(engine=client, renderer=RENDERER, sampling=SAMPLING)
            attempts = await made(tmp_path, agent)
            await client.close()
            return attempts

    attempts = asyncio.run(run())
    found = {one.task_id: one for one in read_attempts(tmp_path / "e")}
    first, second = (found[task.public.task_id] for task in TASKS.tasks)
    assert (first.outcome, first.stop_reason, first.num_turns) == ("pass", "submitted", 2)
    assert (second.outcome, second.diff_bytes) == ("fail", 0)
    assert first.num_tokens == len(RENDERER.content_ids(fix_of(0))) + 1 + 2
    assert [probe.is_clean for probe in attempts.probes.values()] == [True, True]
    assert {probe.commits for probe in attempts.probes.values()} == {2}


def test_what_a_policy_had_at_its_last_turn_is_judged(tmp_path: Path) -> None:
    async def run() -> None:
        async with ScriptedEngine(says(fix_of(0), "true")) as engine:
            client = EngineClient(engine.url, timeout_s=60)
            agent = PolicyAgent(engine=client, renderer=RENDERER, sampling=SAMPLING)
            await made(tmp_path, agent, replace(TASKS, tasks=TASKS.tasks[:1]))
            await client.close()

    asyncio.run(run())
    (one,) = read_attempts(tmp_path / "e")
    assert (one.outcome, one.stop_reason, one.num_turns) == ("pass", "turn_limit", 4)


def test_a_task_whose_prompt_does_not_fit_is_failed_and_named(tmp_path: Path) -> None:
    agent = PolicyAgent(
        engine=EngineClient("http://127.0.0.1:9", timeout_s=1),
        renderer=RENDERER,
        sampling=replace(SAMPLING, max_context_tokens=8),
    )
    asyncio.run(made(tmp_path, agent))
    attempts = read_attempts(tmp_path / "e")
    assert {one.stop_reason for one in attempts} == {PROMPT_TOO_LONG}
    assert {one.outcome for one in attempts} == {"fail"}


def test_a_lost_engine_makes_attempts_void_after_three_tries(tmp_path: Path) -> None:
    agent = PolicyAgent(
        engine=EngineClient("http://127.0.0.1:9", timeout_s=0.2),
        renderer=RENDERER,
        sampling=SAMPLING,
    )
    asyncio.run(made(tmp_path, agent, replace(TASKS, tasks=TASKS.tasks[:1])))
    (one,) = read_attempts(tmp_path / "e")
    assert (one.outcome, one.tries) == ("void", 3)
    assert "127.0.0.1:9" in one.void_reason


def test_turns_of_two_policies_have_the_same_seeds_and_those_of_two_attempts_have_not() -> None:
    agent = PolicyAgent(
        engine=EngineClient("http://127.0.0.1:9", timeout_s=1), renderer=RENDERER, sampling=SAMPLING
    )
    seeds = [agent._spec(TASKS.tasks[0], number).seed for number in (0, 0, 1)]
    assert seeds[0] == seeds[1] != seeds[2]


class Endpoint:
    """A router with `/v1` in front of a scripted engine; both real."""

    def __init__(self, folder: Path, *commands: str) -> None:
        self.folder, self.engine = folder, ScriptedEngine(says(*commands), weight_version=0)

    async def __aenter__(self) -> str:
        await self.engine.start()
        ready = self.folder / "router.ready"
        self.router = ChildProcess.start(
            [
                sys.executable, "-m", "rlmix.router", "--model", "bundled:tiny",
                "--token-env", "RLMIX_TOKEN", "--ready-file", str(ready),
            ],
            name="router",
            log_path=self.folder / "router.log",
            env={"RLMIX_TOKEN": "secret-of-the-router"},
            ready_path=ready,
        )  # fmt: skip
        url = str((await self.router.wait_ready(60))["url"])
        admin = RouterAdmin(url, token="secret-of-the-router")
        await admin.put_replica(
            "a", pool="p", url=self.engine.url, numerics_key="k", speed=1.0, max_running=8,
            version=0, state="ready",
        )  # fmt: skip
        await admin.close()
        return url

    async def __aexit__(self, *error: object) -> None:
        self.router.kill()
        await self.engine.stop()


def ask_endpoint(tmp_path: Path, *commands: str) -> EndpointAgent:
    async def run() -> EndpointAgent:
        async with Endpoint(tmp_path, *commands) as url:
            agent = EndpointAgent(url, model=None, sampling=SAMPLING, first_wait_s=0.01)
            try:
                await agent.open()
                await made(tmp_path, agent)
            finally:
                await agent.close()
            return agent

    return asyncio.run(run())


def test_our_own_router_is_an_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "secret-of-the-router")
    agent = ask_endpoint(tmp_path, "ls", fix_of(0), "submit")
    found = {one.task_id: one for one in read_attempts(tmp_path / "e")}
    first, second = (found[task.public.task_id] for task in TASKS.tasks)
    assert (first.outcome, first.stop_reason, first.num_turns) == ("pass", "submitted", 3)
    assert second.outcome == "fail"
    facts = agent.facts()
    assert (facts["requests"], facts["busy_frac"]) == (6, 0.0)
    written = "".join(
        path.read_text(errors="replace") for path in (tmp_path / "e").rglob("*") if path.is_file()
    )
    assert "secret-of-the-router" not in written


def test_an_endpoint_that_refuses_the_key_ends_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "wrong")
    with pytest.raises(EngineError, match=f"names no model; is it up, and is {KEY_VARIABLE} set"):
        ask_endpoint(tmp_path, "ls")


def test_an_endpoint_that_is_down_makes_attempts_void(tmp_path: Path) -> None:
    async def run() -> Answer:
        agent = EndpointAgent(
            "http://127.0.0.1:9/v1", model="m", sampling=SAMPLING, first_wait_s=0.001
        )
        try:
            return await with_backend(
                tmp_path, lambda backend: agent.answer(TASKS.tasks[0], 0, backend)
            )
        finally:
            await agent.close()

    answer = asyncio.run(run())
    assert "did not answer 6 times" in answer.void_reason


def test_urls_are_taken_with_or_without_their_last_parts() -> None:
    for text in ("http://h:1", "http://h:1/v1/", "http://h:1/v1/chat/completions"):
        assert base_url(text) == "http://h:1/v1"
    assert base_url("https://h/api/v3") == "https://h/api/v3"
    for text, said in (("h:1", "no URL"), ("https://me:key@h/v1", "carries more than a place")):
        with pytest.raises(ConfigError, match=said):
            base_url(text)


def call(arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"id": "c1", "function": {"name": "bash", "arguments": arguments}}]}


def test_commands_come_from_the_tool_or_from_the_last_fenced_block() -> None:
    assert command_of(call(json.dumps({"command": "ls"}))) == ("c1", "ls")
    assert command_of(call({"command": "ls"})) == ("c1", "ls")
    assert command_of(call("{")) == ("c1", None)
    assert command_of(call({"command": 3})) == ("c1", None)
    text = "First\n```bash\nls\n```\nthen\n```\npwd\n```"
    assert command_of({"content": text}) == (None, "pwd\n")
    assert command_of({"content": "no idea"}) == (None, None)


def test_a_probe_tells_network_and_history() -> None:
    clean = read_probe("t", "interface lo\ncommits 1\nelsewhere 0\nlost 0\nremotes 0\ndone\n")
    assert clean.is_clean
    assert clean.commits == 1
    open_one = read_probe("t", "reached 1.1.1.1/53\ninterface eth0\nelsewhere 2\ndone\n")
    assert open_one.network == ("1.1.1.1/53", "eth0")
    assert open_one.history["elsewhere"] == 2
    assert not read_probe("t", "commits 1\n").is_clean


Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def answer_over(tmp_path: Path, task: BenchTask, serve: Connection) -> Answer:
    """The answer of an agent whose endpoint's connections are served so."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    agent = EndpointAgent(f"http://127.0.0.1:{port}", model="m", sampling=SAMPLING)
    try:
        return await with_backend(tmp_path, lambda backend: agent.answer(task, 0, backend))
    finally:
        await agent.close()
        server.close()


def test_an_endpoint_that_hangs_for_most_of_the_time_makes_the_attempt_void(
    tmp_path: Path,
) -> None:
    task = replace(TASKS.tasks[0], agent_s=1.0)

    async def run() -> Answer:
        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()  # Until the client gives up.
            writer.close()

        return await answer_over(tmp_path, task, never)

    answer = asyncio.run(run())
    assert answer.void_reason.startswith("one answer did not come in")


async def asked_over(tmp_path: Path, task: BenchTask, *, status: str, body: object) -> Answer:
    """The answer of an agent whose endpoint says the same to whatever it is asked."""
    said = json.dumps(body).encode()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(said)}\r\nConnection: close\r\n"
        writer.write(head.encode() + b"\r\n" + said)
        await writer.drain()
        writer.close()

    return await answer_over(tmp_path, task, say)


def test_a_prompt_too_long_for_an_endpoint_fails_that_attempt_and_ends_nothing_else(
    tmp_path: Path,
) -> None:
    body = {"error": {"message": "maximum context length is 10 tokens"}}
    answer = asyncio.run(asked_over(tmp_path, TASKS.tasks[0], status="400 Bad Request", body=body))
    assert (answer.stop_reason, answer.void_reason) == (PROMPT_TOO_LONG, "")
    assert "maximum context length" in answer.fault


def test_what_an_endpoint_had_when_its_time_was_over_is_judged(tmp_path: Path) -> None:
    """Its one command writes a file and then sleeps beyond the task's time."""
    task = replace(TASKS.tasks[0], agent_s=3.0)
    command = "echo x > note.txt; sleep 100"
    message = {"content": f"```bash\n{command}\n```"}
    body = {"choices": [{"message": message}], "usage": {}}
    answer = asyncio.run(asked_over(tmp_path, task, status="200 OK", body=body))
    assert (answer.stop_reason, answer.fault, answer.void_reason) == ("time_limit", "", "")
    assert b"+++ b/note.txt" in answer.diff
