"""Places are taken before connections, waiters are served in order, the lost stay lost."""

import asyncio

import pytest

from rlmix.router.registry import Registry, ReplicaRecord, Upstream
from rlmix.router.strategies import STRATEGIES, Refusal, ReplicaState


def record(name="a", **changes) -> ReplicaRecord:
    facts = {
        "name": name, "pool": "p", "url": f"http://{name}", "numerics_key": "k", "speed": 1.0,
        "max_running": 1, "version": 0, "state": ReplicaState.READY, **changes,
    }  # fmt: skip
    return ReplicaRecord(**facts)


def make_registry(*records: ReplicaRecord, observe_speeds=False) -> Registry:
    registry = Registry(strategy=STRATEGIES["shortest_delay"], observe_speeds=observe_speeds)
    for one in records:
        registry.put(one)
    return registry


def test_a_burst_sees_its_own_members():
    async def scenario():
        registry = make_registry(record("a", max_running=5), record("b", max_running=5))
        places = [await registry.take_place(min_version=None, timeout_s=0) for _ in range(6)]
        return [place.name for place in places]

    assert asyncio.run(scenario()) == ["a", "b", "a", "b", "a", "b"]


def test_waiters_are_served_in_order_as_places_come_free():
    async def scenario():
        registry = make_registry(record("a"))
        first = await registry.take_place(min_version=None, timeout_s=0)
        order = []

        async def wait(number):
            place = await registry.take_place(min_version=None, timeout_s=5)
            order.append(number)
            registry.give_place(place)

        tasks = [asyncio.create_task(wait(i)) for i in range(3)]
        await asyncio.sleep(0)
        assert registry.num_waiting == 3
        registry.give_place(first)
        await asyncio.gather(*tasks)
        return order, registry.upstreams["a"].in_flight, registry.num_waiting

    assert asyncio.run(scenario()) == ([0, 1, 2], 0, 0)


def test_a_waiter_for_a_version_that_is_full_does_not_hold_up_those_behind_it():
    async def scenario():
        registry = make_registry(record("new", version=5), record("old", version=4))
        on_new = await registry.take_place(min_version=5, timeout_s=0)
        on_old = await registry.take_place(min_version=None, timeout_s=0)
        strict = asyncio.create_task(registry.take_place(min_version=5, timeout_s=5))
        easy = asyncio.create_task(registry.take_place(min_version=None, timeout_s=5))
        await asyncio.sleep(0)
        registry.give_place(on_old)
        assert (await easy).name == "old"
        assert not strict.done()
        registry.give_place(on_new)
        return (await strict).name

    assert asyncio.run(scenario()) == "new"


def test_a_cancelled_waiter_leaves_no_place_taken():
    async def scenario():
        registry = make_registry(record("a"))
        first = await registry.take_place(min_version=None, timeout_s=0)
        waiting = asyncio.create_task(registry.take_place(min_version=None, timeout_s=5))
        await asyncio.sleep(0)
        registry.give_place(first)  # the waiter has the place now, and has not woken up
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        return registry.upstreams["a"].in_flight, registry.num_waiting

    assert asyncio.run(scenario()) == (0, 0)


def test_the_wait_ends_with_the_reason():
    async def scenario():
        empty = make_registry()
        full = make_registry(record("a"))
        await full.take_place(min_version=None, timeout_s=0)
        old = make_registry(record("a"))
        return [
            await empty.take_place(min_version=None, timeout_s=0.01),
            await full.take_place(min_version=None, timeout_s=0.01),
            await old.take_place(min_version=1, timeout_s=60),
        ]

    assert asyncio.run(scenario()) == [Refusal.NONE_READY, Refusal.ALL_FULL, Refusal.TOO_OLD]


def test_a_waiter_gets_the_replica_that_becomes_ready():
    async def scenario():
        registry = make_registry(record("a", state=ReplicaState.STARTING))
        waiting = asyncio.create_task(registry.take_place(min_version=None, timeout_s=5))
        await asyncio.sleep(0)
        registry.put(record("a"))
        return (await waiting).name

    assert asyncio.run(scenario()) == "a"


def test_losing_a_replica_cancels_what_is_under_way_and_only_a_new_record_brings_it_back():
    async def scenario():
        registry = make_registry(record("a"))
        before = registry.upstreams["a"]
        task = asyncio.create_task(asyncio.sleep(60))
        before.requests.add(task)
        registry.put(record("a", state=ReplicaState.QUARANTINED))
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()
        assert not before.keeps_sessions
        assert await registry.take_place(min_version=None, timeout_s=0) is Refusal.NONE_READY
        after = registry.put(record("a", url="http://elsewhere"))
        assert after is not before
        assert before.is_lost
        return await registry.take_place(min_version=None, timeout_s=0)

    place = asyncio.run(scenario())
    assert isinstance(place, Upstream)
    assert place.url == "http://elsewhere"


def test_an_updated_record_keeps_the_replicas_requests_and_history():
    registry = make_registry(record("a"))
    before = registry.upstreams["a"]
    before.observe_turn(2.0, 4.0)
    after = registry.put(record("a", version=7, state=ReplicaState.DRAINING))
    assert after is before
    assert (after.version, after.turns, after.keeps_sessions) == (7, 1, True)


def test_the_observed_rate_is_requests_in_flight_over_turn_time():
    upstream = Upstream(record("a"))
    upstream.observe_turn(2.0, 4.0)
    assert upstream.turns_per_s == pytest.approx(2.0)
    upstream.observe_turn(1.0, 4.0)
    assert upstream.turns_per_s == pytest.approx(3.0)  # the mean of 2 and 4


def test_speeds_follow_observation_only_when_asked():
    for observe, expected in [(False, 1.0), (True, (2 / 1.5) ** 0.5)]:
        registry = make_registry(record("a"), record("b"), observe_speeds=observe)
        for _ in range(32):
            registry.upstreams["a"].observe_turn(1.0, 2.0)
            registry.upstreams["b"].observe_turn(1.0, 1.0)
        registry.refresh_speeds()
        assert registry.upstreams["a"].speed == pytest.approx(expected)


def test_the_busy_share_is_learned_from_turns_and_pauses():
    registry = make_registry()
    for _ in range(2000):
        registry.observe_session(model_s=1.0, tool_s=3.0)
    assert registry.busy_frac == pytest.approx(0.25, abs=0.01)
