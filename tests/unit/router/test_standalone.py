"""The router with nothing else of rlmix running: it finds out itself how its replicas are."""

import asyncio
import os
import signal
import time

import pytest

from rlmix.core.errors import ConfigError
from rlmix.engine.http import JsonServer, RequestError, reply_json
from rlmix.engine.scripted import ScriptedEngine, certain_reply
from rlmix.router.__main__ import main, make_spec, parse_arguments


async def until(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.05)


def run(stage, scenario, *options, engines=1, **engine_options):
    async def whole():
        servers = [
            ScriptedEngine(lambda call: certain_reply([1]), **engine_options)
            for _ in range(engines)
        ]
        for server in servers:
            await server.start()
        named = [f"--replica=h100-{i}={server.url}" for i, server in enumerate(servers)]
        try:
            async with stage:
                await stage.start_router(*named, "--probe-every-s", "0.1", *options)
                return await scenario(servers)
        finally:
            for server in servers:
                await server.stop()

    return asyncio.run(whole())


def health_of(stage, name, *wanted):
    async def condition():
        found = [r for r in await stage.admin.replicas() if r["name"] == name]
        return bool(found) and found[0]["health"] in wanted

    return condition


def test_replicas_tell_their_facts_and_serve(stage):
    async def scenario(servers):
        await until(health_of(stage, "h100-0", "healthy"))
        [replica] = await stage.admin.replicas()
        assert (replica["pool"], replica["view"], replica["version"]) == ("h100", "bf16", 7)
        assert replica["max_running"] == 16
        assert replica["max_context_tokens"] == 1 << 16
        answer = await stage.generate("s", headers={"X-Min-Version": "7"})
        assert (answer.status, answer.by) == (200, "h100-0")
        assert (await stage.generate("s", headers={"X-Min-Version": "8"})).status == 409
        servers[0].weight_version = 8

        async def serves_8():
            return (await stage.generate("s", headers={"X-Min-Version": "8"})).status == 200

        await until(serves_8)
        assert (await stage.replica("h100-0"))["faults"] == 0

    run(stage, scenario, weight_version=7)


def test_a_dead_replica_comes_back_by_way_of_restarting_and_stale(stage):
    async def scenario(servers):
        await until(health_of(stage, "h100-1", "healthy"))
        await until(health_of(stage, "h100-0", "healthy"))
        home = (await stage.generate("s")).by
        index = int(home[-1])
        port = servers[index].port
        await servers[index].stop()
        answer = await stage.generate("s")
        assert (answer.status, answer.by, answer.moves) == (200, f"h100-{1 - index}", 1)
        await until(health_of(stage, home, "dead"))
        # Back with an older version than the other: it stays stale until it has caught up.
        again = ScriptedEngine(lambda call: certain_reply([1]), weight_version=2)
        await again.start(port=port)
        try:
            await until(health_of(stage, home, "stale"))
            assert {(await stage.generate(f"n{i}")).by for i in range(4)} == {f"h100-{1 - index}"}
            again.weight_version = 3
            await until(health_of(stage, home, "healthy"))
        finally:
            await again.stop()

    run(stage, scenario, engines=2, weight_version=3)


def test_a_replica_that_answers_probes_and_samples_nothing_is_found_out(stage):
    async def scenario(servers):
        await until(health_of(stage, "h100-0", "healthy"))
        await until(health_of(stage, "h100-1", "healthy"))
        home = (await stage.generate("s")).by
        servers[int(home[-1])].fail_next("hang")
        answer = await asyncio.wait_for(stage.generate("s"), 60)
        assert (answer.status, answer.moves) == (200, 1)
        assert answer.by != home

    run(stage, scenario, "--stall-timeout-s", "1", engines=2)


