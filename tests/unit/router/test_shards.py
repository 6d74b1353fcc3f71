"""Several router processes behind one port: who owns a session, what is shared, what survives."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from rlmix.router.merge import merge
from rlmix.router.shards import owner_of


async def until(condition, timeout_s=60.0):
    deadline_s = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline_s, "the condition did not come true"
        await asyncio.sleep(0.05)


def test_owners_are_stable_and_shared_out():
    assert [owner_of(f"session-{n}", 2) for n in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    counts = [0] * 4
    for n in range(4000):
        counts[owner_of(f"s{n}", 4)] += 1
    assert min(counts) > 900


def shard_pids(stage) -> list[int]:
    return [child.pid for child in psutil.Process(stage.children["router"].pid).children()]


def test_sessions_keep_their_shard_and_replica_and_survive_a_shards_death(stage):
    sessions = [f"session-{n}" for n in range(8)]

    async def scenario():
        async with stage:
            await stage.start_router("--shards", "2", "--probe-every-s", "0")
            await stage.start_replicas("a", "b", view="bf16")
            homes = {}
            owners = {}
            for session_id in sessions:
                answer = await stage.generate(session_id)
                assert answer.status == 200
                homes[session_id] = answer.by
                owners[session_id] = answer.headers["X-Rlmix-Shard"]
            assert len(set(owners.values())) == 2
            assert {owners[s] for s in sessions[:4]}.isdisjoint({owners[s] for s in sessions[4:]})
            # Asked directly, the owner answers, and any shard tells of all sessions.
            assert (await stage.admin.sessions())["num_sessions"] == 8
            assert await stage.metric("rlmix_router_sessions ") == 8
            replicas = {r["name"]: r for r in await stage.admin.replicas()}
            assert sum(r["sessions"] for r in replicas.values()) == 8
            assert sum(r["turns"] for r in replicas.values()) == 8

            # A turn of the second shard's session is under way, passed on by the first shard, when
            # the second dies: its successor is sent the turn again.
            entry = stage.urls["router"]
            async with stage.http.get(owners[sessions[4]] + "/ping") as response:
                victim = (await response.json())["pid"]
            stage.urls["router"] = owners[sessions[0]]
            waiting = asyncio.create_task(stage.generate(sessions[4], takes_s=2.0))

            async def runs():
                return await stage.num_running(homes[sessions[4]]) == 1

            await until(runs)
            os.kill(victim, signal.SIGKILL)
            answer = await asyncio.wait_for(waiting, 60)
            assert (answer.status, answer.by) == (200, homes[sessions[4]])
            assert len(shard_pids(stage)) == 2
            assert victim not in shard_pids(stage)
            stage.urls["router"] = entry

            async def answered(session_id):
                try:
                    answer = await stage.generate(session_id)
                except OSError:
                    return False  # The connection was one to the dead shard.
                if answer.status != 200:
                    return False
                # The same replica as before: homes outlive the shard, replicas came from the other.
                assert (answer.by, answer.moves) == (homes[session_id], 0)
                return True

            for session_id in sessions:
                await until(lambda one=session_id: answered(one))

    asyncio.run(scenario())


def test_no_shard_outlives_its_supervisor(stage):
    async def scenario():
        async with stage:
            await stage.start_router("--shards", "2")
            pids = shard_pids(stage)
            assert len(pids) == 2
            os.kill(stage.children["router"].pid, signal.SIGKILL)

            async def all_gone():
                return not any(psutil.pid_exists(pid) for pid in pids)

            await until(all_gone)

    asyncio.run(scenario())


def test_answers_of_shards_are_added_up_and_facts_taken_once():
    texts = [
        b'# TYPE rlmix_router_turns_total counter\nrlmix_router_turns_total{r="a"} 3\n'
        b'rlmix_router_speed{r="a"} 2\n',
        b'# TYPE rlmix_router_turns_total counter\nrlmix_router_turns_total{r="a"} 4\n'
        b'rlmix_router_speed{r="a"} 4\nrlmix_router_turns_total{r="b"} 1\n',
    ]
    body, kind = merge("/metrics", texts)
    assert kind == "text/plain"
    assert body.decode().splitlines()[1:] == [
        'rlmix_router_turns_total{r="a"} 7', 'rlmix_router_speed{r="a"} 3',
        'rlmix_router_turns_total{r="b"} 1',
    ]  # fmt: skip


@pytest.mark.parametrize("flag", [("--shards", "0")])
def test_wrong_numbers_of_shards_are_refused(flag):
    from rlmix.router.__main__ import main

    assert main(list(flag)) == 2
