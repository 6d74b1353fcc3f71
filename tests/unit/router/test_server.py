"""The router as its clients meet it: real processes, real sockets, real deaths."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlmix.core.errors import EngineError
from rlmix.engine import protocol
from rlmix.router import server
from rlmix.router.client import RouterAdmin


def run(stage, scenario, *router_arguments, replicas=("a", "b"), token=None, **fields):
    async def whole():
        async with stage:
            await stage.start_router(*router_arguments, token=token)
            if replicas:
                await stage.start_replicas(*replicas, **fields)
            return await scenario()

    return asyncio.run(whole())


async def until(condition, timeout_s=5.0):
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.02)


def test_a_session_stays_where_it_began_and_the_answer_names_the_replica(stage):
    async def scenario():
        first = [await stage.generate(f"s{i}") for i in range(6)]
        homes = {f"s{i}": body["by"] for i, (_, body, _) in enumerate(first)}
        assert sorted(homes.values()) == ["a", "a", "a", "b", "b", "b"]
        for _ in range(3):
            for session_id, home in homes.items():
                status, body, headers = await stage.generate(session_id)
                assert (status, body["by"]) == (200, home)
                assert headers["X-Rlmix-Replica"] == home
                assert headers["X-Rlmix-Pool"] == f"pool_{home}"
                assert headers["X-Rlmix-Numerics"] == f"key_{home}"
                assert headers["X-Rlmix-Rehomed"] == "0"

    run(stage, scenario)


def test_the_replica_sees_the_session_the_version_asked_for_and_the_token(stage):
    async def scenario():
        sent = {"X-Min-Version": "0", "Authorization": "Bearer secret"}
        _, body, _ = await stage.generate("s", headers=sent)
        assert body["headers"] == {"X-Session-Id": "s", **sent}

    run(stage, scenario, token="secret")


def test_header_names_are_those_of_the_engine_protocol():
    names = {
        protocol.SESSION_HEADER, protocol.MIN_VERSION_HEADER, protocol.POOL_HEADER,
        protocol.REPLICA_HEADER, protocol.NUMERICS_HEADER, protocol.REHOMED_HEADER,
    }  # fmt: skip
    text = Path(server.__file__).read_text()
    assert all(f'"{name}"' in text for name in names)


def test_ids_that_share_a_beginning_are_different_sessions(stage):
    async def scenario():
        first = (await stage.generate("session-1"))[1]["by"]
        second = (await stage.generate("session-12"))[1]["by"]
        assert {first, second} == {"a", "b"}

    run(stage, scenario)


def test_open_sessions_follow_speed(stage):
    async def scenario():
        await stage.register("a", speed=4.0)
        answers = await asyncio.gather(*[stage.generate(f"s{i}", sleep_s=0.3) for i in range(50)])
        counts = [sum(body["by"] == name for _, body, _ in answers) for name in "ab"]
        assert counts == [40, 10]

    run(stage, scenario)


def test_a_request_in_flight_on_a_killed_replica_is_answered_by_another(stage):
    async def scenario():
        home = (await stage.generate("s"))[1]["by"]
        other = "b" if home == "a" else "a"
        waiting = asyncio.create_task(stage.generate("s", sleep_s=1.0))

        async def is_there():
            return (await stage.replica(home))["in_flight"] == 1

        await until(is_there)  # the fault hits live work
        stage.kill(home)
        status, body, headers = await waiting
        assert (status, body["by"], headers["X-Rlmix-Rehomed"]) == (200, other, "1")
        status, body, headers = await stage.generate("s")
        assert (status, body["by"], headers["X-Rlmix-Rehomed"]) == (200, other, "1")
        dead = await stage.replica(home)
        assert (dead["state"], dead["in_flight"], dead["sessions"], dead["faults"]) == (
            "dead", 0, 0, 1,
        )  # fmt: skip
        assert await stage.metric("rlmix_router_rehomed_total") == 1
        assert await stage.metric("rlmix_router_lost_requests_total") == 1

    run(stage, scenario)


def test_a_session_between_turns_moves_when_its_replica_has_died(stage):
    async def scenario():
        home = (await stage.generate("s"))[1]["by"]
        stage.kill(home)
        status, body, headers = await stage.generate("s")
        assert status == 200
        assert body["by"] != home
        assert headers["X-Rlmix-Rehomed"] == "1"

    run(stage, scenario)


def test_a_hung_replica_that_the_fleet_gives_up_loses_its_requests_to_others(stage):
    async def scenario():
        home = (await stage.generate("s"))[1]["by"]
        os.kill(stage.children[home].pid, signal.SIGSTOP)
        waiting = asyncio.create_task(stage.generate("s"))
        await asyncio.sleep(0.3)
        assert not waiting.done()  # the connection is open, and nobody answers
        await stage.admin.put_replica(home, state="dead")
        status, body, headers = await asyncio.wait_for(waiting, 2.0)
        assert (status, headers["X-Rlmix-Rehomed"]) == (200, "1")
        assert body["by"] != home

    run(stage, scenario)


def test_a_replacement_under_the_same_name_serves_again(stage):
    async def scenario():
        stage.kill("a")
        stage.kill("b")
        waiting = asyncio.create_task(stage.generate("s"))
        await asyncio.sleep(0.3)
        assert not waiting.done()  # both are gone; the request waits for a place
        await stage.start_replicas("a")
        status, body, _ = await waiting
        assert (status, body["by"]) == (200, "a")

    run(stage, scenario, "--queue-timeout-s", "10")


def test_a_version_that_the_home_does_not_have_is_409_and_a_new_session_goes_to_one_that_has(stage):
    async def scenario():
        await stage.register("b", version=3, speed=0.1)
        wanted = {"X-Min-Version": "3"}
        status, body, _ = await stage.generate("new", headers=wanted)
        assert (status, body["by"]) == (200, "b")
        assert (await stage.generate("old"))[1]["by"] == "a"
        status, body, headers = await stage.generate("old", headers=wanted)
        assert (status, headers["Retry-After"]) == (409, "1")
        assert "replica a is older than version 3 (it has 0)" in body["error"]
        status, body, _ = await stage.generate("newer", headers={"X-Min-Version": "4"})
        assert status == 409
        await stage.admin.put_replica("a", version=3)
        assert (await stage.generate("old", headers=wanted))[0] == 200
        assert (await stage.replica("a"))["faults"] == 0  # being old is not a fault

    run(stage, scenario)


def test_no_ready_replica_is_503_with_retry_after_once_the_wait_is_over(stage):
    async def scenario():
        started_s = time.monotonic()
        status, body, headers = await stage.generate("s")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "no replica is ready (waited 0.3 s)" in body["error"]
        assert 0.3 <= time.monotonic() - started_s < 2

    run(stage, scenario, "--queue-timeout-s", "0.3", replicas=())


def test_full_replicas_make_new_sessions_wait_and_an_answer_lets_one_in(stage):
    async def scenario():
        first = [asyncio.create_task(stage.generate(f"s{i}", sleep_s=0.5)) for i in range(2)]
        await asyncio.sleep(0.2)
        started_s = time.monotonic()
        status, _, _ = await stage.generate("late")
        assert status == 200
        assert 0.1 < time.monotonic() - started_s < 2.0
        assert all(status == 200 for status, _, _ in await asyncio.gather(*first))
        blocked = [asyncio.create_task(stage.generate(f"t{i}", sleep_s=1.5)) for i in range(2)]
        await asyncio.sleep(0.1)
        status, body, _ = await stage.generate("too late")
        assert status == 503
        assert "full" in body["error"]
        await asyncio.gather(*blocked)

    run(stage, scenario, "--queue-timeout-s", "1", max_running=1)


def test_a_draining_replica_keeps_its_sessions_and_gets_no_new_one(stage):
    async def scenario():
        home = (await stage.generate("s"))[1]["by"]
        await stage.admin.put_replica(home, state="draining")
        assert (await stage.generate("s"))[1]["by"] == home
        others = {(await stage.generate(f"n{i}"))[1]["by"] for i in range(6)}
        assert home not in others
        await stage.admin.delete_replica(home)
        status, body, headers = await stage.generate("s")
        assert (status, headers["X-Rlmix-Rehomed"]) == (200, "1")
        assert body["by"] != home

    run(stage, scenario)


def test_errors_of_a_replica_pass_through_and_a_full_one_loses_the_new_session_only(stage):
    async def scenario():
        status, body, headers = await stage.generate("new", status=503)
        assert (status, headers["Retry-After"], body["by"]) == (503, "7", "a")
        assert (await stage.replica("a"))["sessions"] == 0
        home = (await stage.generate("s"))[1]["by"]
        assert (await stage.generate("s", status=503))[0] == 503
        assert (await stage.generate("s", status=500))[0] == 500
        assert (await stage.generate("s"))[1]["by"] == home

    run(stage, scenario)


def test_a_client_that_hangs_up_ends_its_request_on_the_replica(stage):
    async def scenario():
        task = asyncio.create_task(stage.generate("s", sleep_s=30.0))

        async def running(number):
            async with stage.http.get(stage.urls["a"] + "/counts") as response:
                return (await response.json())["running"] == number

        await until(lambda: running(1))
        task.cancel()
        await until(lambda: running(0))
        assert (await stage.replica("a"))["in_flight"] == 0
        assert (await stage.replica("a"))["state"] == "ready"

    run(stage, scenario, replicas=("a",))


def test_released_and_idle_sessions_are_forgotten(stage):
    async def scenario():
        for i in range(20):
            await stage.generate(f"s{i}")
        async with stage.http.delete(stage.urls["router"] + "/sessions/s0") as response:
            assert await response.json() == {"released": True}
        async with stage.http.delete(stage.urls["router"] + "/sessions/s0") as response:
            assert await response.json() == {"released": False}
        listed = await stage.admin.sessions()
        assert listed["num_sessions"] == 19

        async def is_empty():
            return (await stage.admin.sessions())["num_sessions"] == 0

        await until(is_empty, timeout_s=8)
        assert (await stage.replica("a"))["sessions"] == 0
        assert await stage.metric("rlmix_router_expired_sessions_total") == 19

    run(stage, scenario, "--idle-expiry-s", "0.5", replicas=("a",))


def test_without_the_token_nothing_but_ping_is_answered(stage):
    async def scenario():
        url = stage.urls["router"]
        for method, path in [
            ("POST", "/generate"), ("GET", "/pools"), ("GET", "/sessions"), ("GET", "/replicas"),
            ("PUT", "/replicas/x"), ("DELETE", "/replicas/a"), ("DELETE", "/sessions/x"),
            ("GET", "/metrics"),
        ]:  # fmt: skip
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                async with stage.http.request(method, url + path, headers=headers) as response:
                    assert response.status == 401, (method, path)
        async with stage.http.get(url + "/ping") as response:
            assert response.status == 200
        right = {"Authorization": "Bearer secret"}
        assert (await stage.generate("s", headers=right))[0] == 200

    run(stage, scenario, replicas=("a",), token="secret")


def test_requests_that_make_no_sense_are_refused_with_the_reason(stage):
    async def scenario():
        async with stage.http.post(stage.urls["router"] + "/generate", json={}) as response:
            assert response.status == 400
            assert "X-Session-Id" in (await response.json())["error"]
        status, body, _ = await stage.generate("s", headers={"X-Min-Version": "x"})
        assert (status, "X-Min-Version" in body["error"]) == (400, True)
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
        for _ in range(4):
            status, body, _ = await stage.generate(f"s{number}", sleep_s=0.15)
            assert status == 200
            homes.append(body["by"])
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
        assert all(homes[-1] != "b" for homes in histories)
        assert all(homes[0] == "b" for homes in moved)
        pools = (await stage.admin.pools())["pools"]
        assert pools["pool_b"]["ready"] == 0
        assert sum(pool["sessions"] for pool in pools.values()) == 200
        assert all(pool["in_flight"] == 0 for pool in pools.values())
        assert await stage.metric("rlmix_router_lost_requests_total") > 0

    run(stage, scenario, replicas=("a", "b", "c"), max_running=200)


def test_an_unknown_policy_ends_the_router_with_the_names_it_knows(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlmix.router", "--policy", "magic"], capture_output=True, text=True
    )
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