def test_many_error_answers_make_a_suspect_that_gets_no_new_sessions(stage):
    async def fail(call):
        raise RequestError(500, "broken")

    async def ready(call):
        return reply_json({})

    async def scenario(servers):
        await until(health_of(stage, "h100-0", "healthy"))
        broken = JsonServer(
            {("POST", "/generate"): fail, ("GET", "/ready"): ready, ("GET", "/v1/loads"): ready}
        )
        await broken.start(host="127.0.0.1")
        await stage.admin.put_replica(
            "bad", pool="bad", url=broken.url, numerics_key="k", speed=100.0, max_running=9,
            version=0, state="ready",
        )  # fmt: skip
        statuses = [(await stage.generate(f"s{i}")).status for i in range(6)]
        assert statuses == [500, 500, 500, 200, 200, 200]
        assert (await stage.replica("bad"))["health"] == "suspect"
        await broken.stop()

    run(stage, scenario)


def test_a_restarted_router_finds_its_sessions_homes_and_views(stage, tmp_path):
    state = ("--state-dir", str(tmp_path / "state"))

    async def scenario(servers):
        await until(health_of(stage, "h100-0", "healthy"))
        await until(health_of(stage, "h100-1", "healthy"))
        homes = {f"s{i}": (await stage.generate(f"s{i}")).by for i in range(6)}
        assert len(set(homes.values())) == 2
        os.kill(stage.children["router"].pid, signal.SIGKILL)
        await stage.admin.close()
        named = [f"--replica=h100-{i}={server.url}" for i, server in enumerate(servers)]
        await stage.start_router(*named, "--probe-every-s", "0.1", *state)
        for session_id, home in homes.items():
            answer = await stage.generate(session_id)
            assert (answer.status, answer.by, answer.moves) == (200, home, 0)

    run(stage, scenario, *state, engines=2)


def test_a_native_answer_is_kept_alive_with_blanks_when_asked(stage):
    async def scenario(servers):
        await until(health_of(stage, "h100-0", "healthy"))
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        async with stage.http.post(
            stage.urls["router"] + "/generate",
            json=body,
            headers={"X-Session-Id": "s", "X-Keep-Alive-S": "0.1", "X-Request-Id": "mine"},
        ) as response:
            text = await response.text()
            assert text.startswith(" ")
            assert (await response.json())["output_ids"] == [1]
        answer = await stage.generate("s", headers={"X-Request-Id": "mine"})
        assert {k.lower(): v for k, v in answer.headers.items()}["x-request-id"] == "mine"
        late = await stage.generate("s", headers={"X-Timeout-S": "0.2"})
        assert late.status == 504
        assert "did not answer in 0.2 s" in late.body["error"]

    run(stage, scenario, latency_s=0.6)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--replica x", "--replica x: give NAME=URL"),
        ("--replica a=http://h:port", "--replica a=http://h:port: give NAME=URL"),
        ("--replica a=http://h:99999", "give NAME=URL"),
        ("--replica a=http://:1", "give NAME=URL"),
        ("--replica a=http://h:1 --replica a=http://h:2", "the name a is given twice"),
        ("--replica a=http://h:1 --speed b=2", "no --replica has this name; known: a"),
        ("--replica a=http://h:1 --speed a=0", "--speed a=0: give NAME=X with a number above 0"),
        ("--port 99999", "--port 99999: give 0 to 65535"),
        ("--break-affinity-s nan", "--break-affinity-s: give a number of at least 0"),
        ("--max-sessions 0", "--max-sessions: give at least 1"),
        ("--token-env RLMIX_NOT_SET", "the variable is not set"),
        ("--model bundled:none", "bundled models: bundled:tiny"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence_before_anything_starts(arguments, says):
    with pytest.raises(ConfigError) as refused:
        make_spec(parse_arguments(arguments.split()))
    assert says in str(refused.value)
    assert str(refused.value).count("\n") == 0


def test_a_refusal_is_exit_2_and_nothing_but_the_sentence(capsys):
    assert main(["--replica", "x"]) == 2
    said = capsys.readouterr().err
    assert said == "router: --replica x: give NAME=URL, e.g. h100-0=http://127.0.0.1:30000\n"
