"""The router as its clients meet it: real processes, real sockets, real deaths."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from rlmix.core.errors import EngineError
from rlmix.engine import protocol
from rlmix.engine.http import JsonServer, reply_bytes, reply_json
from rlmix.engine.scripted import ScriptedEngine, certain_reply
from rlmix.router import headers
from rlmix.router.client import RouterAdmin


def run(stage, scenario, *router_arguments, replicas=("a", "b"), token=None, **fields):
    async def whole():
        async with stage:
            await stage.start_router(*router_arguments, token=token)
            if replicas:
                await stage.start_replicas(*replicas, **fields)
            return await scenario()

    return asyncio.run(whole())


async def until(condition, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.02)


def other(name: str) -> str:
    return "b" if name == "a" else "a"


def test_a_session_stays_where_it_began_and_the_answer_names_the_replica(stage):
    async def scenario():
        homes = {f"s{i}": (await stage.generate(f"s{i}")).by for i in range(6)}
        assert sorted(homes.values()) == ["a", "a", "a", "b", "b", "b"]
        for _ in range(3):
            for session_id, home in homes.items():
                answer = await stage.generate(session_id)
                assert (answer.status, answer.by, answer.moves) == (200, home, 0)
                assert answer.headers["X-Rlmix-Pool"] == f"pool_{home}"
                assert answer.headers["X-Rlmix-Numerics"] == f"key_{home}"
                assert len(answer.body["output_ids"]) == 1
        first, second = await stage.generate("session-1"), await stage.generate("session-12")
        assert {first.by, second.by} == {"a", "b"}  # a common beginning means nothing

    run(stage, scenario)


def test_the_replica_sees_the_session_and_the_version_asked_for(stage):
    seen = []

    def policy(call):
        seen.append(call.session_id)
        return certain_reply([1])

    async def scenario():
        async with ScriptedEngine(policy, weight_version=3) as engine:
            stage.urls["a"] = engine.url
            await stage.register("a", version=9)  # the router believes it; the engine knows better
            assert (await stage.generate("the one", headers={"X-Min-Version": "3"})).status == 200
            answer = await stage.generate("the one", headers={"X-Min-Version": "4"})
            assert answer.status == 409
            assert "version 3 is older than 4" in str(answer.body)
            assert (await stage.replica("a"))["faults"] == 0

    run(stage, scenario, replicas=())
    assert seen == ["the one"]


def test_a_binary_answer_passes_through_byte_by_byte(stage):
    sent = bytes(range(256)) * 40
    seen = []

    async def answer(call):
        seen.append(call.headers["Accept"])
        return reply_bytes(sent, content_type=protocol.GENERATION_TYPE)

    async def scenario():
        engine = JsonServer({("POST", "/generate"): answer})
        await engine.start(host="127.0.0.1")
        stage.urls["a"] = engine.url
        await stage.register("a")
        for accept in (protocol.GENERATION_TYPE, "application/json"):
            async with stage.http.post(
                stage.urls["router"] + "/generate",
                json={},
                headers={"X-Session-Id": "s", "Accept": accept},
            ) as response:
                assert response.content_type == protocol.GENERATION_TYPE
                assert await response.read() == sent
        await engine.stop()

    run(stage, scenario, replicas=())
    assert seen == [protocol.GENERATION_TYPE, "application/json"]


def test_header_names_are_those_of_the_engine_protocol():
    for name in (
        "SESSION", "MIN_VERSION", "POOL", "REPLICA", "NUMERICS", "REHOMED", "GROUP",
        "REQUEST_ID", "TIMEOUT",
    ):  # fmt: skip
        assert getattr(headers, name) == getattr(protocol, f"{name}_HEADER")


def test_open_sessions_follow_speed(stage):
    async def scenario():
        await stage.register("a", speed=4.0)
        answers = await asyncio.gather(*[stage.generate(f"s{i}", takes_s=1.0) for i in range(50)])
        assert [sum(answer.by == name for answer in answers) for name in "ab"] == [40, 10]

    run(stage, scenario)


def test_a_request_in_flight_on_a_killed_replica_is_answered_by_another(stage):
    async def scenario():
        home = (await stage.generate("s")).by
        waiting = asyncio.create_task(stage.generate("s", takes_s=1.0))

        async def is_there():
            return await stage.num_running(home) == 1

        await until(is_there)  # the fault hits live work
        stage.kill(home)
        answer = await waiting
        assert (answer.status, answer.by, answer.moves) == (200, other(home), 1)
        assert len(answer.body["output_ids"]) == 21
        answer = await stage.generate("s")
        assert (answer.by, answer.moves) == (other(home), 1)
        dead = await stage.replica(home)
        assert (dead["state"], dead["in_flight"], dead["sessions"]) == ("dead", 0, 0)
        assert dead["faults"] == 1
        assert await stage.metric("rlmix_router_rehomed_total") == 1
        assert await stage.metric("rlmix_router_lost_requests_total") == 1
        # Between two turns the same happens at the next one.
        third = (await stage.generate("t")).by
        assert third == other(home)
        stage.kill(third)
        await stage.start_replicas(home)
        answer = await stage.generate("s")
        assert (answer.by, answer.moves) == (home, 2)

    run(stage, scenario)


@pytest.mark.parametrize("fault", ["cut", "truncate"])
def test_a_connection_that_breaks_once_is_no_death_and_one_that_breaks_twice_is(stage, fault):
    async def scenario():
        home = (await stage.generate("s")).by
        await stage.fail_next(home, fault)
        answer = await stage.generate("s")
        assert (answer.status, answer.by, answer.moves) == (200, home, 0)
        assert await stage.metric("rlmix_router_reconnects_total") == 1
        await stage.fail_next(home, fault, times=2)
        answer = await stage.generate("s")
        assert (answer.status, answer.by, answer.moves) == (200, other(home), 1)
        assert (await stage.replica(home))["state"] == "dead"
        await stage.register(home)  # the fleet knows that it is alive
        assert (await stage.generate("t")).by == home

    run(stage, scenario)


def test_a_hung_replica_that_the_fleet_gives_up_loses_its_requests_to_others(stage):
    async def scenario():
        home = (await stage.generate("s")).by
        os.kill(stage.children[home].pid, signal.SIGSTOP)
        waiting = asyncio.create_task(stage.generate("s"))
        await asyncio.sleep(0.3)
        assert not waiting.done()  # the connection is open, and nobody answers
        await stage.admin.put_replica(home, state="dead")
        answer = await asyncio.wait_for(waiting, 5.0)
        assert (answer.status, answer.by, answer.moves) == (200, other(home), 1)

    run(stage, scenario)


def test_a_replica_that_does_not_answer_in_time_is_504_and_not_dead(stage):
    async def scenario():
        await stage.fail_next("a", "hang")
        answer = await stage.generate("s")
        assert answer.status == 504
        assert "replica a did not answer in 0.5 s" in answer.body["error"]
        assert (await stage.generate("s")).status == 200
        assert (await stage.replica("a"))["in_flight"] == 0

    run(stage, scenario, "--request-timeout-s", "0.5", replicas=("a",))


def test_a_replacement_under_the_same_name_serves_those_who_waited(stage):
    async def scenario():
        stage.kill("a")
        waiting = asyncio.create_task(stage.generate("s"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await stage.start_replicas("a")
        answer = await waiting
        assert (answer.status, answer.by) == (200, "a")

    run(stage, scenario, "--queue-timeout-s", "20", replicas=("a",))


def test_a_version_that_the_home_does_not_have_is_409_and_a_new_session_goes_to_one_that_has(stage):
    async def scenario():
        await stage.admin.put_replica("a", version=1)
        wanted = {"X-Min-Version": "1"}
        assert (await stage.generate("new", headers=wanted)).status == 409  # a lied: it has 0
        await stage.admin.put_replica("a", version=0)
        await stage.admin.put_replica("b", version=1, speed=0.1)
        assert (await stage.generate("old")).by == "a"
        answer = await stage.generate("old", headers=wanted)
        assert (answer.status, answer.headers["Retry-After"]) == (409, "1")
        assert "replica a is older than version 1 (it has 0)" in answer.body["error"]
        answer = await stage.generate("newer", headers={"X-Min-Version": "2"})
        assert answer.status == 409
        assert "every ready replica is older than version 2" in answer.body["error"]
        assert (await stage.generate("other", headers=wanted)).by == "b"
        assert (await stage.replica("a"))["faults"] == 0  # being old is not a fault

    run(stage, scenario)


def test_no_ready_replica_is_503_with_retry_after_once_the_wait_is_over(stage):
    async def scenario():
        started_s = time.monotonic()
        answer = await stage.generate("s")
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "no replica is ready (waited 0.3 s)" in answer.body["error"]
        assert time.monotonic() - started_s >= 0.3

    run(stage, scenario, "--queue-timeout-s", "0.3", replicas=())


def test_full_replicas_make_new_sessions_wait_and_an_answer_lets_one_in(stage):
    async def scenario():
        first = asyncio.create_task(stage.generate("s", takes_s=0.5))
        await asyncio.sleep(0.2)
        started_s = time.monotonic()
        assert (await stage.generate("late")).status == 200
        assert time.monotonic() - started_s > 0.1
        assert (await first).status == 200
        blocked = asyncio.create_task(stage.generate("t", takes_s=2.0))
        await asyncio.sleep(0.1)
        answer = await stage.generate("too late")
        assert answer.status == 503
        assert "all ready replicas are full" in answer.body["error"]
        assert (await blocked).status == 200

    options = ("--queue-timeout-s", "1", "--admit-batches", "1")
    run(stage, scenario, *options, replicas=("a",), max_running=1)


def test_a_draining_replica_keeps_its_sessions_and_gets_no_new_one(stage):
    async def scenario():
        home = (await stage.generate("s")).by
        await stage.admin.put_replica(home, state="draining")
        assert (await stage.generate("s")).by == home
        assert {(await stage.generate(f"n{i}")).by for i in range(6)} == {other(home)}
        await stage.admin.delete_replica(home)
        answer = await stage.generate("s")
        assert (answer.status, answer.by, answer.moves) == (200, other(home), 1)

    run(stage, scenario)


def test_errors_of_a_replica_pass_through_and_a_full_one_loses_the_new_session_only(stage):
    async def scenario():
        await stage.fail_next("a", "busy")
        answer = await stage.generate("new")
        assert (answer.status, answer.by, answer.headers["Retry-After"]) == (503, "a", "0.02")
        assert (await stage.replica("a"))["sessions"] == 0
        home = (await stage.generate("s")).by
        for fault, status in [("busy", 503), ("error", 500), ("refuse", 400)]:
            await stage.fail_next(home, fault)
            answer = await stage.generate("s")
            assert (answer.status, answer.by) == (status, home)
        assert (await stage.generate("s")).by == home
        assert (await stage.replica(home))["faults"] == 0

    run(stage, scenario)


def test_a_client_that_hangs_up_ends_its_request_on_the_replica(stage):
    async def scenario():
        await stage.fail_next("a", "hang")
        task = asyncio.create_task(stage.generate("s"))

        async def in_flight(number):
            return (await stage.replica("a"))["in_flight"] == number

        await until(lambda: in_flight(1))
        task.cancel()
        await until(lambda: in_flight(0))
        assert (await stage.replica("a"))["state"] == "ready"
        assert (await stage.admin.sessions())["sessions"][0]["in_flight"] == 0

    run(stage, scenario, replicas=("a",))


def test_released_and_idle_sessions_are_forgotten(stage):
    async def scenario():
        await asyncio.gather(*[stage.generate(f"s{i}") for i in range(20)])
        for expected in (True, False):
            async with stage.http.delete(stage.urls["router"] + "/sessions/s0") as response:
                assert await response.json() == {"released": expected}
        assert (await stage.replica("a"))["sessions"] == 19

        async def is_empty():
            return (await stage.admin.sessions())["num_sessions"] == 0

        await until(is_empty)
        assert (await stage.replica("a"))["sessions"] == 0
        assert await stage.metric("rlmix_router_expired_sessions_total") == 19

    run(stage, scenario, "--idle-expiry-s", "1", replicas=("a",))


def test_without_the_token_nothing_but_ping_is_answered_and_replicas_are_sent_it(stage):
    async def scenario():
        url = stage.urls["router"]
        for method, path in [
            ("POST", "/generate"), ("GET", "/pools"), ("GET", "/sessions"), ("GET", "/replicas"),
            ("PUT", "/replicas/x"), ("DELETE", "/replicas/a"), ("DELETE", "/sessions/x"),
            ("GET", "/metrics"),
        ]:  # fmt: skip
            for sent in ({}, {"Authorization": "Bearer wrong"}):
                async with stage.http.request(method, url + path, headers=sent) as response:
                    assert response.status == 401, (method, path)
        async with stage.http.get(url + "/ping") as response:
            assert response.status == 200
        replica = JsonServer({("POST", "/generate"): remember})
        await replica.start(host="127.0.0.1")
        stage.urls["a"] = replica.url
        await stage.register("a")
        answer = await stage.generate("s", headers={"Authorization": "Bearer secret"})
        await replica.stop()
        assert answer.status == 200

    async def remember(call):
        seen.append(call.headers["Authorization"])
        return reply_json({})

    seen = []
    run(stage, scenario, replicas=(), token="secret")
    assert seen == ["Bearer secret"]


def test_requests_that_make_no_sense_are_refused_with_the_reason(stage):
    async def scenario():
        async with stage.http.post(stage.urls["router"] + "/generate", json={}) as response:
            assert response.status == 400
            assert "X-Session-Id" in (await response.json())["error"]
        answer = await stage.generate("s", headers={"X-Min-Version": "x"})
        assert (answer.status, "X-Min-Version" in answer.body["error"]) == (400, True)
        with pytest.raises(EngineError, match="missing pool, url"):
            await stage.admin.put_replica("new", state="ready")
        with pytest.raises(EngineError, match=r"state 'reddy' is none of starting, ready"):
            await stage.admin.put_replica("a", state="reddy")
        with pytest.raises(EngineError, match="unknown field 'sped'"):
            await stage.admin.put_replica("a", sped=2.0)
        with pytest.raises(EngineError, match="speed must be above 0"):
            await stage.admin.put_replica("a", speed=0)

    run(stage, scenario, replicas=("a",))


def test_two_hundred_sessions_survive_the_death_of_one_of_three_replicas(stage):
    async def session(number: int) -> list[str]:
        homes = []
        for _ in range(8):
            answer = await stage.generate(f"s{number}", takes_s=0.3)
            assert answer.status == 200
            homes.append(answer.by)
        return homes

    async def scenario():
        tasks = [asyncio.create_task(session(i)) for i in range(200)]

        async def first_turns_are_done_and_others_run():
            victim = await stage.replica("b")
            return victim["turns"] >= victim["sessions"] > 0 and victim["in_flight"] > 0

        await until(first_turns_are_done_and_others_run, timeout_s=20)
        stage.kill("b")
        histories = await asyncio.gather(*tasks)
        moved = [homes for homes in histories if len(set(homes)) > 1]
        assert moved
        assert all(homes[0] == "b" and homes[-1] != "b" for homes in moved)
        pools = (await stage.admin.pools())["pools"]
        assert pools["pool_b"]["ready"] == 0
        assert sum(pool["sessions"] for pool in pools.values()) == 200
        assert all(pool["in_flight"] == 0 for pool in pools.values())
        assert await stage.metric("rlmix_router_lost_requests_total") > 0

    run(stage, scenario, replicas=("a", "b", "c"), max_running=200)


def test_an_unknown_policy_ends_the_router_with_the_names_it_knows():
    argv = [sys.executable, "-m", "rlmix.router", "--policy", "magic"]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 2
    assert "shortest_delay, least_sessions" in done.stderr


def test_the_admin_client_says_which_router_it_could_not_reach():
    async def scenario():
        admin = RouterAdmin("http://127.0.0.1:9", timeout_s=1.0)
        try:
            await admin.replicas()
        finally:
            await admin.close()

    with pytest.raises(EngineError, match=r"GET http://127\.0\.0\.1:9/replicas failed 3 times"):
        asyncio.run(scenario())
